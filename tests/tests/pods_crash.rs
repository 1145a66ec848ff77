//! SIGKILL of processes around and inside of pods: pods survive the loss of agents, hubs and the API server, and killed containers
//! are restarted by their policy.

#[path = "pods_crash/fork_servers.rs"]
mod fork_servers;
#[path = "pods_crash/namespaces.rs"]
mod namespaces;

use e2e::{Lab, Process, Role, TestCluster, container_status, wait_until};
use serde_json::Value;

const PODS: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: steady}
spec:
  nodeName: node2
  volumes: [{name: v, emptyDir: {}}]
  containers:
  - name: c
    image: IMAGE
    volumeMounts: [{name: v, mountPath: /v}]
    command: [sh, -c, 'trap exit TERM; echo kept > /v/data; httpd -p 8080 -h /etc; i=0; while true; do i=$((i+1)); echo tick $i; sleep 1; done', mark-41001]
---
apiVersion: v1
kind: Pod
metadata: {name: ending}
spec:
  nodeName: node2
  restartPolicy: Never
  volumes: [{name: out, hostPath: {path: /home/user1/out, type: DirectoryOrCreate}}]
  containers:
  - name: c
    image: IMAGE
    command: [sh, -c, 'until test -e /out/go; do sleep 0.1; done; echo exiting; exit 6']
    volumeMounts: [{name: out, mountPath: /out}]
---
apiVersion: v1
kind: Pod
metadata: {name: crashing}
spec:
  nodeName: node2
  volumes: [{name: out, hostPath: {path: /home/user1/out, type: DirectoryOrCreate}}]
  containers:
  - name: c
    image: IMAGE
    command: [sh, -c, 'trap exit TERM; until test -e /out/go && test ! -e /out/crashed; do sleep 0.1; done; touch /out/crashed; exit 9']
    volumeMounts: [{name: out, mountPath: /out}]
"#;

const LATER: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: later}
spec:
  nodeName: node2
  restartPolicy: Never
  containers: [{name: c, image: IMAGE, command: [sh, -c, 'wget -qO- http://ADDRESS:8080/passwd | grep -q root && echo connected']}]
"#;

/// Kills a process outside of the pods, or stops it for a while.
#[track_caller]
fn assert_pods_survive(host: &str, role: Role, signal: &str) {
    assert_pods_survive_fault(|lab, end_pods| {
        let killed = lab.find(host, role);
        lab.kill(host, signal, &killed);
        end_pods();
        if signal == "STOP" {
            wait_until(30, "the pods have continued without it", || {
                lab.sh("test -e out/crashed").run().code == 0
            });
            lab.kill(host, "CONT", &killed);
        } else {
            wait_until(30, "a new process runs", || {
                lab.find(host, role).pid != killed.pid
            });
        }
    });
}

