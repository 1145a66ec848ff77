//! The environment of a container: file systems, capabilities, names, processes, user, network.

use e2e::{
    Lab, TestCluster, checking_container, checking_pod, container_status, merged, pod, wait_until,
};
use serde_json::{Value, json};

const ONE: &[&str] = &["srun", "-N1", "coracle", "run"];

#[track_caller]
fn cluster_of(lab: &Lab, user: &str) -> TestCluster {
    lab.load_busybox_for(user);
    TestCluster::start_as(lab, user, ONE)
}

/// Checks of a container with a default security context.
const PLAIN: &str = r#"
kind() { awk -v at="$1" '$2 == at { kind = $3 } END { print kind }' /proc/self/mounts; }
access() { awk -v at="$1" '$2 == at { split($4, a, ",") } END { print a[1] }' /proc/self/mounts; }
is /proc proc "$(kind /proc)"
is /sys sysfs "$(kind /sys)"
is "access to /sys" ro "$(access /sys)"
is /dev tmpfs "$(kind /dev)"
is /dev/shm tmpfs "$(kind /dev/shm)"
is /dev/pts devpts "$(kind /dev/pts)"
is /dev/mqueue mqueue "$(kind /dev/mqueue)"
for device in null zero full random urandom tty ptmx; do works test -c /dev/$device; done
works sh -c 'echo x > /dev/null && echo x > /dev/shm/x && rm /dev/shm/x'
is zeros 0000 "$(head -c 2 /dev/zero | xxd -p)"
fails sh -c 'echo x > /dev/full'
is fd 0 "$(readlink /dev/stdin | grep -o '[0-9]$')"
# Masked files are the null device, masked directories are empty.
for path in /proc/interrupts /proc/kcore /proc/keys /proc/latency_stats /proc/timer_list /proc/sched_debug; do
  [ ! -e $path ] || works test -c $path
  [ ! -e $path ] || is "$path, masked" '' "$(head -c 9 $path)"
done
for path in /proc/acpi /proc/asound /proc/scsi /sys/firmware /sys/devices/virtual/powercap; do
  [ ! -d $path ] || is "$path, masked" ' on tmpfs' "$(ls $path) on $(kind $path)"
done
for path in /proc/bus /proc/fs /proc/irq /proc/sys /proc/sysrq-trigger; do
  [ ! -e $path ] || is "access to $path" ro "$(access $path)"
done
for path in /proc/sys/kernel/domainname /proc/sysrq-trigger /proc/irq/default_smp_affinity; do
  output=$( (echo 1 > $path) 2>&1)
  [ ! -e $path ] || is "writing to $path" 'Read-only file system' "${output##*: }"
done
fails sysctl -w net.ipv4.ip_forward=1
is 'reason' 'Read-only file system' "${output##*: }"
is "pid" 1 "$(sh -c 'echo $PPID')"
# By a glob, so that the shell starts no other process.
set -- /proc/[0-9]*
is processes /proc/1 "$*"
is user 0:0 "$(id -u):$(id -g)"
is hostname plain "$(hostname)"
is home /root "$HOME"
is directory / "$(pwd)"
is "no terminal" 'not a tty' "$(tty)"
if read line; then echo "unexpected input: $line"; fi
works touch /new /bin/new
is umask 0022 "$(umask)"
is "new privileges" 0 "$(awk '/^NoNewPrivs/ { print $2 }' /proc/self/status)"
is "service account" default "$(cat /var/run/secrets/kubernetes.io/serviceaccount/namespace)"
"#;

/// With NET_ADMIN, /proc/sys is still read-only: the mount prevents the write, not the lack of a capability.
const NO_SYSCTL: &str = r#"
fails sysctl -w net.ipv4.ip_forward=1
is 'reason' 'Read-only file system' "${output##*: }"
"#;

/// Checks of a privileged container.
const UNMASKED: &str = r"
works sysctl -w net.ipv4.ip_forward=1
fails grep -q ' /proc/sys ' /proc/self/mounts
[ ! -e /proc/keys ] || fails test -c /proc/keys
";

/// An image with a program that has a file capability.
const CAPABLE: &str = "coracle.test/capable:1";

/// Checks the effect of a file capability for a process without capabilities.
const FILE_CAPABILITY: &str = r#"
effective() { "$@" awk '/^CapEff:/ { print $2 }' /proc/self/status; }
is 'without it' 0000000000000000 "$(effective busybox)"
is 'with it' 0000000000000001 "$(effective busybox-chown)"
busybox touch /tmp/x
works busybox-chown chown 7:8 /tmp/x
is owner OWNER "$(stat -c %u:%g /tmp/x)"
"#;

