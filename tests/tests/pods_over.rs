//! Completed pods: none of their processes runs, and their logs are still available.

use e2e::{Cluster, Lab, container, wait_until};

const OVER: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: over}
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
    let lab = Lab::ready();
    lab.load_busybox();
    let mut cluster = Cluster::start(&lab);
    cluster.create(&lab, OVER);
    cluster.pod_until("over", "runs again", |pod| {
        let status = container(pod, "c");
        status["restartCount"] == 1 && status["state"]["running"].is_object()
    });
    // `--follow` shows everything until the pod's end.
    let followed = cluster.ask("timeout 40 kubectl logs --follow over");
    assert_eq!(followed, "second\nend");
    let over = cluster.in_phase("over", "Succeeded");
    wait_until(10, "its sandbox has gone", || {
        lab.marked("internal sandbox").is_empty()
    });
    let left = lab.root("node2", "ls /tmp/coracle-*/pods/*").stdout;
    assert_eq!(left.trim(), "checkpoint\nlogs");

    let shows_its_logs = |cluster: &mut Cluster| {
        for (options, text) in [
            ("", "second\nend"),
            ("--previous", "first"),
            ("--follow", "second\nend"),
            ("--tail=1", "end"),
        ] {
            let command = format!("timeout 40 kubectl logs {options} over");
            assert_eq!(cluster.ask(&command), text, "{options}");
        }
        for command in ["exec over -- true", "attach over", "port-forward over :80"] {
            let (code, words) = cluster.try_ask(&format!("timeout 40 kubectl {command}"));
            assert!(code != 0 && code != 124, "{command}: {words}");
        }
    };
    shows_its_logs(&mut cluster);
    // The next agent shows the logs too. It finds no sandbox and starts none.
    cluster.next_agent(&lab);
    wait_until(10, "its logs are found", || {
        cluster.try_ask("kubectl logs over").0 == 0
    });
    shows_its_logs(&mut cluster);
    let after = cluster.pod("over");
    assert_eq!(container(&over, "c"), container(&after, "c"));
    assert!(lab.marked("internal sandbox").is_empty());

    cluster.ask("kubectl delete pod over");
    wait_until(10, "its logs are gone", || {
        let left = lab.root("node2", "ls /tmp/coracle-*/pods").stdout;
        left.trim().is_empty()
    });
    cluster.exit(0);
    lab.nothing_left();
}