/// Runs `fault` while pods run; its second argument makes one pod exit and another crash. Asserts that the pods continue, and that
/// the API server gets their statuses afterwards.
#[track_caller]
fn assert_pods_survive_fault(fault: impl FnOnce(&Lab, &dyn Fn())) {
    let lab = Lab::acquire();
    lab.load_busybox();
    // May be left by a failed test.
    lab.remove("out");
    let mut cluster = TestCluster::start(&lab);
    cluster.create(&lab, PODS);
    for pod in ["steady", "ending", "crashing"] {
        cluster.wait_for(pod, "condition=Ready");
    }
    let before = cluster.pod("steady");
    let process = marked_process(&lab, "mark-41001");

    // During the fault, one pod exits, and another crashes and is restarted.
    fault(&lab, &|| drop(lab.sh("touch out/go").run().succeeded()));
    wait_until(30, "both nodes are Ready", || cluster.has_ready_nodes(2));

    let ended = cluster.wait_for_phase("ending", "Failed");
    let state = &container_status(&ended, "c")["state"]["terminated"];
    assert_eq!(state["exitCode"], 6, "{ended:#}");
    // A node stays Ready for a while after its agent was killed, but serves no logs until the next one runs.
    wait_until(30, "the log of the pod that has ended", || {
        cluster.try_shell("kubectl logs ending --container=c") == (0, "exiting".to_owned())
    });

    let crashed = cluster.pod_until("crashing", "runs again", |pod| {
        container_status(pod, "c")["state"]["running"].is_object()
            && container_status(pod, "c")["restartCount"] == 1
    });
    let last = &container_status(&crashed, "c")["lastState"]["terminated"];
    assert_eq!(last["exitCode"], 9, "{crashed:#}");

    let after = cluster.pod_until("steady", "is ready", |pod| {
        container_status(pod, "c")["ready"] == true
    });
    let facts = |pod: &Value| {
        let status = container_status(pod, "c");
        let of_pod = ["podIP", "startTime", "phase"].map(|field| pod["status"][field].clone());
        let of_container = ["containerID", "restartCount", "state", "lastState"]
            .map(|field| status[field].clone());
        (of_pod, of_container)
    };
    assert_eq!(facts(&before), facts(&after));
    assert!(lab.is_alive("node2", &process), "{process:?}");

    let ticks = cluster.logs("steady", "c").lines().count();
    wait_until(20, "its log grows", || {
        cluster.logs("steady", "c").lines().count() > ticks
    });
    let logs = cluster.logs("steady", "c");
    assert!(logs.starts_with("tick 1\ntick 2\n"), "{logs}");

    let read_volume = "kubectl exec steady -- cat /v/data";
    wait_until(30, "its volume is readable", || {
        cluster.try_shell(read_volume) == (0, "kept".to_owned())
    });

    let address = before["status"]["podIP"].as_str().unwrap_or_default();
    cluster.create(&lab, &LATER.replace("ADDRESS", address));
    cluster.wait_for_phase("later", "Succeeded");
    assert_eq!(cluster.logs("later", "c"), "connected");
    cluster.shell("kubectl delete pod steady ending crashing later");
    assert!(!lab.is_alive("node2", &process), "{process:?}");
    lab.remove("out");
    cluster.run.write("exit 0\n");
    let _ = cluster.ends_within(30);
    lab.assert_nothing_left();
}

#[test]
fn pods_survive_kill_of_agent() {
    assert_pods_survive("node2", Role::Agent, "KILL");
}

#[test]
fn pods_survive_kill_of_agents_guard() {
    assert_pods_survive("node2", Role::AgentGuard, "KILL");
}

#[test]
fn pods_survive_ten_quick_kills_of_agent() {
    assert_pods_survive_fault(|lab, end_pods| {
        let guard = lab.find("node2", Role::AgentGuard);
        let mut last = 0;
        for kill in 1..=10 {
            wait_until(60, "a new agent runs", || {
                let all = lab.processes("node2");
                let is_agent = |process: &&Process| {
                    process.parent == guard.pid && process.args.ends_with(" internal node")
                };
                let agent = all.iter().find(is_agent).filter(|agent| agent.pid != last);
                let Some(agent) = agent else { return false };
                last = agent.pid;
                lab.kill("node2", "KILL", agent);
                true
            });
            if kill == 5 {
                end_pods();
            }
        }
        assert!(lab.is_alive("node2", &guard), "{guard:?}");
    });
}

/// Drops all packets between agent and leader, for so long that the leader starts another agent.
const DROP_PACKETS: &str = "nft -f - <<'END'
table inet cut {
  chain in { type filter hook input priority 0; tcp sport PORT drop; }
  chain out { type filter hook output priority 0; tcp dport PORT drop; }
}
END";

#[test]
fn pods_survive_a_second_agent() {
    assert_pods_survive_fault(|lab, end_pods| {
        let agent = lab.find("node2", Role::Agent);
        let port = lab.enrolment_port("node2", &agent);
        lab.root("node2", &DROP_PACKETS.replace("PORT", &port))
            .succeeded();
        end_pods();
        let agents = || {
            let all = lab.processes("node2");
            let agents = all
                .into_iter()
                .filter(|process| process.args.ends_with(" internal node"));
            agents.collect::<Vec<_>>()
        };
        // Guard and agent, and the second agent, which exits because the first one still runs.
        wait_until(60, "a second agent is started", || agents().len() > 2);
        lab.root("node2", "nft delete table inet cut").succeeded();
        wait_until(60, "one agent is left", || agents().len() == 2);
    });
}

