//! Hosts whose `/proc` is mounted with `hidepid=2`, as at many sites. Hubs and sandboxes are non-dumpable, so that such a /proc
//! does not list them even for their own user. No code may rely on finding them in /proc.

use std::time::Duration;

use e2e::{Lab, Process, Role, TestCluster, container_status, wait_until};
use rustix::process::Signal;
use serde_json::Value;

/// `shared` has `shareProcessNamespace`, `among-all` has `hostPID`.
const PODS: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: web}
spec:
  nodeName: node2
  terminationGracePeriodSeconds: 1
  containers:
  - {name: c, image: IMAGE, command: [sh, -c, 'trap exit TERM; echo started; httpd -p 8080 -h /etc; while true; do sleep 0.1; done']}
---
apiVersion: v1
kind: Pod
metadata: {name: client}
spec:
  nodeName: node2
  terminationGracePeriodSeconds: 1
  containers: [{name: c, image: IMAGE, command: [sh, -c, 'trap exit TERM; while true; do sleep 0.1; done']}]
---
apiVersion: v1
kind: Pod
metadata: {name: shared}
spec:
  nodeName: node2
  terminationGracePeriodSeconds: 1
  shareProcessNamespace: true
  containers:
  - {name: c, image: IMAGE, command: [sh, -c, 'trap exit TERM; setsid sleep 1000 & while true; do sleep 0.1; done', mark-shared]}
---
apiVersion: v1
kind: Pod
metadata: {name: among-all}
spec:
  nodeName: node2
  terminationGracePeriodSeconds: 1
  hostPID: true
  containers:
  - {name: c, image: IMAGE, command: [sh, -c, 'trap exit TERM; setsid sleep 1000 & while true; do sleep 0.1; done', mark-among-all]}
"#;

const NAMES: [&str; 4] = ["web", "client", "shared", "among-all"];

/// `busy` uses CPU time. `pretender` has the command line of a control plane.
const MORE: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: busy}
spec:
  nodeName: node2
  terminationGracePeriodSeconds: 1
  containers: [{name: c, image: IMAGE, command: [sh, -c, 'while :; do :; done']}]
---
apiVersion: v1
kind: Pod
metadata: {name: pretender}
spec:
  nodeName: node1
  terminationGracePeriodSeconds: 1
  volumes: [{name: v, emptyDir: {}}]
  initContainers:
  - name: writes
    image: IMAGE
    command: [sh, -c, 'echo "echo current-context: pretender > /tmp/kubeconfig; mkdir -p /tmp/logs; while :; do sleep 1; done" > /v/internal']
    volumeMounts: [{name: v, mountPath: /v}]
  containers:
  - {name: c, image: IMAGE, workingDir: /v, command: [sh, internal, control-plane], volumeMounts: [{name: v, mountPath: /v}]}
"#;

fn make(name: &str) -> Lab {
    let lab = Lab::create(
        &format!("/run/coracle-lab-hidepid-{name}"),
        &["--hidepid"],
        2,
    );
    lab.load_busybox();
    lab.with_new_snapshot()
}

/// A cluster with pods on its second node.
#[track_caller]
fn start(lab: &Lab, args: &[&str]) -> TestCluster {
    let mut cluster = TestCluster::start_as(lab, "user1", args);
    cluster.create(lab, PODS);
    for pod in NAMES {
        cluster.wait_for(pod, "condition=Ready");
    }
    let shown = lab.command(&["ps", "-eo", "args"]).on("node2").run();
    for role in ["internal sandbox", "internal hub-inside"] {
        assert!(!lab.marked(role).is_empty(), "{role}");
        assert!(
            !shown.stdout.contains(role),
            "hidden from its user: {shown}"
        );
    }
    cluster
}

/// Fields that must not change when a process outside of the pod is killed.
fn facts(pod: &Value) -> [Value; 4] {
    let status = container_status(pod, "c");
    [
        pod["status"]["podIP"].clone(),
        status["containerID"].clone(),
        status["restartCount"].clone(),
        status["ready"].clone(),
    ]
}

