//! `kill -9` beside pods and below them: pods outlive whoever looks after them, and what dies comes back by its policy.

#[path = "pods_crash/namespaces.rs"]
mod namespaces;
#[path = "pods_crash/pullers.rs"]
mod pullers;

use e2e::{Cluster, Lab, Process, Role, container, wait_until};
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
    command: [sh, -c, 'until test -e /out/go; do sleep 0.1; done; echo gone; exit 6']
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
    command: [sh, -c, 'trap exit TERM; until test -e /out/go && test ! -e /out/gone; do sleep 0.1; done; touch /out/gone; exit 9']
    volumeMounts: [{name: out, mountPath: /out}]
"#;

const LATER: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: later}
spec:
  nodeName: node2
  restartPolicy: Never
  containers: [{name: c, image: IMAGE, command: [sh, -c, 'wget -qO- http://ADDRESS:8080/passwd | grep -q root && echo still at work']}]
"#;

/// Kills a part beside the pods, or stops it for a while.
#[track_caller]
fn pods_outlive(host: &str, role: Role, signal: &str) {
    pods_outlive_trouble(|lab, meanwhile| {
        let killed = lab.find(host, role);
        lab.kill(host, signal, &killed);
        meanwhile();
        if signal == "STOP" {
            wait_until(30, "the pods have gone on without it", || {
                lab.sh("test -e out/gone").run().code == 0
            });
            lab.kill(host, "CONT", &killed);
        } else {
            wait_until(30, "it was started again", || {
                lab.find(host, role).pid != killed.pid
            });
        }
    });
}

/// Has something happen beside the pods: they go on, and the cluster learns what happened meanwhile.
#[track_caller]
fn pods_outlive_trouble(trouble: impl FnOnce(&Lab, &dyn Fn())) {
    let lab = Lab::ready();
    lab.load_busybox();
    // Of a test that failed.
    lab.remove("out");
    let mut cluster = Cluster::start(&lab);
    cluster.create(&lab, PODS);
    for pod in ["steady", "ending", "crashing"] {
        cluster.wait_for(pod, "condition=Ready");
    }
    let before = cluster.pod("steady");
    let process = the_marked(&lab, "mark-41001");

    // Meanwhile one ends, and one crashes and comes again.
    trouble(&lab, &|| drop(lab.sh("touch out/go").run().succeeded()));
    wait_until(30, "both nodes are Ready", || cluster.has_ready_nodes(2));

    let ended = cluster.in_phase("ending", "Failed");
    let state = &container(&ended, "c")["state"]["terminated"];
    assert_eq!(state["exitCode"], 6, "{ended:#}");
    assert_eq!(cluster.logs("ending", "c"), "gone");

    let crashed = cluster.pod_until("crashing", "runs again", |pod| {
        container(pod, "c")["state"]["running"].is_object()
            && container(pod, "c")["restartCount"] == 1
    });
    let last = &container(&crashed, "c")["lastState"]["terminated"];
    assert_eq!(last["exitCode"], 9, "{crashed:#}");

    let after = cluster.pod_until("steady", "is ready", |pod| {
        container(pod, "c")["ready"] == true
    });
    let facts = |pod: &Value| {
        let status = container(pod, "c");
        let of_pod = ["podIP", "startTime", "phase"].map(|field| pod["status"][field].clone());
        let of_container = ["containerID", "restartCount", "state", "lastState"]
            .map(|field| status[field].clone());
        (of_pod, of_container)
    };
    assert_eq!(facts(&before), facts(&after));
    assert!(lab.is_alive("node2", &process), "{process:?}");

    let ticks = cluster.logs("steady", "c").lines().count();
    wait_until(20, "it goes on", || {
        cluster.logs("steady", "c").lines().count() > ticks
    });
    let logs = cluster.logs("steady", "c");
    assert!(logs.starts_with("tick 1\ntick 2\n"), "{logs}");

    let ask = "kubectl exec steady -- cat /v/data";
    wait_until(30, "its volume is there", || {
        cluster.try_ask(ask) == (0, "kept".to_owned())
    });

    let address = before["status"]["podIP"].as_str().unwrap_or_default();
    cluster.create(&lab, &LATER.replace("ADDRESS", address));
    cluster.in_phase("later", "Succeeded");
    assert_eq!(cluster.logs("later", "c"), "still at work");
    cluster.ask("kubectl delete pod steady ending crashing later");
    assert!(!lab.is_alive("node2", &process), "{process:?}");
    lab.remove("out");
    cluster.run.write("exit 0\n");
    let _ = cluster.ends_within(30);
    lab.nothing_left();
}