#[test]
fn pod_network_survives_kill_of_hub() {
    assert_pods_survive("node2", Role::Hub, "KILL");
}

#[test]
fn pod_network_survives_kill_of_hub_inside() {
    assert_pods_survive("node2", Role::HubInside, "KILL");
}

#[test]
fn pods_survive_kill_of_api_server() {
    assert_pods_survive("node1", Role::Component("kube-apiserver"), "KILL");
}

#[test]
fn pods_survive_stopped_api_server() {
    assert_pods_survive("node1", Role::Component("kube-apiserver"), "STOP");
}

/// `first` is started first: a hub that does not know its address would assign it to the next pod.
const CONNECTED: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: first}
spec:
  nodeName: node1
  terminationGracePeriodSeconds: 5
  containers:
  - {name: c, image: IMAGE, command: [sh, -c, 'trap exit TERM; httpd -p 8080 -h /etc; while true; do sleep 1; done', mark-first]}
---
apiVersion: v1
kind: Pod
metadata: {name: second}
spec:
  nodeName: node1
  containers:
  - {name: c, image: IMAGE, command: [sh, -c, 'trap exit TERM; httpd -p 8080 -h /etc; while true; do sleep 1; done', mark-second]}
"#;

const THIRD: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: third}
spec:
  nodeName: node1
  containers: [{name: c, image: IMAGE, command: [sh, -c, 'trap exit TERM; while true; do sleep 1; done']}]
"#;

/// Waits until the hub on node1 has two processes that are not in `killed`; returns the one inside and the one outside.
#[track_caller]
fn next_hub(lab: &Lab, killed: &[&Process]) -> [Process; 2] {
    next_hub_on(lab, "node1", killed)
}

/// The same for any host.
#[track_caller]
fn next_hub_on(lab: &Lab, host: &str, killed: &[&Process]) -> [Process; 2] {
    let mut pair = None;
    wait_until(60, "the hub has two processes again", || {
        let found = [Role::HubInside, Role::Hub].map(|role| lab.try_find(host, "user1", role));
        let [Some(inside), Some(outside)] = found else {
            return false;
        };
        let is_new = |process: &Process| killed.iter().all(|killed| killed.pid != process.pid);
        let is_next = is_new(&inside) && is_new(&outside);
        pair = is_next.then_some([inside, outside]);
        is_next
    });
    pair.expect("the hub's processes were found")
}

/// Kills processes on node1 at the same moment.
fn kill_all(lab: &Lab, processes: &[&Process]) {
    let pids = processes.iter().map(|process| process.pid.to_string());
    let pids: Vec<_> = pids.collect();
    lab.root("node1", &format!("kill -KILL {}", pids.join(" ")));
}

/// Waits until one pod can connect to another.
#[track_caller]
fn wait_for_connection(cluster: &mut TestCluster, from: &str, to: &Value) {
    wait_until(40, "one pod can connect to the other", || {
        can_connect(cluster, from, to)
    });
}

/// Whether one pod can connect to another.
#[track_caller]
fn can_connect(cluster: &mut TestCluster, from: &str, to: &Value) -> bool {
    let address = to["status"]["podIP"].as_str().unwrap_or_default();
    let fetch = format!(
        "timeout 20 kubectl exec {from} -- timeout 5 wget -qO- http://{address}:8080/passwd | grep -q root"
    );
    cluster.try_shell(&fetch).0 == 0
}