/// Containers with that program and a user other than root.
fn capability_pods(owner: &str) -> Vec<Value> {
    let case = |name: &str, more: Value, script: &str| {
        let context = merged(json!({"runAsUser": 1000}), more);
        let own = json!({"image": CAPABLE, "securityContext": context});
        checking_container(name, own, script)
    };
    let no_capability = "is none 0000000000000000 \"$(busybox-chown awk '/^CapEff:/ { print $2 }' /proc/self/status)\"";
    let containers = [
        case(
            "file-capability",
            json!({}),
            &FILE_CAPABILITY.replace("OWNER", owner),
        ),
        case(
            "no-more",
            json!({"allowPrivilegeEscalation": false}),
            no_capability,
        ),
        // execve(2) fails if the bounding set lacks a capability of the file.
        case(
            "bounded",
            json!({"capabilities": {"drop": ["CHOWN"]}}),
            "fails busybox-chown true",
        ),
    ];
    vec![pod("programs", json!({}), &containers)]
}

#[track_caller]
fn load_capable(lab: &Lab, user: &str) {
    let config = json!({"Env": ["PATH=/bin"]});
    lab.load_image_for(user, CAPABLE, config, e2e::CAPABLE_LAYER);
}

/// Containers with various fields of `securityContext`.
fn security_context_pods(all: &str) -> Vec<Value> {
    let status = |field: &str, value: &str| {
        format!("is {field} {value} \"$(awk '/^{field}:/ {{ print $2 }}' /proc/self/status)\"\n")
    };
    let case = |name: &str, context: Value, script: String| {
        checking_container(name, json!({"securityContext": context}), &script)
    };
    let capabilities =
        |add: &[&str], drop: &[&str]| json!({"capabilities": {"add": add, "drop": drop}});
    let containers = [
        case("usual", json!({}), status("CapEff", "00000000a80425fb") + &status("CapBnd", "00000000a80425fb")),
        case("some", capabilities(&["NET_ADMIN", "SYS_PTRACE"], &["ALL"]), status("CapEff", "0000000000081000") + NO_SYSCTL),
        case("fewer", capabilities(&[], &["CHOWN"]), status("CapBnd", "00000000a80425fa")),
        case("most", capabilities(&["ALL"], &["KILL"]), format!("is CapEff {all} \"$(awk '/^CapEff:/ {{ print $2 }}' /proc/self/status | sed 's/df$/ff/')\"")),
        case("user", json!({"runAsUser": 1000, "capabilities": {"add": ["NET_ADMIN"]}}),
            status("CapEff", "0000000000000000") + &status("CapPrm", "0000000000000000") + &status("CapBnd", "00000000a80435fb")),
        case("no-more", json!({"allowPrivilegeEscalation": false}), status("NoNewPrivs", "1")),
        case("unconfined", json!({"seccompProfile": {"type": "Unconfined"}}),
            status("Seccomp", "0") + "works unshare -U true\n"),
        case("filtered", json!({"seccompProfile": {"type": "RuntimeDefault"}}),
            status("Seccomp", "2") + "works ls /\nfails unshare -U true\nfails mount -t tmpfs none /tmp\nfails unshare -n true\n"),
        case("unlocked", json!({"seccompProfile": {"type": "RuntimeDefault"}, "capabilities": {"add": ["SYS_ADMIN"]}}),
            status("Seccomp", "2") + "works mount -t tmpfs none /tmp\nworks unshare -n true\n"),
        case("read-only", json!({"readOnlyRootFilesystem": true}),
            "fails touch /x\nfails touch /tmp/x\nfails touch /etc/x\nworks touch /dev/shm/x\nworks sh -c 'echo > /dev/null'\n".into()),
        case("privileged", json!({"privileged": true}),
            status("CapEff", all) + "works mount -t tmpfs none /tmp\nworks touch /tmp/x\nworks hostname other\n" + UNMASKED),
    ];
    vec![pod("rights", json!({}), &containers)]
}