#[test]
fn pods_outlive_their_agent() {
    pods_outlive("node2", Role::Agent, "KILL");
}

#[test]
fn pods_outlive_their_agents_guard() {
    pods_outlive("node2", Role::AgentGuard, "KILL");
}

#[test]
fn pods_outlive_ten_quick_deaths_of_their_agent() {
    pods_outlive_trouble(|lab, meanwhile| {
        let guard = lab.find("node2", Role::AgentGuard);
        let mut last = 0;
        for death in 1..=10 {
            wait_until(60, "there is an agent again", || {
                let all = lab.processes("node2");
                let is_agent = |process: &&Process| {
                    process.parent == guard.pid && process.args.ends_with(" internal node")
                };
                let agent = all.iter().find(is_agent).filter(|it| it.pid != last);
                let Some(agent) = agent else { return false };
                last = agent.pid;
                lab.kill("node2", "KILL", agent);
                true
            });
            if death == 5 {
                meanwhile();
            }
        }
        assert!(lab.is_alive("node2", &guard), "{guard:?}");
    });
}

/// Nothing passes between the agent and the leader, for so long that the leader starts another agent.
const CUT: &str = "nft -f - <<'END'
table inet cut {
  chain in { type filter hook input priority 0; tcp sport DOOR drop; }
  chain out { type filter hook output priority 0; tcp dport DOOR drop; }
}
END";

#[test]
fn pods_outlive_a_second_agent() {
    pods_outlive_trouble(|lab, meanwhile| {
        let agent = lab.find("node2", Role::Agent);
        let door = lab.door_of_the_leader("node2", &agent);
        lab.root("node2", &CUT.replace("DOOR", &door)).succeeded();
        meanwhile();
        let agents = || {
            let all = lab.processes("node2");
            let agents = all
                .into_iter()
                .filter(|process| process.args.ends_with(" internal node"));
            agents.collect::<Vec<_>>()
        };
        // Guard and agent, and the second one, which finds that it is not needed.
        wait_until(60, "a second agent is started", || agents().len() > 2);
        lab.root("node2", "nft delete table inet cut").succeeded();
        wait_until(60, "one of them is left", || agents().len() == 2);
    });
}

#[test]
fn pods_keep_their_network_without_their_hub() {
    pods_outlive("node2", Role::Hub, "KILL");
}

#[test]
fn pods_keep_their_network_without_their_hubs_guard() {
    pods_outlive("node2", Role::HubGuard, "KILL");
}

#[test]
fn pods_outlive_the_api_server() {
    pods_outlive("node1", Role::Component("kube-apiserver"), "KILL");
}

#[test]
fn pods_go_on_while_the_api_server_hangs() {
    pods_outlive("node1", Role::Component("kube-apiserver"), "STOP");
}

/// `first` is started first, so that a hub that knows nothing of it would give its address to the next pod.
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

/// Both processes of the hub of node1, once there are two and neither is one of `killed`.
#[track_caller]
fn next_hub(lab: &Lab, killed: &[&Process]) -> [Process; 2] {
    next_hub_on(lab, "node1", killed)
}