#[test]
fn pod_network_survives_repeated_kills_of_hub() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start_as(&lab, "user1", &["srun", "-N1", "coracle", "run"]);
    cluster.create(&lab, CONNECTED);
    let pods = ["first", "second"];
    for pod in pods {
        cluster.wait_for(pod, "condition=Ready");
    }
    let before = pods.map(|pod| cluster.pod(pod));

    // Each process replaces the other one.
    for _ in 0..3 {
        let [inside, outside] = next_hub(&lab, &[]);
        lab.kill("node1", "KILL", &inside);
        let [next, same] = next_hub(&lab, &[&inside]);
        assert_eq!(same.pid, outside.pid);
        lab.kill("node1", "KILL", &outside);
        let [same, _] = next_hub(&lab, &[&inside, &outside]);
        assert_eq!(same.pid, next.pid);
    }
    wait_for_connection(&mut cluster, "second", &before[0]);

    // A process outside that hangs is replaced, too. The one inside keeps the network of the pods meanwhile.
    let [inside, outside] = next_hub(&lab, &[]);
    lab.kill("node1", "STOP", &outside);
    wait_for_connection(&mut cluster, "second", &before[0]);
    cluster.create(&lab, &THIRD.replace("third", "waiting"));
    let [same, _] = next_hub(&lab, &[&outside]);
    assert_eq!(same.pid, inside.pid);
    cluster.wait_for("waiting", "condition=Ready");
    wait_for_connection(&mut cluster, "second", &before[0]);

    for _ in 0..10 {
        lab.kill("node1", "KILL", &lab.find("node1", Role::Hub));
    }
    wait_for_connection(&mut cluster, "second", &before[0]);

    // Meanwhile the sandbox of one pod is stopped, so that it cannot reclaim its address.
    let first = marked_process_on("node1", &lab, "mark-first");
    let sandbox = sandbox_above(&lab.processes("node1"), &first);
    lab.kill("node1", "STOP", &sandbox);
    let [inside, outside] = next_hub(&lab, &[]);
    kill_all(&lab, &[&inside, &outside]);
    let [inside, outside] = next_hub(&lab, &[&inside, &outside]);
    lab.kill("node1", "CONT", &sandbox);
    wait_for_connection(&mut cluster, "second", &before[0]);

    // With the agent and both hub processes killed, nothing holds the network namespace. Pods get new interfaces.
    let agent = lab.find("node1", Role::Agent);
    kill_all(&lab, &[&agent, &inside, &outside]);
    let [inside, outside] = next_hub(&lab, &[&inside, &outside]);
    wait_for_connection(&mut cluster, "second", &before[0]);
    for before in &before {
        let name = before["metadata"]["name"].as_str().unwrap_or_default();
        let after = cluster.pod(name);
        let facts = |pod: &Value| {
            let status = container_status(pod, "c");
            let fields = ["containerID", "restartCount", "ready"];
            (
                pod["status"]["podIP"].clone(),
                fields.map(|field| status[field].clone()),
            )
        };
        assert_eq!(facts(before), facts(&after), "{name}");
    }

    // The same with a stopped sandbox, while another pod starts. The address stays reserved.
    lab.kill("node1", "STOP", &sandbox);
    let agent = lab.find("node1", Role::Agent);
    kill_all(&lab, &[&agent, &inside, &outside]);
    next_hub(&lab, &[&inside, &outside]);
    cluster.create(&lab, THIRD);
    cluster.wait_for("third", "condition=Ready");
    let third = cluster.pod("third");
    assert_ne!(third["status"]["podIP"], before[0]["status"]["podIP"]);
    lab.kill("node1", "CONT", &sandbox);
    wait_for_connection(&mut cluster, "second", &before[0]);
    let after = cluster.pod("first");
    assert_eq!(container_status(&after, "c")["restartCount"], 0);
    assert_eq!(after["status"]["podIP"], before[0]["status"]["podIP"]);
    cluster.exit(0);
    lab.assert_nothing_left();
}

const KILLED: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: always-NAME}
spec:
  nodeName: node2
  initContainers: [{name: init, image: IMAGE, command: ['true']}]
  containers:
  - {name: a, image: IMAGE, command: [sh, -c, 'trap exit TERM; while true; do sleep 1; done', mark-always-NAME-a]}
  - {name: b, image: IMAGE, command: [sh, -c, 'trap exit TERM; while true; do sleep 1; done', mark-always-NAME-b]}
---
apiVersion: v1
kind: Pod
metadata: {name: never-NAME}
spec:
  nodeName: node2
  restartPolicy: Never
  containers: [{name: a, image: IMAGE, command: [sh, -c, 'trap exit TERM; while true; do sleep 1; done', mark-never-NAME-a]}]
