//! SIGKILL of every process that holds the namespaces of a node.

use e2e::{Lab, Process, Role, TestCluster, condition, container_status, wait_until};
use serde_json::Value;

use super::{
    CONNECTED, can_connect, marked_process_on, next_hub_on, sandbox_above, wait_for_connection,
};

/// The host on which processes are killed. The leader and the other pods are on another node.
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
fn start(lab: &Lab) -> TestCluster {
    lab.load_busybox();
    let mut cluster = TestCluster::start(lab);
    cluster.create(lab, &CONNECTED.replace("node1", HOST));
    cluster.create(lab, OTHER);
    for pod in ["first", "second", "other"] {
        cluster.wait_for(pod, "condition=Ready");
    }
    cluster
}

/// Kills the agent, the hub and the agent's guard, which hold the node's namespaces, and stops the sandboxes of `pods` before they can
/// respond to the next agent. Also kills the containers of these pods. Waits for the next hub, and returns its processes and the
/// sandboxes.
///
/// The sandboxes are stopped last: when their parent dies, the kernel continues stopped processes in its process groups.
#[track_caller]
fn replace_agent_and_hub<const N: usize>(
    lab: &Lab,
    pods: [&str; N],
) -> ([Process; 2], [Process; N]) {
    let containers = pods.map(|pod| marked_process_on(HOST, lab, &format!("mark-{pod}")));
    let all = lab.processes(HOST);
    let sandboxes = containers
        .each_ref()
        .map(|process| sandbox_above(&all, process));
    let killed = [Role::AgentGuard, Role::Agent, Role::HubInside, Role::Hub]
        .map(|role| lab.find(HOST, role));
    let pids = |processes: &[Process]| {
        let pids: Vec<_> = processes.iter().map(|p| p.pid.to_string()).collect();
        pids.join(" ")
    };
    let script = format!(
        "kill -KILL {0}; for pid in {0}; do while kill -0 $pid 2>/dev/null; do sleep 0.01; done; done; kill -STOP {1}; kill -KILL {2}",
        pids(&killed),
        pids(&sandboxes),
        pids(&containers)
    );
    lab.root(HOST, &script).succeeded();
    let [_, _, inside, outside] = &killed;
    (next_hub_on(lab, HOST, &[inside, outside]), sandboxes)
}

/// Fields that do not change while a pod is unaffected.
fn facts(pod: &Value) -> [Value; 4] {
    let status = container_status(pod, "c");
    let [id, restarts, ready] =
        ["containerID", "restartCount", "ready"].map(|field| status[field].clone());
    [id, restarts, ready, pod["status"]["podIP"].clone()]
}

#[test]
fn namespaces_are_found_through_any_container() {
    let lab = Lab::acquire();
    let mut cluster = start(&lab);
    let pods = ["first", "second", "other"];
    let before = pods.map(|pod| cluster.pod(pod));
    let (_, [sandbox]) = replace_agent_and_hub(&lab, ["first"]);
    lab.kill(HOST, "CONT", &sandbox);

    // The pod keeps its sandbox and its address. Only its container is restarted.
    let after = cluster.pod_until("first", "runs again", |pod| {
        container_status(pod, "c")["restartCount"] == 1
            && container_status(pod, "c")["ready"] == true
    });
    assert_eq!(after["status"]["podIP"], before[0]["status"]["podIP"]);
    wait_for_connection(&mut cluster, "first", &before[1]);
    wait_for_connection(&mut cluster, "second", &after);
    for before in &before[1..] {
        let name = before["metadata"]["name"].as_str().unwrap_or_default();
        assert_eq!(facts(before), facts(&cluster.pod(name)), "{name}");
    }
    for pod in pods {
        let events = cluster.events(pod);
        assert!(!events.contains("SandboxChanged"), "{pod}: {events}");
    }
    cluster.exit(0);
    lab.assert_nothing_left();
}

/// The new hub is in other namespaces. Linux before 7.0 allows it to create an interface in those of the pods; later versions reject
/// that (`rtnetlink: add missing netlink_ns_capable() check for peer netns`), so that the pods are restarted.
#[test]
fn pods_with_lost_namespaces_are_reconnected() {
    let lab = Lab::acquire();
    let mut cluster = start(&lab);
    let other = cluster.pod("other");
    let (_, sandboxes) = replace_agent_and_hub(&lab, ["first", "second"]);
    for sandbox in &sandboxes {
        lab.kill(HOST, "CONT", sandbox);
    }
    wait_until(90, "the pods can connect to each other", || {
        let [first, second] = ["first", "second"].map(|pod| cluster.pod(pod));
        can_connect(&mut cluster, "first", &second) && can_connect(&mut cluster, "second", &first)
    });
    assert_eq!(facts(&other), facts(&cluster.pod("other")));
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn pods_without_interface_are_restarted() {
    let lab = Lab::acquire();
    let mut cluster = start(&lab);
    let other = cluster.pod("other");
    let (_, sandboxes) = replace_agent_and_hub(&lab, ["first", "second"]);
    // The agent replaces a hub that hangs, so stop the next one, too.
    let stop_hub = || {
        for role in [Role::HubInside, Role::Hub] {
            if let Some(process) = lab.try_find(HOST, "user1", role) {
                lab.kill(HOST, "STOP", &process);
            }
        }
    };
    stop_hub();
    for sandbox in &sandboxes {
        lab.kill(HOST, "CONT", sandbox);
    }

    for (pod, sandbox) in ["first", "second"].into_iter().zip(&sandboxes) {
        // Ignore the parent, which has changed.
        let is_sandbox =
            |process: &Process| (process.pid, &process.args) == (sandbox.pid, &sandbox.args);
        wait_until(60, "the sandbox has exited", || {
            stop_hub();
            !lab.processes(HOST).iter().any(is_sandbox)
        });
        cluster.wait_for_event(pod, "Normal SandboxChanged");
        let pod = cluster.pod(pod);
        assert_eq!(
            condition(&pod, "Ready"),
            "False ContainersNotReady",
            "{pod:#}"
        );
    }
    // Those that were not replaced continue.
    for role in [Role::HubInside, Role::Hub] {
        lab.kill(HOST, "CONT", &lab.find(HOST, role));
    }
    let pods = ["first", "second"].map(|pod| {
        cluster.pod_until(pod, "runs again", |pod| {
            container_status(pod, "c")["ready"] == true
        })
    });
    wait_for_connection(&mut cluster, "first", &pods[1]);
    wait_for_connection(&mut cluster, "second", &pods[0]);
    assert_eq!(facts(&other), facts(&cluster.pod("other")));
    cluster.exit(0);
    lab.assert_nothing_left();
}