/// The same for any host.
#[track_caller]
fn next_hub_on(lab: &Lab, host: &str, killed: &[&Process]) -> [Process; 2] {
    let mut pair = None;
    wait_until(60, "the hub has two processes again", || {
        let found = [Role::HubGuard, Role::Hub].map(|role| lab.try_find(host, "user1", role));
        let [Some(guard), Some(worker)] = found else {
            return false;
        };
        let is_new = |process: &Process| killed.iter().all(|killed| killed.pid != process.pid);
        let is_next = worker.parent == guard.pid && is_new(&guard) && is_new(&worker);
        pair = is_next.then_some([guard, worker]);
        is_next
    });
    pair.expect("it was found")
}

/// Kills processes of node1 at the same moment.
fn kill_at_once(lab: &Lab, processes: &[&Process]) {
    let pids = processes.iter().map(|process| process.pid.to_string());
    let pids: Vec<_> = pids.collect();
    lab.root("node1", &format!("kill -KILL {}", pids.join(" ")));
}

/// Waits until one pod reaches another.
#[track_caller]
fn are_connected(cluster: &mut Cluster, from: &str, to: &Value) {
    wait_until(40, "one pod reaches the other", || {
        is_connected(cluster, from, to)
    });
}

/// Whether one pod reaches another.
#[track_caller]
fn is_connected(cluster: &mut Cluster, from: &str, to: &Value) -> bool {
    let address = to["status"]["podIP"].as_str().unwrap_or_default();
    let fetch = format!(
        "timeout 20 kubectl exec {from} -- timeout 5 wget -qO- http://{address}:8080/passwd | grep -q root"
    );
    cluster.try_ask(&fetch).0 == 0
}

#[test]
fn pods_keep_their_network_however_often_their_hub_dies() {
    let lab = Lab::ready();
    lab.load_busybox();
    let mut cluster = Cluster::start_as(&lab, "user1", &["srun", "-N1", "coracle", "run"]);
    cluster.create(&lab, CONNECTED);
    let pods = ["first", "second"];
    for pod in pods {
        cluster.wait_for(pod, "condition=Ready");
    }
    let before = pods.map(|pod| cluster.pod(pod));

    // The worker becomes the guard of a new worker, and must replace that one too.
    for _ in 0..3 {
        let [guard, worker] = next_hub(&lab, &[]);
        lab.kill("node1", "KILL", &guard);
        let [promoted, next] = next_hub(&lab, &[&guard]);
        assert_eq!(promoted.pid, worker.pid);
        lab.kill("node1", "KILL", &next);
        next_hub(&lab, &[&guard, &next]);
    }
    are_connected(&mut cluster, "second", &before[0]);

    for _ in 0..10 {
        lab.kill("node1", "KILL", &lab.find("node1", Role::Hub));
    }
    are_connected(&mut cluster, "second", &before[0]);

    // Meanwhile the sandbox of one pod is stopped and can't claim its place.
    let first = the_marked_on("node1", &lab, "mark-first");
    let sandbox = sandbox_above(&lab.processes("node1"), &first);
    lab.kill("node1", "STOP", &sandbox);
    let [guard, worker] = next_hub(&lab, &[]);
    kill_at_once(&lab, &[&guard, &worker]);
    let [guard, worker] = next_hub(&lab, &[&guard, &worker]);
    lab.kill("node1", "CONT", &sandbox);
    are_connected(&mut cluster, "second", &before[0]);

    // Nothing holds the network namespace any more; pods get new interfaces.
    let agent = lab.find("node1", Role::Agent);
    kill_at_once(&lab, &[&agent, &guard, &worker]);
    let [guard, worker] = next_hub(&lab, &[&guard, &worker]);
    are_connected(&mut cluster, "second", &before[0]);
    for before in &before {
        let name = before["metadata"]["name"].as_str().unwrap_or_default();
        let after = cluster.pod(name);
        let facts = |pod: &Value| {
            let status = container(pod, "c");
            let fields = ["containerID", "restartCount", "ready"];
            (
                pod["status"]["podIP"].clone(),
                fields.map(|field| status[field].clone()),
            )
        };
        assert_eq!(facts(before), facts(&after), "{name}");
    }

    // The same, but another pod is there first and gets the address: the pod is restarted with another one.
    lab.kill("node1", "STOP", &sandbox);
    let agent = lab.find("node1", Role::Agent);
    kill_at_once(&lab, &[&agent, &guard, &worker]);
    next_hub(&lab, &[&guard, &worker]);
    cluster.create(&lab, THIRD);
    cluster.wait_for("third", "condition=Ready");
    let third = cluster.pod("third");
    assert_eq!(third["status"]["podIP"], before[0]["status"]["podIP"]);
    lab.kill("node1", "CONT", &sandbox);
    cluster.event(
        "first",
        "Normal SandboxChanged Pod sandbox changed, it will be killed and re-created.",
    );
    let after = cluster.pod_until("first", "runs again", |pod| {
        container(pod, "c")["restartCount"] == 1 && container(pod, "c")["ready"] == true
    });
    assert_ne!(after["status"]["podIP"], before[0]["status"]["podIP"]);
    are_connected(&mut cluster, "second", &after);
    are_connected(&mut cluster, "third", &after);
    cluster.exit(0);
    lab.nothing_left();
}

