//! What pods keep when every process is killed that holds the namespaces of their node.

use e2e::{Cluster, Lab, Process, Role, condition, container, wait_until};
use serde_json::Value;

use super::{CONNECTED, are_connected, is_connected, next_hub_on, sandbox_above, the_marked_on};

/// Where the faults are; the leader and the other pods are on another node.
const HOST: &str = "node2";

const OTHER: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: other}
spec:
  nodeName: node1
  containers: [{name: c, image: IMAGE, command: [sh, -c, 'trap exit TERM; while true; do sleep 1; done', mark-other]}]
"#;

/// Two pods on [`HOST`] and one on another node, all ready.
#[track_caller]
fn start(lab: &Lab) -> Cluster {
    lab.load_busybox();
    let mut cluster = Cluster::start(lab);
    cluster.create(lab, &CONNECTED.replace("node1", HOST));
    cluster.create(lab, OTHER);
    for pod in ["first", "second", "other"] {
        cluster.wait_for(pod, "condition=Ready");
    }
    cluster
}

/// Stops the sandbox of a pod and kills its container, which the sandbox then can't notice: no process is left through which the pod's
/// namespaces could be found. Returns the sandbox.
#[track_caller]
fn freeze(lab: &Lab, pod: &str) -> Process {
    let process = the_marked_on(HOST, lab, &format!("mark-{pod}"));
    let sandbox = sandbox_above(&lab.processes(HOST), &process);
    lab.kill(HOST, "STOP", &sandbox);
    lab.kill(HOST, "KILL", &process);
    sandbox
}

/// Kills all that hold the namespaces of the node and could start another agent there, and waits for the hub of the agent after
/// them. Returns its processes.
#[track_caller]
fn replace_agent_and_hub(lab: &Lab) -> [Process; 2] {
    let roles = [Role::AgentGuard, Role::Agent, Role::HubGuard, Role::Hub];
    let killed = roles.map(|role| lab.find(HOST, role));
    let pids = killed.each_ref().map(|process| process.pid.to_string());
    lab.root(HOST, &format!("kill -KILL {}", pids.join(" ")));
    let [_, _, guard, worker] = &killed;
    next_hub_on(lab, HOST, &[guard, worker])
}

/// What does not change of a pod that nothing happened to.
fn facts(pod: &Value) -> [Value; 4] {
    let status = container(pod, "c");
    let [id, restarts, ready] =
        ["containerID", "restartCount", "ready"].map(|field| status[field].clone());
    [id, restarts, ready, pod["status"]["podIP"].clone()]
}

#[test]
fn namespaces_are_found_through_the_containers_of_any_pod() {
    let lab = Lab::ready();
    let mut cluster = start(&lab);
    let pods = ["first", "second", "other"];
    let before = pods.map(|pod| cluster.pod(pod));
    let sandbox = freeze(&lab, "first");
    replace_agent_and_hub(&lab);
    lab.kill(HOST, "CONT", &sandbox);

    // Its container was killed. Its sandbox and its address are the same.
    let after = cluster.pod_until("first", "runs again", |pod| {
        container(pod, "c")["restartCount"] == 1 && container(pod, "c")["ready"] == true
    });
    assert_eq!(after["status"]["podIP"], before[0]["status"]["podIP"]);
    are_connected(&mut cluster, "first", &before[1]);
    are_connected(&mut cluster, "second", &after);
    for before in &before[1..] {
        let name = before["metadata"]["name"].as_str().unwrap_or_default();
        assert_eq!(facts(before), facts(&cluster.pod(name)), "{name}");
    }
    for pod in pods {
        let events = cluster.events(pod);
        assert!(!events.contains("SandboxChanged"), "{pod}: {events}");
    }
    cluster.exit(0);
    lab.nothing_left();
}

/// The new hub is in other namespaces. Linux before 7.0 lets it put an interface into those of the pods all the same; later ones refuse
/// that (`rtnetlink: add missing netlink_ns_capable() check for peer netns`), so that the pods are restarted.
#[test]
fn pods_whose_namespaces_are_lost_are_connected_again() {
    let lab = Lab::ready();
    let mut cluster = start(&lab);
    let other = cluster.pod("other");
    let sandboxes = ["first", "second"].map(|pod| freeze(&lab, pod));
    replace_agent_and_hub(&lab);
    for sandbox in &sandboxes {
        lab.kill(HOST, "CONT", sandbox);
    }
    wait_until(90, "the pods reach each other", || {
        let [first, second] = ["first", "second"].map(|pod| cluster.pod(pod));
        is_connected(&mut cluster, "first", &second) && is_connected(&mut cluster, "second", &first)
    });
    assert_eq!(facts(&other), facts(&cluster.pod("other")));
    cluster.exit(0);
    lab.nothing_left();
}

#[test]
fn pods_that_get_no_interface_are_restarted() {
    let lab = Lab::ready();
    let mut cluster = start(&lab);
    let other = cluster.pod("other");
    let sandboxes = ["first", "second"].map(|pod| freeze(&lab, pod));
    let hub = replace_agent_and_hub(&lab);
    for process in &hub {
        lab.kill(HOST, "STOP", process);
    }
    for sandbox in &sandboxes {
        lab.kill(HOST, "CONT", sandbox);
    }

    for (pod, sandbox) in ["first", "second"].into_iter().zip(&sandboxes) {
        // Its parent is another by now.
        let is_it =
            |process: &Process| (process.pid, &process.args) == (sandbox.pid, &sandbox.args);
        wait_until(60, "the sandbox has ended", || {
            !lab.processes(HOST).iter().any(is_it)
        });
        cluster.event(pod, "Normal SandboxChanged");
        let pod = cluster.pod(pod);
        assert_eq!(
            condition(&pod, "Ready"),
            "False ContainersNotReady",
            "{pod:#}"
        );
    }
    for process in &hub {
        lab.kill(HOST, "CONT", process);
    }
    let pods = ["first", "second"].map(|pod| {
        cluster.pod_until(pod, "runs again", |pod| {
            container(pod, "c")["ready"] == true
        })
    });
    are_connected(&mut cluster, "first", &pods[1]);
    are_connected(&mut cluster, "second", &pods[0]);
    assert_eq!(facts(&other), facts(&cluster.pod("other")));
    cluster.exit(0);
    lab.nothing_left();
}
