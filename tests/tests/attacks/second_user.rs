//! A second user of the same hosts, with any program, against every listener, file, socket and process of Coracle.
//!
//! Each attack is tests/clients/attacker.py, run by `user2`. The owner runs it too and must succeed; otherwise the attack would
//! prove nothing.

use std::collections::{BTreeMap, BTreeSet};

use e2e::{HOSTS, Lab, Process, Role, TestCluster, pod, script_container, wait_until};
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
const SECRET_LOCATIONS: [&str; 6] = ["local", "shared", "empty", "shm", "log", "secret"];
/// Not a secret: an argument of the pod's process, which every user of the host can see.
const VISIBLE: &str = "visible-argument-of-a-pod";

#[test]
fn second_user_cannot_access_a_cluster() {
    let lab = Lab::acquire();
    lab.load_busybox();
    lab.remove(DIR);
    let squatters = Squatters::create(&lab);
    // Some sites let users read each other's home directories.
    let mode = lab.root("login", "stat -c %a /home/user1").stdout;
    lab.root("login", "chmod 755 /home/user1").succeeded();
    lab.write(&format!("{DIR}/srun"), SRUN);
    let start = format!(
        "chmod 700 {DIR} {DIR}/srun && PATH=~/{DIR}:$PATH && srun -N2 -wnode[1-2] coracle run bash"
    );
    let mut cluster = TestCluster::from_command(lab.sh(&start).start());
    let names = ["victim-node1", "victim-node2"];
    cluster.create_objects(&workload());
    for name in names {
        cluster.wait_for(name, "condition=Ready");
    }

    let secrets = secrets(&lab, &mut cluster);
    for host in HOSTS {
        let victims = processes(&lab, host);
        assert_processes_are_inaccessible(&lab, &mut cluster, host, &victims);
        assert_files_are_inaccessible(&lab, host);
        assert_secrets_are_not_found(&lab, host, &victims, &secrets);
        assert_sockets_are_inaccessible(&lab, host, &victims);
    }
    assert_root_finds_every_secret(&lab, &secrets);

    let listeners = listeners(&lab);
    assert_documented(&listeners);
    assert_foreign_credentials_are_rejected(&lab, &mut cluster, &listeners);
    assert_floods_do_not_block_clients(&lab, &mut cluster, &listeners);

    for name in names {
        let now = cluster.pod(name);
        let status = e2e::container_status(&now, "c");
        assert_eq!(status["restartCount"], 0, "{status}");
    }
    cluster.shell("kubectl delete pod --all --grace-period=1");
    squatters.age_leftover(&lab);
    cluster.exit(0);
    // These commands must exit in spite of the second user's files.
    lab.command(&["coracle", "logs"]).run();
    lab.command(&["srun", "-N1", "-wnode1", "coracle", "doctor"])
        .run()
        .succeeded();
    squatters.assert_untouched(&lab);
    lab.root("login", &format!("chmod {} /home/user1", mode.trim()))
        .succeeded();
    lab.remove(DIR);
    lab.assert_nothing_left();
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
            &[script_container("c", "", more)],
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
    targets: &Value,
) -> BTreeSet<(String, String)> {
    let script = format!("{ATTACKER} {command}");
    let call = lab
        .sh(&script)
        .user(user)
        .on(host)
        .stdin(&targets.to_string());
    let output = call.within(120).run().succeeded();
    let lines = output.stdout.lines();
    let pairs = lines.filter_map(|line| line.split_once(' '));
    pairs
        .map(|(operation, object)| (operation.to_owned(), object.to_owned()))
        .collect()
}

/// The operations in the result of [`attack`].
pub fn operations(succeeded: &BTreeSet<(String, String)>) -> BTreeSet<&str> {
    let operations = succeeded.iter();
    operations
        .map(|(operation, _)| operation.as_str())
        .collect()
}