const BELOW: &str = r#"
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
fn what_is_killed_below_a_pod_comes_back_by_its_policy() {
    let lab = Lab::ready();
    lab.load_busybox();
    let mut cluster = Cluster::start(&lab);
    let kinds = ["process", "inner", "sandbox"];
    for kind in kinds {
        cluster.create(&lab, &BELOW.replace("NAME", kind));
    }
    for kind in kinds {
        cluster.wait_for(&format!("always-{kind}"), "condition=Ready");
        cluster.wait_for(&format!("never-{kind}"), "condition=Ready");
        cluster.pod_until(
            &format!("on-failure-{kind}"),
            "has one that is done",
            |pod| {
                let one = |name| &container(pod, name)["state"];
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
        let [a, b] = ["a", "b"].map(|name| the_marked(&lab, &format!("mark-{always}-{name}")));
        let alone = the_marked(&lab, &format!("mark-{never}-a"));
        let on_failure = format!("on-failure-{kind}");
        let failing = the_marked(&lab, &format!("mark-{on_failure}-a"));
        for process in [&a, &alone, &failing] {
            lab.kill("node2", "KILL", &victim(&lab, process, kind));
        }

        let begun_again = |name: &'static str| {
            let id = container(&before, name)["containerID"].clone();
            move |pod: &Value| {
                let status = container(pod, name);
                status["restartCount"] == 1
                    && status["state"]["running"].is_object()
                    && status["containerID"] != id
            }
        };
        let after = cluster.pod_until(&always, "began again", begun_again("a"));
        let last = &container(&after, "a")["lastState"]["terminated"];
        assert_eq!(last["exitCode"], 137, "{kind}: {after:#}");
        if kind == "process" {
            // Only that container.
            assert_eq!(container(&after, "b")["restartCount"], 0, "{after:#}");
            assert!(lab.is_alive("node2", &b), "{b:?}");
        } else {
            cluster.pod_until(&always, "began again", begun_again("b"));
            wait_until(5, "the old ones are gone", || {
                !lab.is_alive("node2", &a) && !lab.is_alive("node2", &b)
            });
        }
        cluster.wait_for(&always, "condition=Ready");

        // To be killed is to fail; who was done is done, and what was written is still there.
        let after = cluster.pod_until(&on_failure, "began again", |pod| {
            container(pod, "a")["restartCount"] == 1
                && container(pod, "a")["state"]["running"].is_object()
        });
        let done = container(&after, "done");
        assert_eq!(done["restartCount"], 0, "{kind}: {after:#}");
        assert_eq!(
            done["state"]["terminated"]["exitCode"], 0,
            "{kind}: {after:#}"
        );
        let policy = container(&after, "alone");
        assert_eq!(policy["restartCount"], 0, "{kind}: {after:#}");
        if kind != "process" {
            let ended = &policy["state"]["terminated"];
            assert_eq!(ended["exitCode"], 137, "{kind}: {after:#}");
        }
        let log = cluster.ask(&format!(
            "kubectl exec {on_failure} --container=a -- cat /v/log"
        ));
        let count = |word: &str| log.lines().filter(|line| *line == word).count();
        assert_eq!((count("a"), count("done")), (2, 1), "{kind}: {log}");
        assert!(count("init") >= 1, "{kind}: {log}");

        let failed = cluster.in_phase(&never, "Failed");
        let state = &container(&failed, "a")["state"]["terminated"];
        assert_eq!(state["exitCode"], 137, "{kind}: {failed:#}");
        assert_eq!(container(&failed, "a")["restartCount"], 0, "{failed:#}");
    }
    cluster.exit(0);
    lab.nothing_left();
}

#[test]
fn a_pod_whose_sandbox_is_slow_to_find_the_next_agent_gets_no_other() {
    let lab = Lab::ready();
    lab.load_busybox();
    let mut cluster = Cluster::start(&lab);
    cluster.create(&lab, &BELOW.replace("NAME", "slow"));
    for pod in ["always-slow", "never-slow"] {
        cluster.wait_for(pod, "condition=Ready");
    }
    let before = ["always-slow", "never-slow"].map(|pod| cluster.pod(pod));
    let processes = ["mark-always-slow-a", "mark-never-slow-a"].map(|mark| the_marked(&lab, mark));
    let sandboxes = processes
        .clone()
        .map(|process| victim(&lab, &process, "sandbox"));
    for sandbox in &sandboxes {
        lab.kill("node2", "STOP", sandbox);
    }
    let agent = lab.find("node2", Role::Agent);
    lab.kill("node2", "KILL", &agent);
    wait_until(30, "it was started again", || {
        lab.find("node2", Role::Agent).pid != agent.pid
    });
    wait_until(30, "both nodes are Ready", || cluster.has_ready_nodes(2));
    // Far longer than one takes that isn't held up.
    std::thread::sleep(std::time::Duration::from_secs(8));
    for sandbox in &sandboxes {
        lab.kill("node2", "CONT", sandbox);
    }
    for before in before {
        let name = before["metadata"]["name"].as_str().unwrap_or_default();
        // Once it can be asked, its agent has looked at it.
        let ask = format!("timeout 40 kubectl exec {name} --container=a -- true");
        wait_until(30, "it can be asked again", || cluster.try_ask(&ask).0 == 0);
        let after = cluster.pod(name);
        assert_eq!(after["status"]["phase"], "Running", "{after:#}");
        let (before, after) = (container(&before, "a"), container(&after, "a"));
        for field in ["containerID", "restartCount", "state"] {
            assert_eq!(before[field], after[field], "{name}");
        }
    }
    for process in &processes {
        assert!(lab.is_alive("node2", process), "{process:?}");
        the_marked(&lab, process.args.rsplit(' ').next().unwrap_or_default());
    }
    cluster.exit(0);
    lab.nothing_left();
}

/// The process of `node2` that has this mark as its last argument.
#[track_caller]
fn the_marked(lab: &Lab, mark: &str) -> Process {
    the_marked_on("node2", lab, mark)
}

/// The same for any host.
#[track_caller]
fn the_marked_on(host: &str, lab: &Lab, mark: &str) -> Process {
    let mut found = Vec::new();
    // It may be about to start, and a shell that has just forked has the same arguments as its child.
    wait_until(10, mark, || {
        found = lab.processes(host);
        found.retain(|process| process.args.ends_with(mark) && process.args.starts_with("sh "));
        found.len() == 1
    });
    found.remove(0)
}

/// The container's process itself, the one that started it, or the pod's sandbox.
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

/// The sandbox of the pod that a process belongs to.
#[track_caller]
fn sandbox_above(all: &[Process], process: &Process) -> Process {
    let mut sandbox = parent_of(all, process);
    // Above it are the agent, or the agent's guard, and Slurm's.
    while parent_of(all, &sandbox).args.contains("internal sandbox") {
        sandbox = parent_of(all, &sandbox);
    }
    assert!(sandbox.args.contains("internal sandbox"), "{sandbox:?}");
    sandbox
}
