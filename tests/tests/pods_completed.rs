//! Completed pods: none of their processes runs, and their logs are still available.

use e2e::{Lab, TestCluster, container_status, wait_until};

const COMPLETED: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: completed}
spec:
  nodeName: node2
  restartPolicy: OnFailure
  volumes: [{name: v, emptyDir: {}}]
  containers:
  - name: c
    image: IMAGE
    command: [sh, -c, 'if test ! -e /v/run; then touch /v/run; echo first; exit 3; fi; echo second; sleep 3; echo end']
    volumeMounts: [{name: v, mountPath: /v}]
"#;

#[test]
fn completed_pod_has_logs_but_no_process() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start(&lab);
    cluster.create(&lab, COMPLETED);
    cluster.pod_until("completed", "runs again", |pod| {
        let status = container_status(pod, "c");
        status["restartCount"] == 1 && status["state"]["running"].is_object()
    });
    // `--follow` shows everything until the pod's end.
    let followed = cluster.shell("timeout 40 kubectl logs --follow completed");
    assert_eq!(followed, "second\nend");
    let before = cluster.wait_for_phase("completed", "Succeeded");
    wait_until(10, "its sandbox has exited", || {
        lab.marked("internal sandbox").is_empty()
    });
    let left = lab.root("node2", "ls /tmp/coracle-*/pods/*").stdout;
    assert_eq!(left.trim(), "checkpoint\nlogs");

    let assert_logs_are_available = |cluster: &mut TestCluster| {
        for (options, text) in [
            ("", "second\nend"),
            ("--previous", "first"),
            ("--follow", "second\nend"),
            ("--tail=1", "end"),
        ] {
            let command = format!("timeout 40 kubectl logs {options} completed");
            assert_eq!(cluster.shell(&command), text, "{options}");
        }
        for command in [
            "exec completed -- true",
            "attach completed",
            "port-forward completed :80",
        ] {
            let (code, output) = cluster.try_shell(&format!("timeout 40 kubectl {command}"));
            assert!(code != 0 && code != 124, "{command}: {output}");
        }
    };
    assert_logs_are_available(&mut cluster);
    // The next agent shows the logs too. It finds no sandbox and starts none.
    cluster.replace_agent(&lab);
    wait_until(10, "its logs are available", || {
        cluster.try_shell("kubectl logs completed").0 == 0
    });
    assert_logs_are_available(&mut cluster);
    let after = cluster.pod("completed");
    assert_eq!(
        container_status(&before, "c"),
        container_status(&after, "c")
    );
    assert!(lab.marked("internal sandbox").is_empty());

    cluster.shell("kubectl delete pod completed");
    wait_until(10, "its logs are removed", || {
        let left = lab.root("node2", "ls /tmp/coracle-*/pods").stdout;
        left.trim().is_empty()
    });
    cluster.exit(0);
    lab.assert_nothing_left();
}
