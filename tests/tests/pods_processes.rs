//! Processes and files of exited containers, mounts that containers of a pod share, and special images.

use e2e::{
    BUSYBOX, Lab, Process, Role, TestCluster, checking_container, container_status, merged, pod,
    wait_until,
};
use serde_json::{Value, json};

/// Daemons, which leave their parent and their session.
fn daemons(mark: u32) -> String {
    format!("setsid sleep {mark} & (sleep {mark} &); sleep {mark}")
}

fn single_container_pod(name: &str, more: Value, container: Value, script: &str) -> Value {
    let own = json!({"name": "main", "image": BUSYBOX, "command": ["sh", "-c", script]});
    pod(name, more, &[merged(own, container)])
}

/// The number of `sleep` processes in the lab with this duration.
fn sleeping(lab: &Lab, mark: u32) -> usize {
    let all = lab.marked(&format!("sleep {mark}")).into_iter();
    all.filter(|(_, process)| process.args.starts_with("sleep "))
        .count()
}

/// The inner process and the sandbox of the pod with a `sleep` of this duration.
#[track_caller]
fn above(lab: &Lab, mark: u32) -> (Process, Process) {
    let all = lab.processes("node1");
    let is_sandbox = |process: &&Process| process.args.contains("internal sandbox");
    let parent = |process: &Process| all.iter().find(|other| other.pid == process.parent);
    let mark = format!("sleep {mark}");
    let mut sleepers = all.iter().filter(|process| process.args == mark);
    let inner = sleepers.find_map(|process| parent(process).filter(is_sandbox));
    let sandbox = inner.and_then(parent).filter(is_sandbox);
    match (inner, sandbox) {
        (Some(inner), Some(sandbox)) => (inner.clone(), sandbox.clone()),
        _ => panic!("no sandbox above {mark:?}: {all:#?}"),
    }
}

/// The number of run directories of a container on the node's disk.
fn runs_on_disk(lab: &Lab, container: &str) -> usize {
    let list = format!("ls -d /tmp/coracle-*/pods/*/containers/{container}/* 2>/dev/null | wc -l");
    let count = lab.root("node1", &list).stdout;
    count.trim().parse().expect("a number")
}

const DAEMON: u32 = 41_001;
const OF_USER: u32 = 41_002;
const INNER_KILLED: u32 = 41_003;
const SANDBOX_KILLED: u32 = 41_004;
const SHARED: u32 = 41_005;
const BESIDE: u32 = 41_006;