fn assert_processes_are_inaccessible(
    lab: &Lab,
    cluster: &mut TestCluster,
    host: &str,
    victims: &[Process],
) {
    let pids: Vec<u32> = victims.iter().map(|process| process.pid).collect();
    let targets = json!({"pids": pids});
    let got = attack(lab, host, "user2", "processes", &targets);
    let victim = |pid: &str| victims.iter().find(|p| p.pid.to_string() == pid);
    let got: Vec<_> = got
        .iter()
        .map(|(operation, pid)| (operation, victim(pid)))
        .collect();
    assert!(got.is_empty(), "{host}: {got:#?}");
    if host != "node1" {
        return;
    }
    let own = cluster.shell("echo $PPID").trim().parse::<u32>();
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
    assert_eq!(operations(&possible), BTreeSet::from(all));
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
    let targets = json!({"paths": paths});
    let got = attack(lab, host, "user2", "files", &targets);
    // Upstream's programs and bootstrap objects are not secret.
    let public = [
        "/home/user1/.local/share/coracle/kubernetes",
        "/home/user1/.cache/coracle",
    ];
    let is_public = |operation: &str, path: &str| {
        ["read", "list"].contains(&operation)
            && public.iter().any(|prefix| path.starts_with(prefix))
    };
    got.into_iter()
        .filter(|(operation, path)| !is_public(operation, path))
        .collect()
}

fn assert_files_are_inaccessible(lab: &Lab, host: &str) {
    let paths = files(lab, host);
    let bad = open_files(lab, host, &paths);
    assert!(bad.is_empty(), "{host}: {bad:#?}");
    let targets = json!({"paths": paths});
    let possible = attack(lab, host, "user1", "files", &targets);
    let mut all = BTreeSet::from(["read", "write", "list", "create", "remove"]);
    if host == "node1" || host == "node2" {
        all.insert("connect");
    }
    assert_eq!(operations(&possible), all, "{host}");
}

/// Files and directories, including those in /proc, which may contain secret values.
fn search_paths(victims: &[Process]) -> Vec<String> {
    let common = [
        "/tmp",
        "/var/tmp",
        "/dev/shm",
        "/dev/mqueue",
        "/run",
        "/home/user1",
    ];
    let mut paths: Vec<String> = common.map(str::to_owned).to_vec();
    for Process { pid, .. } in victims {
        let of_process = [
            "cmdline",
            "environ",
            "fd",
            "root/tmp",
            "root/dev/shm",
            "root/vol",
        ];
        paths.extend(of_process.map(|name| format!("/proc/{pid}/{name}")));
        paths.extend((0..40).map(|number| format!("/proc/{pid}/fd/{number}")));
    }
    paths
}