fn hostname_pods() -> Vec<Value> {
    let alias = json!([{"ip": "192.0.2.7", "hostnames": ["one.example", "two.example"]}]);
    let resolver = json!({"nameservers": ["192.0.2.53"], "searches": ["one.example", "two.example"],
        "options": [{"name": "ndots", "value": "3"}, {"name": "rotate"}]});
    vec![
        checking_pod(
            "named",
            json!({"hostname": "web", "subdomain": "site", "hostAliases": alias, "dnsPolicy": "None", "dnsConfig": resolver}),
            json!({"env": [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]}),
            r#"
is hostname web "$(hostname)"
is /etc/hostname web "$(cat /etc/hostname)"
is "full name" web.site.default.svc.cluster.local "$(awk -v ip="$IP" '$1 == ip { print $2 }' /etc/hosts)"
is alias 'one.example two.example' "$(awk '$1 == "192.0.2.7" { print $2, $3 }' /etc/hosts)"
is localhost localhost "$(awk '$1 == "127.0.0.1" { print $2 }' /etc/hosts)"
is resolver 'search one.example two.example nameserver 192.0.2.53 options ndots:3 rotate' "$(echo $(cat /etc/resolv.conf))"
works sh -c 'echo 192.0.2.8 added >> /etc/hosts'
is "address of alias" 192.0.2.7 "$(ping -c1 -W1 one.example | grep -o '192[.0-9]*' | head -n1)"
"#,
        ),
        checking_pod(
            "full-name",
            json!({"hostname": "web", "subdomain": "site", "setHostnameAsFQDN": true}),
            json!({}),
            "is hostname web.site.default.svc.cluster.local \"$(hostname)\"",
        ),
        checking_pod(
            "sysctls",
            json!({"securityContext": {"sysctls": [{"name": "net.ipv4.ip_local_port_range", "value": "40000 41000"},
                {"name": "net/ipv4/tcp_syncookies", "value": "0"}, {"name": "kernel.shm_rmid_forced", "value": "1"}]}}),
            json!({}),
            r#"
is ports '40000 41000' "$(echo $(cat /proc/sys/net/ipv4/ip_local_port_range))"
is syncookies 0 "$(cat /proc/sys/net/ipv4/tcp_syncookies)"
is shm_rmid_forced 1 "$(cat /proc/sys/kernel/shm_rmid_forced)"
"#,
        ),
    ]
}

fn host_namespace_pods(lab: &Lab, node_ip: &str) -> Vec<Value> {
    let own = |namespace: &str, same: bool| {
        let function = if same { "works" } else { "fails" };
        let script = format!("readlink /proc/self/ns/{namespace}");
        let host = lab.root("node1", &script).stdout;
        format!("{function} test \"$({script})\" = '{}'\n", host.trim())
    };
    vec![
        checking_pod(
            "host-network",
            json!({"hostNetwork": true}),
            json!({}),
            &(own("net", true)
                + &own("ipc", false)
                + &own("pid", false)
                + &format!(
                    "is hostname node1 \"$(hostname)\"\nworks sh -c 'ip address | grep -q {node_ip}/'\nworks grep -q node1 /etc/hosts\n"
                )),
        ),
        checking_pod(
            "host-pid",
            json!({"hostPID": true}),
            json!({}),
            &(own("pid", true)
                + &own("net", false)
                + "works sh -c 'ps -o args | grep -q [s]lurmd'\n"),
        ),
        checking_pod(
            "host-ipc",
            json!({"hostIPC": true}),
            json!({}),
            &(own("ipc", true)
                + &own("net", false)
                + "is file hello \"$(cat /dev/shm/of-the-host)\"\n"),
        ),
        checking_pod(
            "no-host",
            json!({}),
            json!({}),
            &(own("ipc", false)
                + &own("net", false)
                + &own("pid", false)
                + &own("uts", false)
                + &own("mnt", false)
                + &own("user", false)
                + "fails test -e /dev/shm/of-the-host\n"),
        ),
    ]
}

/// Combinations of the commands of images and pods.
fn command_pods() -> Vec<Value> {
    let image = |name: &str, more: Value| {
        merged(
            json!({"name": name, "image": "coracle.test/configured:1"}),
            more,
        )
    };
    vec![pod(
        "commands",
        json!({}),
        &[
            image("image", json!({})),
            image(
                "args",
                json!({"args": ["x y", "$(OWN) $(UNKNOWN) $$(OWN)"], "env": [{"name": "OWN", "value": "mine"}]}),
            ),
            image(
                "command",
                json!({"command": ["sh", "-c", "echo \"$0 $1\"", "a"]}),
            ),
            image(
                "both",
                json!({"command": ["echo", "$(A)-$(OF_IMAGE)"], "args": ["$(B)"], "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)2"}]}),
            ),
            image(
                "directory",
                json!({"command": ["pwd"], "workingDir": "/made/for/it"}),
            ),
            image(
                "user",
                json!({"command": ["sh", "-c", "id; echo $HOME $OF_IMAGE; pwd"]}),
            ),
            image(
                "else",
                json!({"command": ["id"], "securityContext": {"runAsUser": 7, "runAsGroup": 8}}),
            ),
        ],
    )]
}

