//! Termination of pods: after deletion, after completion, and at the end of the cluster.

use std::time::{Duration, Instant};

use e2e::{BUSYBOX, Lab, TestCluster, container_status, wait_until};

/// Hooks and handlers write to a file in the user's home directory, which outlives the pod.
const DELETED: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: order}
spec:
  volumes: [{name: out, hostPath: {path: /home/user1/out, type: DirectoryOrCreate}}]
  initContainers:
  - name: sidecar
    restartPolicy: Always
    image: IMAGE
    command: [sh, -c, 'trap "echo sidecar >> /out/order; exit" TERM; sleep 31001 & wait']
    volumeMounts: [{name: out, mountPath: /out}]
  containers:
  - name: main
    image: IMAGE
    command: [sh, -c, 'trap "sleep 1; echo main >> /out/order; exit" TERM; sleep 31001 & wait']
    lifecycle: {preStop: {exec: {command: [sh, -c, 'sleep 1; echo hook >> /out/order']}}}
    volumeMounts: [{name: out, mountPath: /out}]
---
apiVersion: v1
kind: Pod
metadata: {name: ignores-sigterm}
spec:
  terminationGracePeriodSeconds: 2
  containers: [{name: c, image: IMAGE, command: [sh, -c, 'trap "" TERM; while true; do sleep 31002; done']}]
---
apiVersion: v1
kind: Pod
metadata: {name: forced}
spec:
  terminationGracePeriodSeconds: 300
  containers: [{name: c, image: IMAGE, command: [sh, -c, 'trap "" TERM; while true; do sleep 31003; done']}]
---
apiVersion: v1
kind: Pod
metadata: {name: sleep-hook}
spec:
  containers: [{name: c, image: IMAGE, command: [sh, -c, 'trap exit TERM; sleep 31004 & wait'], lifecycle: {preStop: {sleep: {seconds: 2}}}}]
---
apiVersion: v1
kind: Pod
metadata: {name: debugged}
spec:
  containers: [{name: main, image: IMAGE, command: [sleep, '31005']}]
"#;

#[test]
fn deleted_pods_terminate_in_order_and_in_time() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start(&lab);
    cluster.create(&lab, DELETED);
    for name in [
        "order",
        "ignores-sigterm",
        "forced",
        "sleep-hook",
        "debugged",
    ] {
        cluster.wait_for(name, "condition=Ready");
    }

    cluster.shell(&format!(
        "kubectl debug debugged --quiet --image={BUSYBOX} --container=debugger --target=main -- sh -c \"ps; echo attached\""
    ));
    let pod = cluster.pod_until("debugged", "the debugger has terminated", |pod| {
        pod["status"]["ephemeralContainerStatuses"][0]["state"]["terminated"].is_object()
    });
    let debugger = &container_status(&pod, "debugger")["state"]["terminated"];
    assert_eq!(debugger["exitCode"], 0, "{pod:#}");
    let log = cluster.logs("debugged", "debugger");
    assert!(log.ends_with("attached"), "{log}");
    assert!(log.contains("sleep 31005"), "sees its target: {log}");
    assert_eq!(container_status(&pod, "main")["restartCount"], 0, "{pod:#}");

    let start = Instant::now();
    cluster.shell("kubectl delete pod ignores-sigterm");
    let took = start.elapsed();
    assert!(took >= Duration::from_secs(2), "{took:?}");
    assert!(took < Duration::from_secs(12), "{took:?}");

    let start = Instant::now();
    cluster.shell("kubectl delete pod sleep-hook");
    let took = start.elapsed();
    assert!(took >= Duration::from_secs(2), "{took:?}");

    cluster.shell("kubectl delete pod forced --grace-period=0 --force");
    wait_until(10, "the processes of the pod have exited", || {
        lab.marked("sleep 31003").is_empty()
    });

    cluster.shell("kubectl delete pod order debugged --grace-period=20");
    lab.sh("cat out/order")
        .run()
        .stdout_is("hook\nmain\nsidecar");
    lab.remove("out");
    cluster.wait_for_event("order", "Normal Killing Stopping container main");
    let left = lab.marked("sleep 3100");
    assert!(left.is_empty(), "{left:?}");
    cluster.exit(0);
    lab.assert_nothing_left();
}

/// A pod with a preStop hook and a SIGTERM handler.
const GRACEFUL: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: NAME}
spec:
  nodeName: NODE
  volumes: [{name: out, hostPath: {path: /home/user1/out, type: DirectoryOrCreate}}]
  containers:
  - name: c
    image: IMAGE
    command: [sh, -c, 'trap "echo term >> /out/NAME; exit" TERM; sleep 1000 & wait']
    lifecycle: {preStop: {exec: {command: [sh, -c, 'echo hook >> /out/NAME']}}}
    volumeMounts: [{name: out, mountPath: /out}]
---
"#;

#[test]
fn pods_terminate_gracefully_when_the_workload_ends() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start(&lab);
    for (name, node) in [("one", "node1"), ("two", "node2")] {
        cluster.create(&lab, &GRACEFUL.replace("NAME", name).replace("NODE", node));
    }
    for name in ["one", "two"] {
        cluster.wait_for(name, "condition=Ready");
    }
    // Longer than the pods' grace period at the end: it must not start with the node's.
    cluster.shell("sleep 5");
    cluster.exit(0);
    lab.sh("cat out/one out/two")
        .run()
        .stdout_is("hook\nterm\nhook\nterm");
    lab.remove("out");
    lab.assert_nothing_left();
}

const JOBS: &str = r#"
apiVersion: batch/v1
kind: Job
metadata: {name: count}
spec:
  completions: 3
  parallelism: 3
  completionMode: Indexed
  template:
    spec:
      restartPolicy: Never
      containers: [{name: c, image: IMAGE, command: [sh, -c, 'echo index $JOB_COMPLETION_INDEX']}]
"#;

const FAILING_JOB: &str = r#"
apiVersion: batch/v1
kind: Job
metadata: {name: broken}
spec:
  backoffLimit: 1
  template:
    spec:
      restartPolicy: Never
      containers: [{name: c, image: IMAGE, command: [sh, -c, 'echo it hurts; exit 4']}]
"#;

#[test]
fn run_returns_output_and_status_of_job() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let run = |name: &str, text: &str| {
        lab.write(name, &text.replace("IMAGE", BUSYBOX));
        lab.command(&["srun", "-N2", "coracle", "run", name]).run()
    };
    run("job.yaml", JOBS)
        .succeeded()
        .stderr_has(&["job/count succeeded"])
        .stdout_has(&["index 0", "index 1", "index 2"]);
    run("broken.yaml", FAILING_JOB)
        .exited_with(1)
        .stderr_has(&["job/broken failed"])
        .stdout_has(&["it hurts"]);
    lab.remove("job.yaml");
    lab.remove("broken.yaml");
    lab.assert_nothing_left();
}
