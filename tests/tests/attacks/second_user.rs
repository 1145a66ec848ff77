//! A second user of the same hosts, with any program, against every listener, file, socket and process of Coracle.
//!
//! Each attack is tests/clients/attacker.py, run by `user2`. The owner runs it too and must succeed; otherwise the attack would
//! prove nothing.

use std::collections::{BTreeMap, BTreeSet};

use e2e::{Cluster, HOSTS, Lab, Process, Role, pod, runs, wait_until};
use rustix::process::Signal;
use serde_json::{Value, json};

pub const ATTACKER: &str = "/usr/bin/python3 /opt/coracle-src/tests/clients/attacker.py";
/// The test's own files, in the home directory of `user1`.
const DIR: &str = "second-user";
const STATE: &str = include_str!("../../../docs/state.md");

/// Wraps `srun`, and keeps the standard input that the leader passes to agents: it contains the token and the cluster's secret.
const SRUN: &str = r#"#!/bin/bash
umask 077
case "$*" in
*"internal node"*) exec /usr/bin/srun "$@" < <(exec tee -a ~/second-user/handover) ;;
*) exec /usr/bin/srun "$@" ;;
esac
"#;

/// Writes values that only the pod's owner may read. Each value names its location.
const POD: &str = "echo value-of-local > /vol/local/file; echo value-of-shared > /vol/shared/file
    echo value-of-empty > /vol/empty/file; echo value-of-host-path > /vol/host/file; echo value-of-shm > /dev/shm/file
    chmod 666 /vol/*/file /dev/shm/file; echo value-of-log; trap exit TERM; while true; do sleep 1; done";
const PLACES: [&str; 6] = ["local", "shared", "empty", "shm", "log", "secret"];
/// Not a secret: an argument of the pod's process, which every user of the host can see.
const VISIBLE: &str = "visible-argument-of-a-pod";

#[test]
fn second_user_cannot_access_a_cluster() {
    let lab = Lab::ready();
    lab.load_busybox();
    lab.remove(DIR);
    let squatters = Squatters::settle(&lab);
    // Some sites let users read each other's home directories.
    let mode = lab.root("login", "stat -c %a /home/user1").stdout;
    lab.root("login", "chmod 755 /home/user1").succeeded();
    lab.write(&format!("{DIR}/srun"), SRUN);
    let start = format!(
        "chmod 700 {DIR} {DIR}/srun && PATH=~/{DIR}:$PATH && srun -N2 -wnode[1-2] coracle run bash"
    );
    let mut cluster = Cluster::hold(lab.sh(&start).start());
    let names = ["victim-node1", "victim-node2"];
    cluster.create_objects(&workload());
    for name in names {
        cluster.wait_for(name, "condition=Ready");
    }

    let secrets = secrets(&lab, &mut cluster);
    for host in HOSTS {
        let theirs = processes(&lab, host);
        processes_are_closed(&lab, &mut cluster, host, &theirs);
        files_are_closed(&lab, host);
        no_secret_is_found(&lab, host, &theirs, &secrets);
        sockets_are_closed(&lab, host, &theirs);
    }
    each_secret_can_be_found_by_root(&lab, &secrets);

    let listeners = listeners(&lab);
    are_documented(&listeners);
    credentials_of_another_cluster_open_nothing(&lab, &mut cluster, &listeners);
    garbage_and_crowds_keep_nobody_out(&lab, &mut cluster, &listeners);

    for name in names {
        let now = cluster.pod(name);
        let status = e2e::container(&now, "c");
        assert_eq!(status["restartCount"], 0, "{status}");
    }
    cluster.ask("kubectl delete pod --all --grace-period=1");
    squatters.grow_old(&lab);
    cluster.exit(0);
    // These commands must terminate in spite of the second user's files.
    lab.call(&["coracle", "logs"]).run();
    lab.call(&["srun", "-N1", "-wnode1", "coracle", "doctor"])
        .run()
        .succeeded();
    squatters.are_untouched(&lab);
    lab.root("login", &format!("chmod {} /home/user1", mode.trim()))
        .succeeded();
    lab.remove(DIR);
    lab.nothing_left();
}

fn workload() -> Vec<Value> {
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "precious"},
        "stringData": {"key": "value-of-secret"}});
    let mut objects = vec![secret];
    for node in ["node1", "node2"] {
        for class in ["local", "shared"] {
            objects.push(json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
                "metadata": {"name": format!("{class}-{node}")},
                "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": class,
                    "resources": {"requests": {"storage": "1Mi"}}}}));
        }
        let claim = |class: &str| json!({"name": class, "persistentVolumeClaim": {"claimName": format!("{class}-{node}")}});
        let host = format!("/home/user1/{DIR}/host");
        let volumes = json!([claim("local"), claim("shared"), {"name": "empty", "emptyDir": {}},
            {"name": "secret", "secret": {"secretName": "precious", "defaultMode": 0o444}},
            {"name": "host", "hostPath": {"path": host, "type": "DirectoryOrCreate"}}]);
        let mounts: Vec<Value> = ["local", "shared", "empty", "secret", "host"]
            .iter()
            .map(|name| json!({"name": name, "mountPath": format!("/vol/{name}")}))
            .collect();
        let command = json!(["sh", "-c", POD, VISIBLE]);
        let from = json!({"secretKeyRef": {"name": "precious", "key": "key"}});
        let env = json!([{"name": "SECRET", "valueFrom": from}]);
        let more = json!({"command": command, "volumeMounts": mounts, "env": env});
        let affinity =
            json!({"nodeSelector": {"kubernetes.io/hostname": node}, "volumes": volumes});
        objects.push(pod(
            &format!("victim-{node}"),
            affinity,
            &[runs("c", "", more)],
        ));
    }
    objects
}

/// The processes of `user1` and of its subordinate IDs.
pub fn processes(lab: &Lab, host: &str) -> Vec<Process> {
    let is_theirs = |process: &Process| {
        let id = process.user.parse().unwrap_or(0_u32);
        process.user == "user1" || (200_000..265_536).contains(&id)
    };
    let all = lab.processes(host).into_iter();
    all.filter(is_theirs).collect()
}

/// Runs the attacker's program; returns the successful operations and their objects.
#[track_caller]
pub fn attack(
    lab: &Lab,
    host: &str,
    user: &str,
    command: &str,
    order: &Value,
) -> BTreeSet<(String, String)> {
    let script = format!("{ATTACKER} {command}");
    let call = lab
        .sh(&script)
        .user(user)
        .on(host)
        .stdin(&order.to_string());
    let output = call.within(120).run().succeeded();
    let lines = output.stdout.lines();
    let pairs = lines.filter_map(|line| line.split_once(' '));
    pairs
        .map(|(way, what)| (way.to_owned(), what.to_owned()))
        .collect()
}

pub fn ways(succeeded: &BTreeSet<(String, String)>) -> BTreeSet<&str> {
    succeeded.iter().map(|(way, _)| way.as_str()).collect()
}

fn processes_are_closed(lab: &Lab, cluster: &mut Cluster, host: &str, theirs: &[Process]) {
    let pids: Vec<u32> = theirs.iter().map(|process| process.pid).collect();
    let order = json!({"pids": pids});
    let got = attack(lab, host, "user2", "processes", &order);
    let named = |pid: &str| theirs.iter().find(|p| p.pid.to_string() == pid);
    let got: Vec<_> = got.iter().map(|(way, pid)| (way, named(pid))).collect();
    assert!(got.is_empty(), "{host}: {got:#?}");
    if host != "node1" {
        return;
    }
    let own = cluster.ask("echo $PPID").trim().parse::<u32>();
    let own = json!({"pids": [own.expect("a pid")]});
    let mut possible = attack(lab, host, "user1", "processes", &own);
    // For kernels on which users may trace only their own descendants (Yama).
    possible.extend(attack(lab, host, "root", "processes", &own));
    let all = [
        "environ",
        "maps",
        "auxv",
        "io",
        "ns/net",
        "fd",
        "root",
        "cwd",
        "map_files",
        "link",
        "memory",
        "memory-copy",
        "descriptor",
        "score",
        "limits",
        "priority",
        "processors",
        "signal",
        "trace",
    ];
    assert_eq!(ways(&possible), BTreeSet::from(all));
}

/// Files of `user1` and its pods in directories that other users can enter.
fn files(lab: &Lab, host: &str) -> Vec<String> {
    let found = lab.root(
        host,
        "find /tmp /var/tmp /dev/shm /dev/mqueue /run /home/user1/.local/share/coracle /home/user1/.cache/coracle \
         '(' -user user1 -o -uid +199999 ')' -not -path '*/layers/*/*' -not -path '/run/coracle*' 2> /dev/null",
    );
    found.stdout.lines().map(str::to_owned).collect()
}

/// Operations on these paths that succeed for the second user, and should not.
pub fn open_files(lab: &Lab, host: &str, paths: &[String]) -> BTreeSet<(String, String)> {
    let order = json!({"paths": paths});
    let got = attack(lab, host, "user2", "files", &order);
    // Upstream's programs and bootstrap objects are not secret.
    let open = [
        "/home/user1/.local/share/coracle/kubernetes",
        "/home/user1/.cache/coracle",
    ];
    let is_open = |way: &str, path: &str| {
        ["read", "list"].contains(&way) && open.iter().any(|open| path.starts_with(open))
    };
    let bad = got.into_iter().filter(|(way, path)| !is_open(way, path));
    bad.collect()
}

fn files_are_closed(lab: &Lab, host: &str) {
    let paths = files(lab, host);
    let bad = open_files(lab, host, &paths);
    assert!(bad.is_empty(), "{host}: {bad:#?}");
    let order = json!({"paths": paths});
    let possible = attack(lab, host, "user1", "files", &order);
    let mut all = BTreeSet::from(["read", "write", "list", "create", "remove"]);
    if host == "node1" || host == "node2" {
        all.insert("connect");
    }
    assert_eq!(ways(&possible), all, "{host}");
}

/// Files and directories, including those in /proc, in which values may be.
fn places(theirs: &[Process]) -> Vec<String> {
    let common = [
        "/tmp",
        "/var/tmp",
        "/dev/shm",
        "/dev/mqueue",
        "/run",
        "/home/user1",
    ];
    let mut places: Vec<String> = common.map(str::to_owned).to_vec();
    for Process { pid, .. } in theirs {
        let of_process = [
            "cmdline",
            "environ",
            "fd",
            "root/tmp",
            "root/dev/shm",
            "root/vol",
        ];
        places.extend(of_process.map(|name| format!("/proc/{pid}/{name}")));
        places.extend((0..40).map(|number| format!("/proc/{pid}/fd/{number}")));
    }
    places
}

/// The secret values, by name.
fn secrets(lab: &Lab, cluster: &mut Cluster) -> BTreeMap<String, String> {
    let mut secrets = BTreeMap::new();
    secrets.insert(
        "administrator".to_owned(),
        cluster.ask("echo $K8S_CLUSTER_API_TOKEN"),
    );
    let keys = cluster.ask(
        "cd $(dirname $KUBECONFIG)/pki && for key in *.key; do echo $key $(sed -n 3p $key); done",
    );
    for (name, line) in keys.lines().filter_map(|line| line.split_once(' ')) {
        secrets.insert(name.to_owned(), line.to_owned());
    }
    assert!(secrets.len() > 6, "{secrets:?}");
    let handover = lab.sh(&format!("head -n 1 {DIR}/handover")).run().stdout;
    let handover: Value = serde_json::from_str(&handover).expect("the leader hands over JSON");
    for name in ["token", "secret"] {
        let value = handover[name].as_str().expect("a text").to_owned();
        secrets.insert(format!("handover-{name}"), value);
    }
    for place in PLACES {
        secrets.insert(place.to_owned(), format!("value-of-{place}"));
    }
    for (name, value) in &secrets {
        assert!(value.len() >= 11, "{name}: {value:?}");
    }
    secrets
}

fn no_secret_is_found(
    lab: &Lab,
    host: &str,
    theirs: &[Process],
    secrets: &BTreeMap<String, String>,
) {
    let mut secrets = secrets.clone();
    secrets.insert("visible".to_owned(), VISIBLE.to_owned());
    // The arguments of the pod's script contain the values that it writes.
    let is_script = |name: &str, place: &str| PLACES.contains(&name) && place.ends_with("/cmdline");
    let order = json!({"paths": places(theirs), "secrets": secrets});
    let mut found = attack(lab, host, "user2", "secrets", &order);
    let seen = found.iter().any(|(name, _)| name == "visible");
    assert_eq!(
        seen,
        host == "node1" || host == "node2",
        "{host}: {found:?}"
    );
    found.retain(|(name, place)| name != "visible" && !is_script(name, place));
    assert!(found.is_empty(), "{host}: {found:#?}");
}

fn each_secret_can_be_found_by_root(lab: &Lab, secrets: &BTreeMap<String, String>) {
    let order = json!({"paths": places(&processes(lab, "node1")), "secrets": secrets});
    let found = attack(lab, "node1", "root", "secrets", &order);
    let elsewhere: BTreeSet<(String, String)> = found
        .into_iter()
        .filter(|(_, place)| !place.ends_with("/cmdline"))
        .collect();
    let names: BTreeSet<&str> = secrets.keys().map(String::as_str).collect();
    assert_eq!(ways(&elsewhere), names);
}

/// The socket of a sandbox in its pod's directory, and its name until it is renamed into place.
const SANDBOX_SOCKET: &str = "namespaces.sock";
const SANDBOX_SOCKET_WHEN_BOUND: &str = "/namespaces.new";

/// Tests every Unix socket on which one of these processes listens, in all network namespaces.
pub fn sockets_are_closed(lab: &Lab, host: &str, theirs: &[Process]) {
    let pids: Vec<String> = theirs.iter().map(|p| p.pid.to_string()).collect();
    // Once per namespace: a socket is listed in the namespace in which it was created.
    let script = format!(
        "for pid in $$ {}; do ns=$(readlink /proc/$pid/ns/net) || continue; case \"$seen\" in *$ns*) continue;; esac; \
         seen=\"$seen $ns\"; nsenter --target $pid --net ss -H -l -x -n -p; done",
        pids.join(" ")
    );
    let listed = lab.root(host, &script).stdout;
    let mut sockets = BTreeSet::new();
    let mut sandboxes = BTreeSet::new();
    for line in listed.lines() {
        let owners = line.split("pid=").skip(1);
        let owners = owners.filter_map(|rest| rest.split(',').next());
        for pid in owners.filter(|pid| pids.iter().any(|own| own == pid)) {
            let path = line.split_whitespace().nth(4).unwrap_or_default();
            // A hub renames its socket after bind(2); the kernel keeps the original name.
            let path = path.replace("/hub.new", "/hub.sock");
            if !path.ends_with(SANDBOX_SOCKET_WHEN_BOUND) {
                sockets.insert((path, pid.to_owned()));
            } else {
                sandboxes.insert(pid.to_owned());
            }
        }
    }
    // Sandboxes bind theirs through a descriptor of the pod's directory, so that `ss` does not show its path.
    let find = format!("find /tmp -path '*/pods/*/{SANDBOX_SOCKET}' -type s");
    let found = lab.root(host, &find).stdout;
    let found: Vec<&str> = found.lines().collect();
    assert_eq!(found.len(), sandboxes.len(), "{host}: {found:?}");
    let known = [
        "kubelet.sock",
        "hub.sock",
        "store.sock",
        "peer.sock",
        "egress.sock",
    ];
    let mut paths = Vec::new();
    let mut names = BTreeSet::new();
    for (path, pid) in &sockets {
        let name = path.rsplit('/').next().unwrap_or_default();
        // Abstract sockets begin with `@`. All users of the host can connect to them.
        assert!(
            !path.starts_with('@') && known.contains(&name),
            "{host}: {path} of {pid}"
        );
        assert!(
            STATE.contains(&format!("`{name}`")),
            "docs/state.md lacks {name}"
        );
        names.insert(name);
        if path.starts_with('/') {
            paths.push(path.clone());
            paths.push(format!("/proc/{pid}/root{path}"));
        } else {
            paths.push(format!("/proc/{pid}/cwd/{path}"));
        }
    }
    let wanted = match host {
        "node1" => BTreeSet::from(known),
        "node2" => BTreeSet::from(["kubelet.sock", "hub.sock"]),
        _ => BTreeSet::new(),
    };
    assert_eq!(names, wanted, "{host}");
    paths.extend(found.iter().map(|path| (*path).to_owned()));
    let order = json!({"paths": paths});
    let got = attack(lab, host, "user2", "files", &order);
    assert!(got.is_empty(), "{host}: {got:#?}");
    let possible = attack(lab, host, "user1", "files", &order);
    let connected = possible.iter().filter(|(way, _)| way == "connect").count();
    assert!(
        connected >= wanted.len() + found.len(),
        "{host}: {possible:?}"
    );
}

/// A port on a host's network.
#[derive(Debug, Clone)]
pub struct Listener {
    pub host: &'static str,
    pub port: String,
    /// The row of docs/state.md that describes it.
    pub kind: &'static str,
}

/// All TCP and UDP ports of processes of `user1`.
pub fn listeners(lab: &Lab) -> Vec<Listener> {
    let mut found = Vec::new();
    for host in HOSTS {
        let theirs = processes(lab, host);
        let is = |pid: &str, role: Role| {
            let wanted = lab.try_find(host, "user1", role);
            wanted.is_some_and(|process| process.pid.to_string() == pid)
        };
        let mut of_leader = Vec::new();
        let listed = lab.root(host, "ss -H -l -t -u -n -p").stdout;
        for line in listed.lines() {
            let mut pids = line.split("pid=").skip(1);
            let pid = pids.next().and_then(|rest| rest.split(',').next());
            let pid = pid.unwrap_or_default();
            let Some(process) = theirs.iter().find(|p| p.pid.to_string() == pid) else {
                continue;
            };
            // Skip ports of Slurm's own processes.
            if line.contains("(\"srun\"") {
                continue;
            }
            let address = line.split_whitespace().nth(4).unwrap_or_default();
            let port = address.rsplit(':').next().unwrap_or_default().to_owned();
            if is(pid, Role::Component("kube-apiserver")) {
                found.push(Listener {
                    host,
                    port,
                    kind: "API server",
                });
            } else if is(pid, Role::Agent) {
                found.push(Listener {
                    host,
                    port,
                    kind: "kubelet",
                });
            } else if is(pid, Role::LeaderWorker) {
                of_leader.push(port);
            } else {
                panic!("{host}: unknown listener: {line}: {process:?}");
            }
        }
        if of_leader.is_empty() {
            continue;
        }
        let agent = lab.find("node2", Role::Agent);
        let door = lab.door_of_the_leader("node2", &agent);
        assert!(of_leader.contains(&door), "{of_leader:?}");
        for port in of_leader {
            let kind = if port == door {
                "door"
            } else {
                "metrics.k8s.io"
            };
            found.push(Listener { host, port, kind });
        }
    }
    found
}

/// docs/state.md has a row for each listener, and no others.
fn are_documented(listeners: &[Listener]) {
    let (_, section) = STATE
        .split_once("## Ports on the host's network")
        .expect("that section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter(|line| line.starts_with("| "));
    let rows: Vec<_> = rows.skip(1).collect();
    let kinds: BTreeSet<&str> = listeners.iter().map(|one| one.kind).collect();
    let known: BTreeSet<&str> = kinds.iter().copied().chain(["`hostPort`"]).collect();
    for row in &rows {
        let described = known
            .iter()
            .filter(|kind| row.starts_with(&format!("| {kind}")));
        assert_eq!(
            described.count(),
            1,
            "a listener that is not attacked: {row}"
        );
    }
    assert_eq!(rows.len(), known.len(), "{rows:?}");
    let count = |kind: &str| listeners.iter().filter(|one| one.kind == kind).count();
    let counts = ["API server", "door", "metrics.k8s.io", "kubelet"].map(count);
    assert_eq!(counts, [1, 1, 1, 2], "{listeners:?}");
}

/// The HTTP status for a request with these options of curl; `000` if there is no response.
fn status(cluster: &mut Cluster, words: &str, listener: &Listener) -> String {
    let path = match listener.kind {
        "API server" => "/api",
        "metrics.k8s.io" => "/apis/metrics.k8s.io/v1beta1/nodes",
        _ => "/pods",
    };
    let Listener { host, port, .. } = listener;
    let command = format!(
        "curl -sk -m 15 -o /dev/null -w %{{http_code}} {words} https://{host}:{port}{path}"
    );
    cluster.try_ask(&command).1
}

/// The attacker starts a cluster and uses all of its credentials.
pub fn credentials_of_another_cluster_open_nothing(
    lab: &Lab,
    cluster: &mut Cluster,
    listeners: &[Listener],
) {
    // In another directory: the cluster removes old directories of its own user, but must not remove the squatters' in /tmp.
    let elsewhere = ["env", "TMPDIR=/var/tmp"];
    let words = ["srun", "-N2", "-wnode[1-2]", "coracle", "run"];
    let mut other = Cluster::start_as(lab, "user2", &[&elsewhere[..], &words].concat());
    let shown = [
        "".to_owned(),
        "--header \"Authorization: Bearer $K8S_CLUSTER_API_TOKEN\"".to_owned(),
        "--header \"X-Remote-User: admin\" --header \"X-Remote-Group: system:masters\"".to_owned(),
    ];
    let certificates = [
        "front-proxy-client",
        "kubelet-client",
        "kube-controller-manager",
        "apiserver",
    ];
    let with = |name: &str| {
        let pki = "$(dirname $KUBECONFIG)/pki";
        format!("--cert {pki}/{name}.crt --key {pki}/{name}.key")
    };
    let shown: Vec<String> = shown.into_iter().chain(certificates.map(with)).collect();
    for listener in listeners {
        for words in &shown {
            let got = status(&mut other, words, listener);
            assert!(
                ["000", "401"].contains(&got.as_str()),
                "{listener:?}: {words}: {got}"
            );
        }
    }
    other.exit(0);
    // The owner's credentials are accepted.
    let own = |kind: &str| match kind {
        "API server" => shown[1].clone(),
        "metrics.k8s.io" => format!("{} {}", with("front-proxy-client"), shown[2]),
        _ => with("kubelet-client"),
    };
    for listener in listeners.iter().filter(|one| one.kind != "door") {
        let got = status(cluster, &own(listener.kind), listener);
        assert_eq!(got, "200", "{listener:?}");
    }
}

fn garbage_and_crowds_keep_nobody_out(lab: &Lab, cluster: &mut Cluster, listeners: &[Listener]) {
    for Listener { host, port, .. } in listeners {
        let sent = attack(
            lab,
            "login",
            "user2",
            &format!("garbage {host} {port}"),
            &Value::Null,
        );
        assert_eq!(sent.len(), 1);
    }
    let mut crowds = Vec::new();
    for Listener { host, port, .. } in listeners {
        let script = format!("exec {ATTACKER} crowd {host} {port} 900");
        crowds.push(lab.sh(&script).user("user2").start());
    }
    for crowd in &mut crowds {
        crowd.until_stdout("held");
    }
    let command = "timeout 50 kubectl get nodes && timeout 50 kubectl exec victim-node2 -- true && timeout 50 kubectl top nodes";
    cluster.ask(command);
    // A new agent must be able to connect to the leader in spite of these connections.
    cluster.next_agent(lab);
    wait_until(60, "the new agent has found its pods", || {
        cluster.try_ask(command).0 == 0
    });
    for crowd in &mut crowds {
        assert!(!crowd.has_ended(), "the crowd was there all the time");
        crowd.signal(Signal::TERM);
    }
}

/// The directory of a cluster of `user1` that was killed.
const OLD: &str = "/tmp/coracle-0123456789abcdef0123456789abcdef";

/// Files that another user creates in `/tmp`, before the cluster starts, with names like Coracle's. They are old enough to be
/// removed as leftovers.
struct Squatters;

const SETTLE: &str = r#"
cd /tmp && host=$(hostname)
dir() { mkdir -m 777 "$1" && printf %s "$host" > "$1/host"; }
name() { printf 'coracle-%032x%s' "$1" "$2"; }
mkdir -m 777 "$(name 1)" && mkfifo -m 666 "$(name 1)/host"
dir "$(name 2)" && mkfifo -m 666 "$(name 2)/kubelet.sock" && mkfifo -m 666 "$(name 2)/hub.sock"
mkdir -m 777 "$(name 3)" && ln -s /dev/zero "$(name 3)/host"
ln -s /home/user1/second-user "$(name 4)"
mkfifo -m 666 "$(name 5)"
mkfifo -m 666 "$(name 6 00000000000000000000000000000000)"
ln -s /home/user1/second-user "$(name 7 00000000000000000000000000000000)"
dir "$(name 8)" && /usr/bin/python3 -c 'import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])' "$(name 8)/kubelet.sock"
touch -h -d '-20 minutes' coracle-00*
"#;

impl Squatters {
    fn settle(lab: &Lab) -> Self {
        lab.sh(&format!("mkdir -p {DIR} && echo kept > {DIR}/kept"))
            .run()
            .succeeded();
        for host in HOSTS {
            // A leftover that the next cluster of `user1` removes. It is created first, so that it is found last.
            let own = "mkdir -m 700 $dir && hostname | tr -d '\\n' > $dir/host";
            let own = format!("dir={OLD}; {own}");
            lab.sh(&own).on(host).run().succeeded();
            lab.sh(SETTLE).user("user2").on(host).run().succeeded();
        }
        Self
    }

    /// Resets the mtime of the old directory, which the owner's test writes have updated.
    fn grow_old(&self, lab: &Lab) {
        for host in HOSTS {
            lab.root(host, &format!("touch -d '-20 minutes' {OLD}"))
                .succeeded();
        }
    }

    /// The second user's files were neither followed nor removed, and the leftover was removed in spite of them. Removes them.
    fn are_untouched(self, lab: &Lab) {
        for host in ["node1", "node2"] {
            let swept = || lab.root(host, &format!("test -e {OLD}")).code != 0;
            wait_until(20, "the directory of an old cluster was swept", swept);
        }
        for host in HOSTS {
            lab.root(host, &format!("rm -rf {OLD}"));
            let listed = lab.root(host, "find /tmp -mindepth 1 -user user2 | wc -l");
            assert_eq!(listed.stdout.trim(), "15", "{host}");
            lab.root(
                host,
                "find /tmp -mindepth 1 -maxdepth 1 -user user2 -exec rm -rf {} +",
            );
        }
        lab.sh(&format!("grep -q kept {DIR}/kept"))
            .run()
            .succeeded();
    }
}