/// Waits until one pod can connect to the other.
#[track_caller]
fn wait_for_connection(cluster: &mut TestCluster, web: &Value) {
    let address = web["status"]["podIP"].as_str().unwrap_or_default();
    let fetch = format!(
        "timeout 20 kubectl exec client -- timeout 5 wget -qO- http://{address}:8080/passwd | grep -q root"
    );
    wait_until(60, "one pod can connect to the other", || {
        cluster.try_shell(&fetch).0 == 0
    });
}

/// Kills processes on node2 at the same moment, and waits for their replacements.
#[track_caller]
fn kill_all(lab: &Lab, roles: &[Role]) {
    let killed: Vec<Process> = roles.iter().map(|role| lab.find("node2", *role)).collect();
    let pids = killed.iter().map(|process| process.pid.to_string());
    let pids: Vec<_> = pids.collect();
    lab.root("node2", &format!("kill -KILL {}", pids.join(" ")));
    wait_until(60, "the killed processes are replaced", || {
        let is_new = |role: &Role| {
            let found = lab.try_find("node2", "user1", *role);
            found.is_some_and(|found| killed.iter().all(|killed| killed.pid != found.pid))
        };
        // A process that was not killed may have been promoted.
        roles.iter().all(is_new)
    });
}

#[test]
fn pods_survive_kills_of_agents_and_hubs() {
    let lab = make("pods");
    let mut cluster = start(&lab, &["srun", "-N2", "coracle", "run"]);
    let before = NAMES.map(|pod| cluster.pod(pod));
    let kills: [&[Role]; 7] = [
        &[Role::Agent],
        &[Role::Hub],
        &[Role::HubInside, Role::Hub],
        &[Role::HubInside, Role::Hub, Role::Agent],
        &[Role::AgentGuard],
        &[Role::AgentGuard, Role::Agent],
        &[Role::HubInside, Role::Hub, Role::AgentGuard, Role::Agent],
    ];
    for roles in kills {
        kill_all(&lab, roles);
        wait_until(60, "both nodes are Ready", || cluster.has_ready_nodes(2));
        wait_for_connection(&mut cluster, &before[0]);
        for (name, before) in NAMES.iter().zip(&before) {
            let after = cluster.pod_until(name, "is ready", |pod| {
                container_status(pod, "c")["ready"] == true
            });
            assert_eq!(facts(before), facts(&after), "{name}, after {roles:?}");
        }
    }
    assert_eq!(cluster.logs("web", "c"), "started");
    cluster.shell("kubectl delete pod web shared among-all");
    cluster.run.write("exit 0\n");
    // Ignore the exit code: srun returns the highest of its tasks.
    let _ = cluster.ends_within(60);
    lab.assert_nothing_left();
}