/// The secret values, by name.
fn secrets(lab: &Lab, cluster: &mut TestCluster) -> BTreeMap<String, String> {
    let mut secrets = BTreeMap::new();
    secrets.insert(
        "administrator".to_owned(),
        cluster.shell("echo $K8S_CLUSTER_API_TOKEN"),
    );
    let keys = cluster.shell(
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
    for location in SECRET_LOCATIONS {
        secrets.insert(location.to_owned(), format!("value-of-{location}"));
    }
    for (name, value) in &secrets {
        assert!(value.len() >= 11, "{name}: {value:?}");
    }
    secrets
}

fn assert_secrets_are_not_found(
    lab: &Lab,
    host: &str,
    victims: &[Process],
    secrets: &BTreeMap<String, String>,
) {
    let mut secrets = secrets.clone();
    secrets.insert("visible".to_owned(), VISIBLE.to_owned());
    // The arguments of the pod's script contain the values that it writes.
    let is_script =
        |name: &str, path: &str| SECRET_LOCATIONS.contains(&name) && path.ends_with("/cmdline");
    let targets = json!({"paths": search_paths(victims), "secrets": secrets});
    let mut found = attack(lab, host, "user2", "secrets", &targets);
    let seen = found.iter().any(|(name, _)| name == "visible");
    assert_eq!(
        seen,
        host == "node1" || host == "node2",
        "{host}: {found:?}"
    );
    found.retain(|(name, path)| name != "visible" && !is_script(name, path));
    assert!(found.is_empty(), "{host}: {found:#?}");
}

fn assert_root_finds_every_secret(lab: &Lab, secrets: &BTreeMap<String, String>) {
    let paths = search_paths(&processes(lab, "node1"));
    let targets = json!({"paths": paths, "secrets": secrets});
    let found = attack(lab, "node1", "root", "secrets", &targets);
    let elsewhere: BTreeSet<(String, String)> = found
        .into_iter()
        .filter(|(_, path)| !path.ends_with("/cmdline"))
        .collect();
    let names: BTreeSet<&str> = secrets.keys().map(String::as_str).collect();
    assert_eq!(operations(&elsewhere), names);
}

/// The socket of a sandbox in its pod's directory, and its name before it is renamed.
const SANDBOX_SOCKET: &str = "namespaces.sock";
const SANDBOX_SOCKET_WHEN_BOUND: &str = "/namespaces.new";

/// Tests every Unix socket on which one of these processes listens, in all network namespaces.
pub fn assert_sockets_are_inaccessible(lab: &Lab, host: &str, victims: &[Process]) {
    let pids: Vec<String> = victims.iter().map(|p| p.pid.to_string()).collect();
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
            let path = path.replace("/hub-inside.new", "/hub-inside.sock");
            if !path.ends_with(SANDBOX_SOCKET_WHEN_BOUND) {
                sockets.insert((path, pid.to_owned()));
            } else {
                sandboxes.insert(pid.to_owned());
            }
        }
    }
    // Sandboxes bind their socket through a descriptor of the pod's directory, so that `ss` does not show its path.
    let find = format!("find /tmp -path '*/pods/*/{SANDBOX_SOCKET}' -type s");
    let found = lab.root(host, &find).stdout;
    let found: Vec<&str> = found.lines().collect();
    assert_eq!(found.len(), sandboxes.len(), "{host}: {found:?}");
    let known = [
        "kubelet.sock",
        "hub.sock",
        "hub-inside.sock",
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
        "node2" => BTreeSet::from(["kubelet.sock", "hub.sock", "hub-inside.sock"]),
        _ => BTreeSet::new(),
    };
    assert_eq!(names, wanted, "{host}");
    paths.extend(found.iter().map(|path| (*path).to_owned()));
    let targets = json!({"paths": paths});
    let got = attack(lab, host, "user2", "files", &targets);
    assert!(got.is_empty(), "{host}: {got:#?}");
    let possible = attack(lab, host, "user1", "files", &targets);
    let connected = possible
        .iter()
        .filter(|(operation, _)| operation == "connect")
        .count();
    assert!(
        connected >= wanted.len() + found.len(),
        "{host}: {possible:?}"
    );
}

/// A TCP or UDP port on a host's network.
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
        let victims = processes(lab, host);
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
            let Some(process) = victims.iter().find(|p| p.pid.to_string() == pid) else {
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
        let enrolment = lab.enrolment_port("node2", &agent);
        assert!(of_leader.contains(&enrolment), "{of_leader:?}");
        for port in of_leader {
            let kind = if port == enrolment {
                "enrolment"
            } else {
                "metrics.k8s.io"
            };
            found.push(Listener { host, port, kind });
        }
    }
    found
}

/// Asserts that docs/state.md has a row for each listener, and no others.
fn assert_documented(listeners: &[Listener]) {
    let (_, section) = STATE
        .split_once("## Ports on the host's network")
        .expect("docs/state.md has this section");
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
    let counts = ["API server", "enrolment", "metrics.k8s.io", "kubelet"].map(count);
    assert_eq!(counts, [1, 1, 1, 2], "{listeners:?}");
}

/// The HTTP status for a request with these options of curl; `000` if there is no response.
fn status(cluster: &mut TestCluster, options: &str, listener: &Listener) -> String {
    let path = match listener.kind {
        "API server" => "/api",
        "metrics.k8s.io" => "/apis/metrics.k8s.io/v1beta1/nodes",
        _ => "/pods",
    };
    let Listener { host, port, .. } = listener;
    let command = format!(
        "curl -sk -m 15 -o /dev/null -w %{{http_code}} {options} https://{host}:{port}{path}"
    );
    cluster.try_shell(&command).1
}

