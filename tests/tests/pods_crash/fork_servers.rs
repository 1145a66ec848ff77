//! Fork servers of image pulls are replaced by their sandbox.

use e2e::{Lab, Process, TestCluster, container_status, wait_until};
use serde_json::Value;

use super::{marked_process, parent_of, sandbox_above};

/// The name of an image. The pod uses each number only once.
fn image(number: u32) -> String {
    format!("coracle.test/busybox:{number}")
}

const PULLING: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: pulling}
spec:
  nodeName: node2
  containers:
  - {name: a, image: IMAGE, command: [sh, -c, 'trap exit TERM; while true; do sleep 1; done', mark-pulling-a]}
  - {name: b, image: IMAGE, command: [sh, -c, 'trap exit TERM; while true; do sleep 1; done', mark-pulling-b]}
"#;

/// The fork servers of the pod to which `process` belongs.
#[track_caller]
fn fork_servers(lab: &Lab, process: &Process) -> Vec<Process> {
    let all = lab.processes("node2");
    let (inner, sandbox) = (parent_of(&all, process), sandbox_above(&all, process));
    let is_server = |other: &Process| {
        other.parent == sandbox.pid
            && other.pid != inner.pid
            && other.args.contains("internal sandbox")
    };
    all.into_iter().filter(is_server).collect()
}

/// Changes the image of container `a`, and waits until it runs; returns the pod.
#[track_caller]
fn change_image(cluster: &mut TestCluster, number: u32) -> Value {
    let image = image(number);
    cluster.shell(&format!("kubectl set image pod/pulling a={image}"));
    cluster.pod_until("pulling", "runs the other image", |pod| {
        let status = container_status(pod, "a");
        status["image"] == image.as_str() && status["state"]["running"].is_object()
    })
}

#[test]
fn killed_fork_servers_of_pulls_are_replaced() {
    let lab = Lab::acquire();
    lab.load_busybox();
    for number in [2, 3] {
        lab.load_busybox_as("user1", &image(number));
    }
    let mut cluster = TestCluster::start(&lab);
    cluster.create(&lab, PULLING);
    cluster.wait_for("pulling", "condition=Ready");
    let b = marked_process(&lab, "mark-pulling-b");

    // One after the other.
    for server in fork_servers(&lab, &b) {
        lab.kill("node2", "KILL", &server);
        wait_until(20, "the fork server is replaced", || {
            let now = fork_servers(&lab, &b);
            now.len() == 2 && !now.contains(&server)
        });
    }
    let pod = change_image(&mut cluster, 2);
    assert_eq!(container_status(&pod, "a")["restartCount"], 1, "{pod:#}");
    assert_eq!(container_status(&pod, "b")["restartCount"], 0, "{pod:#}");
    assert!(lab.is_alive("node2", &b), "{b:?}");

    // Without fork servers, a container is still restarted alone if its image was pulled before.
    let pids = fork_servers(&lab, &b).into_iter().map(|server| server.pid);
    let pids: Vec<_> = pids.map(|pid| pid.to_string()).collect();
    // Stopped, the sandbox cannot replace the first one before the second one is killed.
    let sandbox = sandbox_above(&lab.processes("node2"), &b).pid;
    let servers = pids.join(" ");
    lab.root(
        "node2",
        &format!("kill -STOP {sandbox}; kill -KILL {servers}; kill -CONT {sandbox}"),
    );
    let a = marked_process(&lab, "mark-pulling-a");
    lab.kill("node2", "KILL", &a);
    cluster.pod_until("pulling", "has restarted a", |pod| {
        container_status(pod, "a")["restartCount"] == 2
            && container_status(pod, "a")["state"]["running"].is_object()
    });
    assert!(lab.is_alive("node2", &b), "{b:?}");

    // Another image needs a new sandbox.
    change_image(&mut cluster, 3);
    cluster.wait_for_event("pulling", "Normal SandboxChanged");
    let pod = cluster.pod_until("pulling", "has restarted b", |pod| {
        container_status(pod, "b")["restartCount"] == 1
            && container_status(pod, "b")["state"]["running"].is_object()
    });
    assert!(!lab.is_alive("node2", &b), "{b:?}: {pod:#}");
    cluster.exit(0);
    lab.assert_nothing_left();
}