#[test]
fn no_process_or_file_outlives_its_container() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start_as(&lab, "user1", &["srun", "-N1", "coracle", "run"]);
    let host = json!({"hostPID": true});
    let user = json!({"hostPID": true, "securityContext": {"runAsUser": 1000}});
    let shared = json!({"shareProcessNamespace": true, "restartPolicy": "Always"});
    let crashing = format!(
        "dd if=/dev/zero of=/file bs=1M count=1 2> /dev/null; setsid sleep {SHARED} & sleep 1; exit 1"
    );
    let crashing = json!({"name": "crashing", "image": BUSYBOX, "command": ["sh", "-c", crashing]});
    let beside =
        json!({"name": "beside", "image": BUSYBOX, "command": ["sleep", BESIDE.to_string()]});
    cluster.create_objects(&[
        single_container_pod("deleted", host.clone(), json!({}), &daemons(DAEMON)),
        single_container_pod("of-user", user, json!({}), &daemons(OF_USER)),
        single_container_pod(
            "inner-killed",
            host.clone(),
            json!({}),
            &daemons(INNER_KILLED),
        ),
        single_container_pod("sandbox-killed", host, json!({}), &daemons(SANDBOX_KILLED)),
        pod("shared", shared, &[crashing, beside]),
    ]);
    for name in ["deleted", "of-user", "inner-killed", "sandbox-killed"] {
        cluster.wait_for(name, "condition=Ready");
    }
    for mark in [DAEMON, OF_USER, INNER_KILLED, SANDBOX_KILLED] {
        wait_until(10, "all of its processes run", || sleeping(&lab, mark) == 3);
    }

    cluster.shell("kubectl delete pod deleted of-user --grace-period=1");
    lab.kill("node1", "KILL", &above(&lab, INNER_KILLED).0);
    lab.kill("node1", "KILL", &above(&lab, SANDBOX_KILLED).1);
    for mark in [DAEMON, OF_USER, INNER_KILLED, SANDBOX_KILLED] {
        wait_until(10, "none of its processes runs", || {
            sleeping(&lab, mark) == 0
        });
    }
    for name in ["inner-killed", "sandbox-killed"] {
        let failed = cluster.wait_for_phase(name, "Failed");
        let ended = &container_status(&failed, "main")["state"]["terminated"];
        assert_eq!(ended["exitCode"], 137, "{failed:#}");
    }

    let again = cluster.pod_until("shared", "restarted and backing off", |pod| {
        let status = container_status(pod, "crashing");
        status["restartCount"].as_u64() >= Some(1)
            && status["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    });
    assert_eq!(
        container_status(&again, "beside")["restartCount"],
        0,
        "{again:#}"
    );
    assert_eq!(sleeping(&lab, SHARED), 0);
    assert_eq!(sleeping(&lab, BESIDE), 1);
    wait_until(5, "files of ended runs are removed", || {
        runs_on_disk(&lab, "crashing") == 0
    });
    assert_eq!(runs_on_disk(&lab, "beside"), 1);
    cluster.exit(0);
    lab.assert_nothing_left();
}

const DECLARED: &str = "coracle.test/declared:1";

/// A 32-bit program that writes "32", and files in directories that the image declares as volumes.
const DECLARED_LAYER: &str = r"
mkdir -p data/deep srv
echo f0VMRgEBAQAAAAAAAAAAAAIAAwABAAAAVIAECDQAAAAAAAAAAAAAADQAIAABAAAAAAAAAAEAAAAAAAAAAIAECACABAh2AAAAdgAAAAUAAAAAEAAAuAQAAAC7AQAAALlzgAQIugMAAADNgLgBAAAAMdvNgDMyCg== | base64 --decode > srv/small
chmod 755 srv/small
echo content > data/deep/file; chmod 640 data/deep/file; ln -s deep/file data/link
tar --owner=33 --group=44 --create data srv
";

fn image_pods() -> Vec<Value> {
    let config = json!({"image": DECLARED, "imagePullPolicy": "Never", "securityContext": {"readOnlyRootFilesystem": true},
        "volumeMounts": [{"name": "v", "mountPath": "/mine"}]});
    let declared = checking_container(
        "main",
        config,
        r#"
        fails busybox touch /new /srv/new
        is content content "$(cat /data/link)"
        is owner '33:44 640' "$(stat -c '%u:%g %a' /data/deep/file)"
        works busybox touch /data/new /data/deep/new /cache/here/new /mine/new
        is cache new "$(ls /cache/here)"
        "#,
    );
    let filtered = json!({"image": DECLARED, "imagePullPolicy": "Never", "securityContext":
        {"seccompProfile": {"type": "RuntimeDefault"}}});
    let small = checking_container(
        "main",
        filtered,
        r#"is 'a program of 32 bits' 32 "$(/srv/small)""#,
    );
    let missing = json!([{"name": "i", "image": {"reference": "127.0.0.1:1/none:1"}}]);
    let waits = json!({"name": "main", "image": BUSYBOX, "command": ["true"],
        "volumeMounts": [{"name": "i", "mountPath": "/i"}]});
    let goes = json!({"name": "other", "image": BUSYBOX, "command": ["true"]});
    vec![
        pod(
            "declared",
            json!({"volumes": [{"name": "v", "emptyDir": {}}]}),
            &[declared],
        ),
        pod("small", json!({}), &[small]),
        pod("no-image", json!({"volumes": missing}), &[waits, goes]),
    ]
}

/// A sidecar mounts a file system in a volume before the other containers start, and another one after.
fn mount_pod() -> Value {
    let mount = |more: Value| {
        let own = json!({"name": "v", "mountPath": "/v"});
        json!({"volumeMounts": [merged(own, more)]})
    };
    let script =
        "mkdir /v/sub /v/later; mount -t tmpfs none /v/sub; echo fed > /v/sub/file; touch /v/up
        until test -e /v/sub/started; do sleep 0.1; done
        mount -t tmpfs none /v/later; echo later > /v/later/file; exec sleep 10000";
    let side = merged(
        json!({"name": "side", "image": BUSYBOX, "restartPolicy": "Always", "command": ["sh", "-c", script],
            "securityContext": {"privileged": true},
            "startupProbe": {"exec": {"command": ["test", "-e", "/v/up"]}, "periodSeconds": 1, "failureThreshold": 30}}),
        mount(json!({"mountPropagation": "Bidirectional"})),
    );
    let reader = checking_container(
        "reader",
        mount(json!({"mountPropagation": "HostToContainer"})),
        r#"
        is first fed "$(cat /v/sub/file)"
        touch /v/sub/started
        n=0; until test -e /v/later/file || [ $n -gt 100 ]; do sleep 0.1; n=$((n+1)); done
        is second later "$(cat /v/later/file)"
        touch /v/sub/seen
        "#,
    );
    let apart = checking_container(
        "apart",
        mount(json!({})),
        r#"
        is first fed "$(cat /v/sub/file)"
        n=0; until test -e /v/sub/seen || [ $n -gt 100 ]; do sleep 0.1; n=$((n+1)); done
        works test -e /v/sub/seen
        fails cat /v/later/file
        "#,
    );
    let read_only = checking_container(
        "read-only",
        mount(json!({"readOnly": true})),
        "fails touch /v/x; works touch /v/sub/x",
    );
    let all_read_only = checking_container(
        "all-read-only",
        mount(json!({"readOnly": true, "recursiveReadOnly": "Enabled"})),
        r#"fails touch /v/y; fails touch /v/sub/y; is file fed "$(cat /v/sub/file)""#,
    );
    let more = json!({"volumes": [{"name": "v", "emptyDir": {}}], "initContainers": [side]});
    pod("mounts", more, &[reader, apart, read_only, all_read_only])
}

#[test]
fn declared_volumes_and_mount_propagation_work() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let volumes = json!({"/data": {}, "/cache/here": {}, "/mine": {}});
    let config = json!({"Env": ["PATH=/bin"], "Cmd": ["sh"], "Volumes": volumes});
    lab.load_image(DECLARED, config, DECLARED_LAYER);
    let mut cluster = TestCluster::start_as(&lab, "user1", &["srun", "-N1", "coracle", "run"]);
    cluster.create_objects(&image_pods());
    cluster.create_objects(&[mount_pod()]);
    cluster.assert_checks_pass(&["declared", "small", "mounts"]);

    let waiting = cluster.pod_until("no-image", "backing off", |pod| {
        container_status(pod, "main")["state"]["waiting"]["reason"] == "ImagePullBackOff"
    });
    let message = container_status(&waiting, "main")["state"]["waiting"]["message"].to_string();
    assert!(message.contains("127.0.0.1:1/none:1"), "{message}");
    let other = &container_status(&waiting, "other")["state"]["terminated"];
    assert_eq!(other["exitCode"], 0, "{waiting:#}");
    cluster.wait_for_event(
        "no-image",
        "Warning Failed Failed to pull image \"127.0.0.1:1/none:1\"",
    );
    cluster.exit(0);
    lab.assert_nothing_left();
}

const APT: &str = "coracle.test/apt:1";

/// The machine's own apt and dpkg, and a repository with one package.
const APT_LAYER: &str = r"
set -eu
programs='/usr/bin/apt-get /usr/bin/dpkg /usr/bin/dpkg-deb /usr/bin/dpkg-query /usr/bin/dpkg-split /bin/tar'
methods='/usr/lib/apt/methods/file /usr/lib/apt/methods/copy /usr/lib/apt/methods/store'
cp --parents --dereference $programs $methods /usr/share/dpkg/*table .
for program in $programs $methods; do ldd $program; done | grep --only-matching '/[^ ]*' | sort --unique | xargs cp --parents --dereference --target-directory=.
mkdir -p bin sbin etc/apt/apt.conf.d tmp var/lib/apt/lists/partial var/cache/apt/archives/partial var/log/apt var/lib/dpkg/info var/lib/dpkg/updates srv/repo
touch var/lib/dpkg/status
for applet in rm diff chown mknod true; do ln -s busybox bin/$applet; done
for name in ldconfig start-stop-daemon; do printf '#!/bin/sh\n' > sbin/$name; chmod 755 sbin/$name; done
printf 'root:x:0:0:root:/root:/bin/sh\n_apt:x:42:65534:apt:/nonexistent:/bin/false\n' > etc/passwd
printf 'root:x:0:\nnogroup:x:65534:\n' > etc/group
echo 'deb [trusted=yes] file:/srv/repo ./' > etc/apt/sources.list
mkdir -p package/DEBIAN package/opt
printf 'Package: hello-coracle\nVersion: 1\nArchitecture: all\nMaintainer: Nobody <nobody@example.org>\nDescription: prints hello\n' > package/DEBIAN/control
printf '#!/bin/sh\nchown 33:44 /opt/hello\n' > package/DEBIAN/postinst
chmod 755 package package/opt package/DEBIAN package/DEBIAN/postinst
echo hello > package/opt/hello
dpkg-deb --build package srv/repo/hello.deb > /dev/null
{ cat package/DEBIAN/control; printf 'Filename: ./hello.deb\nSize: %s\nSHA256: %s\n' $(stat --format=%s srv/repo/hello.deb) $(sha256sum < srv/repo/hello.deb | cut -d' ' -f1); } > srv/repo/Packages
rm -r package
tar --owner=0 --group=0 --create *
";

#[test]
fn packages_can_be_installed_with_a_single_id() {
    let lab = Lab::acquire();
    let config = json!({"Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"], "Cmd": ["sh"]});
    lab.load_image_for("user2", APT, config, APT_LAYER);
    let mut cluster = TestCluster::start_as(&lab, "user2", &["srun", "-N1", "coracle", "run"]);
    let container = json!({"image": APT, "imagePullPolicy": "Never"});
    let script = r#"
    output=$(apt-get -o APT::Sandbox::User=_apt update 2>&1)
    is 'warnings of apt as another user' 1 "$(echo "$output" | grep -c 'set.*uid\|switch')"
    works apt-get update
    works apt-get install --yes hello-coracle
    is installed hello "$(cat /opt/hello)"
    is status 'install ok installed' "$(dpkg-query --show --showformat '${Status}' hello-coracle)"
    is 'device' "mknod: /opt/device: Operation not permitted" "$(mknod /opt/device c 1 3 2>&1)"
    works apt-get remove --yes hello-coracle
    fails cat /opt/hello
    "#;
    cluster.create_objects(&[pod(
        "apt",
        json!({}),
        &[checking_container("main", container, script)],
    )]);
    cluster.assert_checks_pass(&["apt"]);
    cluster.exit(0);
    lab.assert_nothing_left();
}

/// Starts up to 5000 processes, which exit by themselves. A shell gives up when fork(2) fails, so several shells start one after
/// the other. Their orphans become zombies, which count.
const BOMB: &str = "
mkfifo /tmp/wait
for turn in 0 2 4 6 8 10 15 20 30 40; do
  (
    read -t $turn nothing <> /tmp/wait
    i=0; while [ $i -lt 500 ]; do sleep 100 & i=$((i+1)); done
  ) &
done
exec sleep 300";

/// More than a cluster of one node needs, and fewer than [`BOMB`] would use.
const PROCESSES: u32 = 1200;

#[test]
fn fork_bomb_affects_no_other_pod() {
    let lab = Lab::acquire();
    lab.load_busybox();
    // The kernel counts the user's processes on the whole machine, including other labs.
    let count = "ps -eL -o uid= | grep -cw $(id -u user1 2>/dev/null || echo 2001)";
    let used: u32 = lab.machine(count).trim().parse().expect("a number");
    let limit = used + PROCESSES;
    let script = format!("ulimit -u {limit} && exec srun -N1 coracle run bash");
    let mut cluster = TestCluster::from_command(lab.sh(&script).start());
    let probed = json!({"livenessProbe": {"exec": {"command": ["sh", "-c", "echo alive | cat"]}, "periodSeconds": 1,
        "timeoutSeconds": 30}});
    let again = json!({"restartPolicy": "Always"});
    cluster.create_objects(&[single_container_pod(
        "calm",
        again.clone(),
        probed,
        "exec sleep 10000",
    )]);
    cluster.wait_for("calm", "condition=Ready");
    let of_coracle = [
        Role::Agent,
        Role::HubInside,
        Role::Hub,
        Role::Component("kube-apiserver"),
        Role::Component("etcd"),
    ];
    let of_coracle = of_coracle.map(|role| lab.find("node1", role));

    let piped = "timeout 40 kubectl exec calm -- sh -c 'echo alive | cat'";
    for (late, context) in [
        ("late", json!({})),
        ("later", json!({"securityContext": {"runAsUser": 1000}})),
    ] {
        cluster.create_objects(&[single_container_pod("bomb", json!({}), context, BOMB)]);
        wait_for_fork_failure(&mut cluster, "bomb");
        assert_eq!(cluster.shell(piped), "alive");
        let script = "echo late | cat; exec sleep 10000";
        cluster.create_objects(&[single_container_pod(late, again.clone(), json!({}), script)]);
        cluster.wait_for(late, "condition=Ready");
        assert_eq!(cluster.logs(late, "main"), "late");
        cluster.shell("kubectl delete pod bomb --grace-period=1");
    }
    let calm = cluster.pod("calm");
    assert_eq!(
        container_status(&calm, "main")["restartCount"],
        0,
        "{calm:#}"
    );

    // Together, the bombs take processes from other pods, but not from Coracle.
    let bombs = ["bomb1", "bomb2", "bomb3"];
    cluster
        .create_objects(&bombs.map(|name| single_container_pod(name, json!({}), json!({}), BOMB)));
    for bomb in bombs {
        wait_for_fork_failure(&mut cluster, bomb);
    }
    assert!(cluster.has_ready_nodes(1));
    for process in &of_coracle {
        assert!(lab.is_alive("node1", process), "{process:?}");
    }
    cluster.shell("kubectl delete pod bomb1 bomb2 bomb3 --grace-period=1");
    assert_eq!(cluster.shell(piped), "alive");
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[track_caller]
fn wait_for_fork_failure(cluster: &mut TestCluster, pod: &str) {
    wait_until(90, "the bomb has reached its limit", || {
        let (_, log) = cluster.try_shell(&format!("kubectl logs {pod}"));
        log.contains("can't fork")
    });
}