/// The attacker starts a cluster and uses all of its credentials.
pub fn assert_foreign_credentials_are_rejected(
    lab: &Lab,
    cluster: &mut TestCluster,
    listeners: &[Listener],
) {
    // In another directory: the cluster removes old directories of its own user, but must not remove the squatters' in /tmp.
    let env = ["env", "TMPDIR=/var/tmp"];
    let args = ["srun", "-N2", "-wnode[1-2]", "coracle", "run"];
    let mut other = TestCluster::start_as(lab, "user2", &[&env[..], &args].concat());
    let credentials = [
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
    let credentials: Vec<String> = credentials
        .into_iter()
        .chain(certificates.map(with))
        .collect();
    for listener in listeners {
        for options in &credentials {
            let got = status(&mut other, options, listener);
            assert!(
                ["000", "401"].contains(&got.as_str()),
                "{listener:?}: {options}: {got}"
            );
        }
    }
    other.exit(0);
    // The owner's credentials are accepted.
    let own = |kind: &str| match kind {
        "API server" => credentials[1].clone(),
        "metrics.k8s.io" => format!("{} {}", with("front-proxy-client"), credentials[2]),
        _ => with("kubelet-client"),
    };
    for listener in listeners.iter().filter(|one| one.kind != "enrolment") {
        let got = status(cluster, &own(listener.kind), listener);
        assert_eq!(got, "200", "{listener:?}");
    }
}

fn assert_floods_do_not_block_clients(
    lab: &Lab,
    cluster: &mut TestCluster,
    listeners: &[Listener],
) {
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
    let mut floods = Vec::new();
    for Listener { host, port, .. } in listeners {
        let script = format!("exec {ATTACKER} flood {host} {port} 900");
        floods.push(lab.sh(&script).user("user2").start());
    }
    for flood in &mut floods {
        flood.wait_for_stdout("held");
    }
    let command = "timeout 50 kubectl get nodes && timeout 50 kubectl exec victim-node2 -- true && timeout 50 kubectl top nodes";
    cluster.shell(command);
    // A new agent must be able to connect to the leader in spite of these connections.
    cluster.replace_agent(lab);
    wait_until(60, "the new agent has found its pods", || {
        cluster.try_shell(command).0 == 0
    });
    for flood in &mut floods {
        assert!(!flood.has_exited(), "the flood lasts until here");
        flood.signal(Signal::TERM);
    }
}

/// The directory of a killed cluster of `user1`.
const LEFTOVER: &str = "/tmp/coracle-0123456789abcdef0123456789abcdef";

/// Files that another user creates in `/tmp`, before the cluster starts, with names like Coracle's. They are old enough to be
/// removed as leftovers.
struct Squatters;

const CREATE_SQUATTERS: &str = r#"
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
    fn create(lab: &Lab) -> Self {
        lab.sh(&format!("mkdir -p {DIR} && echo kept > {DIR}/kept"))
            .run()
            .succeeded();
        for host in HOSTS {
            // A leftover that the next cluster of `user1` removes. It is created first, so that it is found last.
            let own = "mkdir -m 700 $dir && hostname | tr -d '\\n' > $dir/host";
            let own = format!("dir={LEFTOVER}; {own}");
            lab.sh(&own).on(host).run().succeeded();
            lab.sh(CREATE_SQUATTERS)
                .user("user2")
                .on(host)
                .run()
                .succeeded();
        }
        Self
    }

    /// Resets the mtime of the old directory, which the owner's test writes have updated.
    fn age_leftover(&self, lab: &Lab) {
        for host in HOSTS {
            lab.root(host, &format!("touch -d '-20 minutes' {LEFTOVER}"))
                .succeeded();
        }
    }

    /// Asserts that the second user's files were neither followed nor removed, and that the leftover was removed in spite of them.
    /// Then removes these files.
    fn assert_untouched(self, lab: &Lab) {
        for host in ["node1", "node2"] {
            let is_removed = || lab.root(host, &format!("test -e {LEFTOVER}")).code != 0;
            wait_until(20, "the leftover is removed", is_removed);
        }
        for host in HOSTS {
            lab.root(host, &format!("rm -rf {LEFTOVER}"));
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