---
apiVersion: v1
kind: Pod
metadata: {name: on-failure-NAME}
spec:
  nodeName: node2
  restartPolicy: OnFailure
  volumes: [{name: v, emptyDir: {}}]
  initContainers: [{name: init, image: IMAGE, command: [sh, -c, 'echo init >> /v/log'], volumeMounts: [{name: v, mountPath: /v}]}]
  containers:
  - {name: a, image: IMAGE, command: [sh, -c, 'echo a >> /v/log; trap exit TERM; while true; do sleep 1; done', mark-on-failure-NAME-a], volumeMounts: [{name: v, mountPath: /v}]}
  - {name: done, image: IMAGE, command: [sh, -c, 'echo done >> /v/log'], volumeMounts: [{name: v, mountPath: /v}]}
  - {name: alone, image: IMAGE, restartPolicy: Never, command: [sh, -c, 'trap exit TERM; while true; do sleep 1; done']}
---
"#;

#[test]
fn killed_containers_are_restarted_by_policy() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start(&lab);
    let kinds = ["process", "inner", "sandbox"];
    for kind in kinds {
        cluster.create(&lab, &KILLED.replace("NAME", kind));
    }
    for kind in kinds {
        cluster.wait_for(&format!("always-{kind}"), "condition=Ready");
        cluster.wait_for(&format!("never-{kind}"), "condition=Ready");
        cluster.pod_until(
            &format!("on-failure-{kind}"),
            "done has terminated",
            |pod| {
                let one = |name| &container_status(pod, name)["state"];
                one("done")["terminated"]["exitCode"] == 0
                    && one("a")["running"].is_object()
                    && one("alone")["running"].is_object()
            },
        );
    }

    for kind in kinds {
        let always = format!("always-{kind}");
        let never = format!("never-{kind}");
        let before = cluster.pod(&always);
        let [a, b] = ["a", "b"].map(|name| marked_process(&lab, &format!("mark-{always}-{name}")));
        let never_process = marked_process(&lab, &format!("mark-{never}-a"));
        let on_failure = format!("on-failure-{kind}");
        let failing = marked_process(&lab, &format!("mark-{on_failure}-a"));
        for process in [&a, &never_process, &failing] {
            lab.kill("node2", "KILL", &victim(&lab, process, kind));
        }

        let has_restarted = |name: &'static str| {
            let id = container_status(&before, name)["containerID"].clone();
            move |pod: &Value| {
                let status = container_status(pod, name);
                status["restartCount"] == 1
                    && status["state"]["running"].is_object()
                    && status["containerID"] != id
            }
        };
        let after = cluster.pod_until(&always, "a restarted", has_restarted("a"));
        let last = &container_status(&after, "a")["lastState"]["terminated"];
        assert_eq!(last["exitCode"], 137, "{kind}: {after:#}");
        if kind == "process" {
            // Only the killed container is restarted.
            assert_eq!(
                container_status(&after, "b")["restartCount"],
                0,
                "{after:#}"
            );
            assert!(lab.is_alive("node2", &b), "{b:?}");
        } else {
            cluster.pod_until(&always, "b restarted", has_restarted("b"));
            wait_until(5, "the old processes have exited", || {
                !lab.is_alive("node2", &a) && !lab.is_alive("node2", &b)
            });
        }
        cluster.wait_for(&always, "condition=Ready");

        // A killed container has failed. Completed containers are not restarted, and the volume's content is kept.
        let after = cluster.pod_until(&on_failure, "a restarted", |pod| {
            container_status(pod, "a")["restartCount"] == 1
                && container_status(pod, "a")["state"]["running"].is_object()
        });
        let done = container_status(&after, "done");
        assert_eq!(done["restartCount"], 0, "{kind}: {after:#}");
        assert_eq!(
            done["state"]["terminated"]["exitCode"], 0,
            "{kind}: {after:#}"
        );
        let policy = container_status(&after, "alone");
        assert_eq!(policy["restartCount"], 0, "{kind}: {after:#}");
        if kind != "process" {
            let ended = &policy["state"]["terminated"];
            assert_eq!(ended["exitCode"], 137, "{kind}: {after:#}");
        }
        let log = cluster.shell(&format!(
            "kubectl exec {on_failure} --container=a -- cat /v/log"
        ));
        let count = |record: &str| log.lines().filter(|line| *line == record).count();
        assert_eq!((count("a"), count("done")), (2, 1), "{kind}: {log}");
        assert!(count("init") >= 1, "{kind}: {log}");

        let failed = cluster.wait_for_phase(&never, "Failed");
        let state = &container_status(&failed, "a")["state"]["terminated"];
        assert_eq!(state["exitCode"], 137, "{kind}: {failed:#}");
        assert_eq!(
            container_status(&failed, "a")["restartCount"],
            0,
            "{failed:#}"
        );
    }
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn slow_sandbox_is_adopted_instead_of_replaced() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start(&lab);
    cluster.create(&lab, &KILLED.replace("NAME", "slow"));
    for pod in ["always-slow", "never-slow"] {
        cluster.wait_for(pod, "condition=Ready");
    }
    let before = ["always-slow", "never-slow"].map(|pod| cluster.pod(pod));
    let processes =
        ["mark-always-slow-a", "mark-never-slow-a"].map(|mark| marked_process(&lab, mark));
    let sandboxes = processes
        .clone()
        .map(|process| victim(&lab, &process, "sandbox"));
    for sandbox in &sandboxes {
        lab.kill("node2", "STOP", sandbox);
    }
    let agent = lab.find("node2", Role::Agent);
    lab.kill("node2", "KILL", &agent);
    wait_until(30, "a new process runs", || {
        lab.find("node2", Role::Agent).pid != agent.pid
    });
    wait_until(30, "both nodes are Ready", || cluster.has_ready_nodes(2));
    // Far longer than a running sandbox needs to reconnect.
    std::thread::sleep(std::time::Duration::from_secs(8));
    for sandbox in &sandboxes {
        lab.kill("node2", "CONT", sandbox);
    }
    for before in before {
        let name = before["metadata"]["name"].as_str().unwrap_or_default();
        // Once exec works, the agent has adopted the pod.
        let exec = format!("timeout 40 kubectl exec {name} --container=a -- true");
        wait_until(30, "exec works again", || cluster.try_shell(&exec).0 == 0);
        let after = cluster.pod(name);
        assert_eq!(after["status"]["phase"], "Running", "{after:#}");
        let (before, after) = (
            container_status(&before, "a"),
            container_status(&after, "a"),
        );
        for field in ["containerID", "restartCount", "state"] {
            assert_eq!(before[field], after[field], "{name}");
        }
    }
    for process in &processes {
        assert!(lab.is_alive("node2", process), "{process:?}");
        marked_process(&lab, process.args.rsplit(' ').next().unwrap_or_default());
    }
    cluster.exit(0);
    lab.assert_nothing_left();
}