#[track_caller]
fn assert_commands_are_right(cluster: &mut TestCluster) {
    cluster.wait_for_phase("commands", "Succeeded");
    let mut failures = Vec::new();
    for (name, expected) in [
        ("image", "entry: of cmd in /work"),
        ("args", "entry: x y mine $(UNKNOWN) $(OWN) in /work"),
        ("command", "a"),
        ("both", "1-$(OF_IMAGE) 12"),
        ("directory", "/made/for/it"),
        (
            "user",
            "uid=1234(app) gid=1235(app) groups=44(video),1235(app)\n/home/app from the image\n/work",
        ),
        ("else", "uid=7 gid=8 groups=8"),
    ] {
        let log = cluster.logs("commands", name);
        if log.trim_end() != expected {
            failures.push(format!("{name}: {log:?}, not {expected:?}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn user_pods() -> Vec<Value> {
    vec![
        checking_pod(
            "ids",
            json!({"securityContext": {"runAsUser": 1000, "runAsGroup": 2000, "fsGroup": 3000, "supplementalGroups": [4000, 5000]},
                "volumes": [{"name": "v", "emptyDir": {}}]}),
            json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]}),
            r#"
is ids '1000 2000' "$(id -u) $(id -g)"
is groups '2000 3000 4000 5000' "$(id -G | tr ' ' '\n' | sort -n | tr '\n' ' ' | sed 's/ $//')"
works touch /v/x
is "group of the volume" 3000 "$(stat -c %g /v)"
is "file in the volume" 1000:3000 "$(stat -c %u:%g /v/x)"
fails touch /x
"#,
        ),
        checking_pod(
            "other-container",
            json!({"securityContext": {"runAsUser": 1000}}),
            json!({"securityContext": {"runAsUser": 1001}}),
            "is user 1001:0 \"$(id -u):$(id -g)\"\nis home / $HOME\n",
        ),
    ]
}

/// The bit mask of all capabilities of the kernel, as /proc shows it.
fn all_capabilities(lab: &Lab) -> String {
    let last = lab
        .root("node1", "cat /proc/sys/kernel/cap_last_cap")
        .stdout;
    let last: u32 = last.trim().parse().expect("a number");
    format!("{:016x}", (1_u64 << (last + 1)) - 1)
}

#[test]
fn containers_have_the_expected_environment() {
    let lab = Lab::acquire();
    let mut cluster = cluster_of(&lab, "user1");
    let config = json!({"Entrypoint": ["/bin/sh", "-c", "echo \"entry: $* in $(pwd)\"", "entry"], "Cmd": ["of", "cmd"], "User": "app",
        "WorkingDir": "/work", "Env": ["PATH=/bin", "OF_IMAGE=from the image"]});
    lab.load_image(
        "coracle.test/configured:1",
        config,
        "mkdir -p work home/app && tar --create work home",
    );
    load_capable(&lab, "user1");
    let all = all_capabilities(&lab);
    let mut objects = vec![checking_pod("plain", json!({}), json!({}), PLAIN)];
    objects.extend(security_context_pods(&all));
    objects.extend(hostname_pods());
    objects.extend(command_pods());
    objects.extend(user_pods());
    objects.extend(capability_pods("7:8"));
    cluster.create_objects(&objects);
    cluster.assert_checks_pass(&[
        "plain",
        "rights",
        "programs",
        "named",
        "full-name",
        "sysctls",
        "ids",
        "other-container",
    ]);
    assert_commands_are_right(&mut cluster);
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn host_namespaces_are_shared_on_request() {
    let lab = Lab::acquire();
    lab.sh("echo hello > /dev/shm/of-the-host")
        .on("node1")
        .run()
        .succeeded();
    for user in ["user1", "user2"] {
        let mut cluster = cluster_of(&lab, user);
        cluster.create_objects(&host_namespace_pods(&lab, "10.77.0.11"));
        cluster.assert_checks_pass(&["host-network", "host-pid", "host-ipc", "no-host"]);
        let status = cluster.pod("host-network")["status"].clone();
        assert_eq!(status["podIP"], status["hostIP"], "{status:#}");
        cluster.exit(0);
    }
    lab.root("node1", "rm /dev/shm/of-the-host");
    lab.assert_nothing_left();
}

#[test]
fn exec_works_in_pods_with_shared_namespaces() {
    let lab = Lab::acquire();
    for user in ["user1", "user2"] {
        let mut cluster = cluster_of(&lab, user);
        let all = json!({"hostPID": true, "hostNetwork": true, "hostIPC": true});
        let of_user = json!({"hostPID": true, "securityContext": {"runAsUser": 1000}});
        let privileged = json!({"securityContext": {"privileged": true}});
        let probe = json!({"readinessProbe": {"exec": {"command": ["test", "-e", "/proc/self"]}, "periodSeconds": 1}});
        let kinds = [
            ("host-pid", json!({"hostPID": true}), json!({})),
            ("host-network", json!({"hostNetwork": true}), json!({})),
            ("host-ipc", json!({"hostIPC": true}), json!({})),
            ("of-user", of_user, json!({})),
            ("all-of-host", all, privileged),
            ("shared", json!({"shareProcessNamespace": true}), json!({})),
            ("apart", json!({}), json!({})),
        ];
        let objects = kinds.clone().map(|(name, spec, own)| {
            pod(
                name,
                spec,
                &[e2e::script_container(
                    "main",
                    e2e::WAIT_FOR_SIGTERM,
                    e2e::merged(own, probe.clone()),
                )],
            )
        });
        cluster.create_objects(&objects);
        for (name, ..) in kinds {
            cluster.wait_for(name, "condition=Ready");
            let namespace = cluster.shell(&format!(
                "kubectl exec {name} -- readlink /proc/self/ns/pid"
            ));
            let host = lab.root("node1", "readlink /proc/self/ns/pid").stdout;
            let shares = ["host-pid", "of-user", "all-of-host"].contains(&name);
            assert_eq!(
                namespace.trim() == host.trim(),
                shares,
                "{name}: {namespace}"
            );
        }
        cluster.exit(0);
    }
    lab.assert_nothing_left();
}

#[test]
fn process_namespace_is_shared_and_zombies_are_reaped() {
    let lab = Lab::acquire();
    let mut cluster = cluster_of(&lab, "user1");
    let other = checking_container("other", json!({}), "exec sleep 1001");
    let script = r#"
sleep 0.5
works sh -c 'ps -o args | grep -q "sleep [1]001"'
if [ "$(sh -c 'echo $PPID')" = 1 ]; then echo 'is pid 1'; fi
for i in 1 2 3; do sh -c 'sleep 0.2 &'; done
sleep 1
is zombies 0 "$(grep -l '^State:.Z' /proc/[0-9]*/status | wc -l)"
kill $(ps -o pid,args | awk '/sleep [1]001/ { print $1 }')
"#;
    let kept = r#"
sleep 0.5
fails sh -c 'ps -o args | grep -q "sleep [1]001"'
is pid 1 "$(sh -c 'echo $PPID')"
touch /v/end
"#;
    // A debugger's capability: it can inspect other containers of the pod, but not the inner process.
    let tracing = json!({"securityContext": {"capabilities": {"add": ["SYS_PTRACE"]}}});
    let seen = r#"
until ps -o args | grep -q '[s]leep 5'; do sleep 0.1; done
other=$(ps -o pid,args | awk '/[s]leep 5/ { print $1; exit }')
works test -d "/proc/$other/root/bin"
works test -d /proc/1
fails ls /proc/1/root/
fails ls /proc/1/cwd/
fails cat /proc/1/environ
"#;
    let volume = json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]});
    let waiter = checking_container(
        "other",
        volume.clone(),
        "sleep 1001 & until test -e /v/end; do sleep 0.1; done",
    );
    cluster.create_objects(&[
        pod("shared", json!({"shareProcessNamespace": true}), &[checking_container("main", json!({}), script), other]),
        pod("apart", json!({"volumes": [{"name": "v", "emptyDir": {}}]}), &[checking_container("main", volume, kept), waiter]),
        pod("tracing", json!({"shareProcessNamespace": true}), &[checking_container("main", tracing, seen), checking_container("other", json!({}), "sleep 5")]),
        pod("terminal", json!({}), &[
            checking_container("tty", json!({"tty": true, "stdin": true}), "works tty\ntest -t 0 && test -t 1 && test -t 2 || echo no terminal\nworks test -c /dev/console"),
            checking_container("stdin", json!({"stdin": true}), "fails tty\nif timeout 1 cat 2> /dev/null; then echo 'input ended'; fi"),
            checking_container("none", json!({}), "works timeout 1 cat"),
        ]),
    ]);
    cluster.assert_checks_pass(&["apart", "terminal", "tracing"]);
    let shared = cluster.pod_until("shared", "ended", |pod| {
        pod["status"]["containerStatuses"].is_array()
            && !container_status(pod, "other")["state"]["terminated"].is_null()
    });
    assert_eq!(
        container_status(&shared, "other")["state"]["terminated"]["exitCode"],
        143,
        "{shared:#}"
    );
    cluster.pod_until("shared", "ended", |pod| {
        !container_status(pod, "main")["state"]["terminated"].is_null()
    });
    assert_eq!(cluster.logs("shared", "main"), "");
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn unsupported_settings_are_rejected_with_a_message() {
    let lab = Lab::acquire();
    let mut cluster = cluster_of(&lab, "user1");
    lab.load_image(
        "coracle.test/user:1",
        json!({"User": "app", "Env": ["PATH=/bin"]}),
        e2e::EMPTY_LAYER,
    );
    lab.load_image(
        "coracle.test/unknown-user:1",
        json!({"User": "unknown", "Env": ["PATH=/bin"]}),
        e2e::EMPTY_LAYER,
    );
    let non_root = json!({"runAsNonRoot": true});
    let with = |name: &str, spec: Value, own: Value| {
        pod(name, spec, &[checking_container("main", own, "true")])
    };
    cluster.create_objects(&[
        with("root", json!({"securityContext": non_root}), json!({})),
        with("unknown-name", json!({"securityContext": non_root}), json!({"image": "coracle.test/user:1"})),
        with("unknown-user", json!({}), json!({"image": "coracle.test/unknown-user:1"})),
        with("localhost", json!({}), json!({"securityContext": {"seccompProfile": {"type": "Localhost", "localhostProfile": "x.json"}}})),
        with("capability", json!({}), json!({"securityContext": {"capabilities": {"add": ["FLY"]}}})),
        with("program", json!({}), json!({"command": ["/no/such"]})),
        with("not-a-program", json!({}), json!({"command": ["/etc/passwd"]})),
        with("directory", json!({}), json!({"command": ["pwd"], "workingDir": "/etc/passwd"})),
        with("sysctl", json!({"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}}), json!({})),
        with("host-sysctl", json!({"securityContext": {"sysctls": [{"name": "kernel.hostname", "value": "x"}]}}), json!({})),
    ]);
    let mut failures = Vec::new();
    for (name, reason, expected) in [
        (
            "root",
            "CreateContainerConfigError",
            "image will run as root",
        ),
        (
            "unknown-name",
            "CreateContainerConfigError",
            "non-numeric user (app)",
        ),
        ("localhost", "CreateContainerConfigError", "Localhost"),
        ("capability", "CreateContainerConfigError", "CAP_FLY"),
        ("unknown-user", "StartError", "unable to find user unknown"),
        ("program", "StartError", "no such file or directory"),
        ("not-a-program", "StartError", "permission denied"),
        ("directory", "StartError", "/etc/passwd"),
    ] {
        let seen = e2e::eventually(std::time::Duration::from_secs(20), || {
            let status = cluster.pod(name)["status"]["containerStatuses"][0]["state"].to_string();
            (status.contains(reason) && status.to_lowercase().contains(&expected.to_lowercase()))
                .then_some(())
        });
        if seen.is_none() {
            failures.push(format!(
                "{name}: not {reason} {expected}: {}",
                cluster.pod(name)["status"]
            ));
        }
    }
    for name in ["sysctl", "host-sysctl"] {
        let status = cluster.wait_for_phase(name, "Failed")["status"].clone();
        if status["reason"] != "SysctlForbidden" {
            failures.push(format!("{name}: {status:#}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn pods_of_a_node_have_unique_reachable_addresses() {
    let lab = Lab::acquire();
    let mut cluster = cluster_of(&lab, "user1");
    let server = |name: &str| {
        let script =
            format!("mkdir /www; echo {name} > /www/index.html; exec httpd -f -p 80 -h /www");
        checking_pod(name, json!({}), json!({}), &script)
    };
    let names: Vec<String> = (0..5).map(|i| format!("web{i}")).collect();
    let servers: Vec<Value> = names.iter().map(|name| server(name)).collect();
    let address = |cluster: &mut TestCluster, name: &str| {
        let pod = cluster.pod_until(name, "has an address", |pod| {
            pod["status"]["phase"] == "Running" && pod["status"]["podIP"].is_string()
        });
        assert_eq!(
            pod["status"]["podIPs"][0]["ip"], pod["status"]["podIP"],
            "{pod:#}"
        );
        pod["status"]["podIP"].as_str().unwrap().to_owned()
    };
    cluster.create_objects(&servers);
    let addresses: Vec<String> = names
        .iter()
        .map(|name| address(&mut cluster, name))
        .collect();
    let unique: std::collections::HashSet<_> = addresses.iter().collect();
    assert_eq!(unique.len(), names.len(), "{addresses:?}");

    let mut script =
        String::from("is loopback 127.0.0.1 \"$(ip -o address show lo | grep -o '127.0.0.1')\"\n");
    for (name, ip) in names.iter().zip(&addresses) {
        script += &format!(
            "is 'page of {name}' {name} \"$(printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 5 {ip} 80 | tail -n 1)\"\nworks ping -c 1 -W 5 {ip}\n"
        );
    }
    // From port 80 on, any user may listen in the pod's network namespace.
    script += "(echo hello | nc -l -p 90) & sleep 0.3; is own hello \"$(nc 127.0.0.1 90 < /dev/null)\"\nfails nc -w 2 127.0.0.1 80\n";
    cluster.create_objects(&[checking_pod("client", json!({}), json!({}), &script)]);
    cluster.assert_checks_pass(&["client"]);
    // Pods are not reachable from outside of the node's own network namespace.
    let outside = lab.sh(&format!(
        "timeout 2 bash -c '</dev/tcp/{}/80'",
        addresses[0]
    ));
    let outside = outside.user("user2").on("node1").run();
    assert!(outside.code != 0, "{outside}");

    cluster.shell("kubectl delete pods --all --wait=true --timeout=50s");
    cluster.create_objects(&servers);
    let again: std::collections::HashSet<String> = names
        .iter()
        .map(|name| address(&mut cluster, name))
        .collect();
    assert_eq!(again.len(), names.len(), "{again:?}");
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn another_user_cannot_read_pods() {
    let lab = Lab::acquire();
    let mut cluster = cluster_of(&lab, "user1");
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"key": "secret-word"}});
    let env = json!({"env": [{"name": "WORD", "valueFrom": {"secretKeyRef": {"name": "s", "key": "key"}}}],
        "volumeMounts": [{"name": "s", "mountPath": "/s"}, {"name": "v", "mountPath": "/v"}]});
    let volumes = json!({"volumes": [{"name": "s", "secret": {"secretName": "s"}}, {"name": "v", "emptyDir": {}}]});
    cluster.create_objects(&[
        secret,
        checking_pod(
            "private",
            volumes,
            env,
            "cp /s/key /v/; chmod 777 /v/key; exec sleep 1002",
        ),
    ]);
    cluster.wait_for_phase("private", "Running");
    wait_until(10, "the pod's process runs", || {
        !lab.marked("sleep 1002").is_empty()
    });
    let (host, process) = lab.marked("sleep 1002").remove(0);
    assert_eq!(host, "node1");
    let pid = process.pid;
    // Root can read the value in the environment, so the attempts below are meaningful.
    assert!(
        lab.root("node1", &format!("tr '\\0' '\\n' < /proc/{pid}/environ"))
            .stdout
            .contains("secret-word")
    );
    let dirs = lab.root("node1", "ls -d /tmp/coracle-*").stdout;
    assert!(!dirs.trim().is_empty(), "the node has a directory");
    let other = |script: &str| lab.sh(script).user("user2").on("node1").run();
    for script in [
        "ls /tmp/coracle-*/".to_owned(),
        "cat /tmp/coracle-*/kubelet.sock /tmp/coracle-*/hub.sock".to_owned(),
        format!("cat /proc/{pid}/environ"),
        format!("cat /proc/{pid}/mem"),
        format!("ls /proc/{pid}/root/"),
        format!("ls /proc/{pid}/cwd/"),
        format!("ls -l /proc/{pid}/fd/"),
        format!("readlink /proc/{pid}/ns/net"),
        format!("nsenter --target {pid} --user true"),
        format!("kill -0 {pid}"),
        "grep -r secret-word /tmp/ /dev/shm/ /var/tmp/ 2>/dev/null".to_owned(),
    ] {
        let output = other(&script);
        assert!(output.code != 0, "{script}{output}");
    }
    let socket = lab.root("node1", "ls /tmp/coracle-*/*.sock").stdout;
    for path in socket.split_whitespace() {
        let output = other(&format!(
            "python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect(\"{path}\")'"
        ));
        assert!(
            output.code != 0 && output.stderr.contains("denied"),
            "{path}{output}"
        );
    }
    // Secrets are never on disk.
    let disk = lab
        .root(
            "node1",
            "grep -rl secret-word /tmp/ /var/tmp/ | grep -v '/v/key$\\|/volumes/v/\\|emptydir'",
        )
        .stdout;
    assert_eq!(disk, "", "on the disk");
    cluster.exit(0);
    lab.assert_nothing_left();
}

/// Operations of images that expect to be root with many IDs.
const SIMULATED_ROOT: &str = r#"
touch /tmp/x
works chown 1000:1000 /tmp/x
works chown -h nobody /tmp/x
works chgrp 7 /tmp/x
is owner 0:0 "$(stat -c %u:%g /tmp/x)"
fails mknod /tmp/device c 1 3
works su -s /bin/sh nobody -c true
works start-stop-daemon -S -c nobody -x /bin/true
mkdir /tmp/a /tmp/b && touch /tmp/a/f
works tar -C /tmp/a -cf /tmp/a.tar f
works tar -C /tmp/b -xpf /tmp/a.tar
works chmod 4755 /tmp/x
is ids 0:0 "$(id -u):$(id -g)"
is data hello "$(echo hello > /tmp/x; cat /tmp/x)"
"#;

#[test]
fn pods_run_with_a_single_id() {
    let lab = Lab::acquire();
    let mut cluster = cluster_of(&lab, "user2");
    load_capable(&lab, "user2");
    let group = json!({"securityContext": {"runAsUser": 1000, "runAsGroup": 2000, "fsGroup": 3000, "supplementalGroups": [4000]},
        "volumes": [{"name": "v", "emptyDir": {}}, {"name": "m", "emptyDir": {"medium": "Memory"}}]});
    let mounts = json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}, {"name": "m", "mountPath": "/m"}]});
    let filtered = json!({"securityContext": {"seccompProfile": {"type": "RuntimeDefault"}, "allowPrivilegeEscalation": false,
        "capabilities": {"drop": ["ALL"]}}});
    let mut objects = vec![
        checking_pod("plain", json!({}), json!({}), PLAIN),
        checking_pod("simulated-root", json!({}), json!({}), SIMULATED_ROOT),
        checking_pod(
            "filtered",
            json!({}),
            filtered,
            "touch /tmp/x\nworks chown 5:5 /tmp/x\nis capabilities 0000000000000000 \"$(awk '/^CapEff/ { print $2 }' /proc/self/status)\"",
        ),
        checking_pod(
            "as-1000",
            group,
            mounts,
            r#"
is ids 1000:2000 "$(id -u):$(id -g)"
works touch /v/x /m/x /tmp/x
works chown 5:5 /v/x
is data hello "$(echo hello > /v/x; cat /v/x)"
is capabilities 0000000000000000 "$(awk '/^CapEff/ { print $2 }' /proc/self/status)"
"#,
        ),
        checking_pod(
            "read-only",
            json!({}),
            json!({"securityContext": {"readOnlyRootFilesystem": true}}),
            "fails touch /x\nworks touch /dev/shm/x",
        ),
        checking_pod(
            "privileged",
            json!({}),
            json!({"securityContext": {"privileged": true}}),
            &format!("works mount -t tmpfs none /tmp\n{UNMASKED}"),
        ),
    ];
    objects.extend(hostname_pods());
    // With a single ID, capabilities apply only to the container's own ID, and chown(2) is only simulated.
    objects.extend(capability_pods("1000:0"));
    cluster.create_objects(&objects);
    cluster.assert_checks_pass(&[
        "plain",
        "simulated-root",
        "filtered",
        "as-1000",
        "read-only",
        "privileged",
        "programs",
        "named",
        "full-name",
        "sysctls",
    ]);
    cluster.exit(0);
    lab.assert_nothing_left();
}