#[test]
fn exec_logs_and_metrics_work() {
    let lab = make("exec");
    let mut cluster = start(&lab, &["srun", "-N2", "coracle", "run"]);
    cluster.create(&lab, MORE);
    for pod in ["busy", "pretender"] {
        cluster.wait_for(pod, "condition=Ready");
    }
    for pod in NAMES {
        assert_eq!(
            cluster.shell(&format!("kubectl exec {pod} -- echo in")),
            "in"
        );
    }
    assert_eq!(cluster.logs("web", "c"), "started");
    let milli = |line: &str, column: usize| -> u64 {
        let field = line.split_whitespace().nth(column);
        let number = field.and_then(|field| field.strip_suffix('m')?.parse().ok());
        number.unwrap_or(0)
    };
    wait_until(60, "the busy pod and its node use CPU time", || {
        let (_, pod) = cluster.try_shell("kubectl top pod busy --no-headers");
        let (_, node) = cluster.try_shell("kubectl top node node2 --no-headers");
        milli(&pod, 1) > 50 && milli(&node, 1) > 50 && !node.contains("unknown")
    });
    let summary = cluster.shell("kubectl get --raw /api/v1/nodes/node2/proxy/stats/summary");
    let summary: Value = serde_json::from_str(&summary).unwrap();
    let pods = summary["pods"].as_array().expect("a list of pods");
    let web = pods.iter().find(|pod| pod["podRef"]["name"] == "web");
    let web = web.expect("a pod that is measured");
    assert_eq!(web["network"]["name"], "eth0", "{web:#}");
    assert_eq!(web["containers"][0]["name"], "c", "{web:#}");

    // A container with the command line of a control plane is not taken for one.
    let clusters = cluster.shell("coracle logs");
    assert!(!clusters.contains("pretender"), "{clusters}");
    cluster.shell("coracle logs --tail=1 kube-apiserver");

    // All processes of a container are killed with it, even daemons.
    let daemons = || {
        let all = lab.processes("node2").into_iter();
        let daemons = all.filter(|process| process.args == "sleep 1000");
        daemons.map(|process| process.pid).collect::<Vec<_>>()
    };
    for pod in ["shared", "among-all"] {
        let before = daemons();
        assert_eq!(before.len(), 2);
        let mark = format!(" mark-{pod}");
        let all = lab.processes("node2").into_iter();
        for first in all.filter(|process| process.args.ends_with(&mark)) {
            lab.kill("node2", "KILL", &first);
        }
        cluster.pod_until(pod, "restarted", |pod| {
            container_status(pod, "c")["restartCount"] == 1
                && container_status(pod, "c")["ready"] == true
        });
        wait_until(20, "the daemon is killed and started again", || {
            let after = daemons();
            let kept = after.iter().filter(|pid| before.contains(pid)).count();
            (after.len(), kept) == (2, 1)
        });
    }
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn nothing_is_left_however_the_cluster_ends() {
    let lab = make("ends");

    let cluster = start(&lab, &["srun", "-N2", "coracle", "run"]);
    lab.sh("scancel --me").run().succeeded();
    let _ = cluster.ends_within(60);
    lab.assert_nothing_left();

    let cluster = start(&lab, &["coracle", "run", "--pods-as-steps", "-N2", "-c8"]);
    lab.sh("scancel --me").run().succeeded();
    let _ = cluster.ends_within(60);
    lab.assert_nothing_left();

    let mut cluster = start(&lab, &["srun", "-N2", "coracle", "run"]);
    cluster.run.signal(Signal::INT);
    cluster.run.wait_for_stderr("interrupt");
    cluster.run.signal(Signal::INT);
    let _ = cluster.ends_within(60);
    lab.assert_nothing_left();

    let cluster = start(&lab, &["coracle", "run", "-N2"]);
    cluster.run.signal(Signal::INT);
    std::thread::sleep(Duration::from_secs(1));
    cluster.run.signal(Signal::INT);
    let _ = cluster.ends_within(60);
    lab.assert_nothing_left();

    // No process is left that could terminate pods gracefully.
    let cluster = start(&lab, &["coracle", "run", "--pods-as-steps", "-N2", "-c8"]);
    kill_all(&lab, &[Role::AgentGuard, Role::Agent]);
    kill_leader(&lab);
    let _ = cluster.ends_within(60);
    lab.assert_nothing_left();

    let cluster = start(&lab, &["srun", "-N2", "coracle", "run"]);
    kill_all(&lab, &[Role::AgentGuard, Role::Agent]);
    kill_leader(&lab);
    let _ = cluster.ends_within(60);
    lab.assert_nothing_left();
}

/// Kills the leader and its guard at the same moment.
fn kill_leader(lab: &Lab) {
    let pids = [Role::LeaderGuard, Role::LeaderWorker].map(|role| lab.find("node1", role).pid);
    lab.root("node1", &format!("kill -KILL {} {}", pids[0], pids[1]));
}