/// The process on `node2` whose last argument is this mark.
#[track_caller]
fn marked_process(lab: &Lab, mark: &str) -> Process {
    marked_process_on("node2", lab, mark)
}

/// The process on a host whose last argument is this mark.
#[track_caller]
fn marked_process_on(host: &str, lab: &Lab, mark: &str) -> Process {
    let mut found = Vec::new();
    // It may be about to start, and a shell that has just forked has the same arguments as its child.
    wait_until(10, mark, || {
        found = lab.processes(host);
        found.retain(|process| process.args.ends_with(mark) && process.args.starts_with("sh "));
        found.len() == 1
    });
    found.remove(0)
}

/// The container's process, the pod's inner process, or its sandbox.
#[track_caller]
fn victim(lab: &Lab, process: &Process, kind: &str) -> Process {
    let all = lab.processes("node2");
    match kind {
        "process" => process.clone(),
        "inner" => parent_of(&all, process),
        _ => sandbox_above(&all, process),
    }
}

#[track_caller]
fn parent_of(all: &[Process], process: &Process) -> Process {
    let parent = all.iter().find(|other| other.pid == process.parent);
    parent
        .unwrap_or_else(|| panic!("{process:?} has no parent"))
        .clone()
}

/// The sandbox above a container's process.
#[track_caller]
fn sandbox_above(all: &[Process], process: &Process) -> Process {
    let mut sandbox = parent_of(all, process);
    // The parent of the topmost sandbox process is the agent, its guard, or slurmstepd.
    while parent_of(all, &sandbox).args.contains("internal sandbox") {
        sandbox = parent_of(all, &sandbox);
    }
    assert!(sandbox.args.contains("internal sandbox"), "{sandbox:?}");
    sandbox
}
