//! Termination of pods: after deletion, after completion, and at the end of the cluster.

use std::time::{Duration, Instant};

use e2e::{BUSYBOX, Cluster, Lab, container, wait_until};

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
metadata: {name: stubborn}
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
metadata: {name: sleepy}
spec:
  containers: [{name: c, image: IMAGE, command: [sh, -c, 'trap exit TERM; sleep 31004 & wait'], lifecycle: {preStop: {sleep: {seconds: 2}}}}]
---
apiVersion: v1
kind: Pod
metadata: {name: visited}
spec:
  containers: [{name: main, image: IMAGE, command: [sleep, '31005']}]
"#;

#[test]
fn deleted_pods_terminate_in_order_and_in_time() {
    let lab = Lab::ready();
    lab.load_busybox();
    let mut cluster = Cluster::start(&lab);
    cluster.create(&lab, DELETED);
    for name in ["order", "stubborn", "forced", "sleepy", "visited"] {
        cluster.wait_for(name, "condition=Ready");
    }

    cluster.ask(&format!(
        "kubectl debug visited --quiet --image={BUSYBOX} --container=visitor --target=main -- sh -c \"ps; echo I was here\""
    ));
    let pod = cluster.pod_until("visited", "visited", |pod| {
        pod["status"]["ephemeralContainerStatuses"][0]["state"]["terminated"].is_object()
    });
    let visitor = &container(&pod, "visitor")["state"]["terminated"];
    assert_eq!(visitor["exitCode"], 0, "{pod:#}");
    let said = cluster.logs("visited", "visitor");
    assert!(said.ends_with("I was here"), "{said}");
    assert!(said.contains("sleep 31005"), "sees its target: {said}");
    assert_eq!(container(&pod, "main")["restartCount"], 0, "{pod:#}");

    let begin = Instant::now();
    cluster.ask("kubectl delete pod stubborn");
    let took = begin.elapsed();
    assert!(took >= Duration::from_secs(2), "{took:?}");
    assert!(took < Duration::from_secs(12), "{took:?}");

    let begin = Instant::now();
    cluster.ask("kubectl delete pod sleepy");
    let took = begin.elapsed();
    assert!(took >= Duration::from_secs(2), "{took:?}");

    cluster.ask("kubectl delete pod forced --grace-period=0 --force");
    wait_until(10, "a pod that was deleted by force is gone", || {
        lab.marked("sleep 31003").is_empty()
    });

    cluster.ask("kubectl delete pod order visited --grace-period=20");
    lab.sh("cat out/order").run().printed("hook\nmain\nsidecar");
    lab.remove("out");
    cluster.event("order", "Normal Killing Stopping container main");
    let left = lab.marked("sleep 3100");
    assert!(left.is_empty(), "{left:?}");
    cluster.exit(0);
    lab.nothing_left();
}

/// A pod with a preStop hook and a SIGTERM handler.
const GOODBYE: &str = r#"
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
    let lab = Lab::ready();
    lab.load_busybox();
    let mut cluster = Cluster::start(&lab);
    for (name, node) in [("one", "node1"), ("two", "node2")] {
        cluster.create(&lab, &GOODBYE.replace("NAME", name).replace("NODE", node));
    }
    for name in ["one", "two"] {
        cluster.wait_for(name, "condition=Ready");
    }
    // Longer than the pods' grace period at the end: it must not start with the node's.
    cluster.ask("sleep 5");
    cluster.exit(0);
    lab.sh("cat out/one out/two")
        .run()
        .printed("hook\nterm\nhook\nterm");
    lab.remove("out");
    lab.nothing_left();
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
fn coracle_run_returns_output_and_status_of_a_job() {
    let lab = Lab::ready();
    lab.load_busybox();
    let run = |name: &str, text: &str| {
        lab.write(name, &text.replace("IMAGE", BUSYBOX));
        lab.call(&["srun", "-N2", "coracle", "run", name]).run()
    };
    run("job.yaml", JOBS)
        .succeeded()
        .says(&["job/count succeeded"])
        .shows(&["index 0", "index 1", "index 2"]);
    run("broken.yaml", FAILING_JOB)
        .ended_with(1)
        .says(&["job/broken failed"])
        .shows(&["it hurts"]);
    lab.remove("job.yaml");
    lab.remove("broken.yaml");
    lab.nothing_left();
}
