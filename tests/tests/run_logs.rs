//! What `coracle run MANIFESTS` shows: logs as they come, progress, the summary, and pods that can never run.

use std::time::Duration;

use e2e::{BUSYBOX, Lab, Output, Running, wait_until};
use rustix::process::Signal;

/// A failed Job, a container that restarts, an init container, lines that are difficult to show, and a claim that is bound late. `gated`
/// ends when the test creates a file, so the test sees that logs come before the end.
const MIXED: &str = r#"
apiVersion: batch/v1
kind: Job
metadata: {name: train}
spec:
  backoffLimit: 0
  template:
    spec:
      restartPolicy: Never
      containers:
      - {name: main, image: IMAGE, command: [sh, -c, "echo step; printf 'no data'; exit 3"]}
---
apiVersion: v1
kind: Pod
metadata: {name: gated}
spec:
  restartPolicy: Never
  volumes: [{name: gate, hostPath: {path: /home/user1/run-logs}}]
  containers:
  - name: main
    image: IMAGE
    command: [sh, -c, "echo waiting; until [ -e /gate/go ]; do sleep 0.1; done; echo released"]
    volumeMounts: [{name: gate, mountPath: /gate}]
---
apiVersion: v1
kind: Pod
metadata: {name: restarted}
spec:
  restartPolicy: OnFailure
  volumes: [{name: mark, emptyDir: {}}]
  initContainers: [{name: init, image: IMAGE, command: [echo, from init]}]
  containers:
  - name: main
    image: IMAGE
    command: [sh, -c, "if [ -e /mark/once ]; then echo run 2; else touch /mark/once; echo run 1; exit 5; fi"]
    volumeMounts: [{name: mark, mountPath: /mark}]
---
apiVersion: v1
kind: Pod
metadata: {name: difficult}
spec:
  restartPolicy: Never
  containers:
  - {name: many, image: IMAGE, command: [seq, "1", "3000"]}
  - {name: long, image: IMAGE, command: [sh, -c, "head -c 100000 /dev/zero | tr '\\0' x; echo"]}
  - {name: control, image: IMAGE, command: [printf, 'a \033[31mred\033[0m \033]0;title\007bell\007\n']}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data}
spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Mi}}}
---
apiVersion: v1
kind: Pod
metadata: {name: claims}
spec:
  restartPolicy: Never
  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
  containers:
  - {name: main, image: IMAGE, command: [echo, claimed], volumeMounts: [{name: data, mountPath: /data}]}
"#;

/// Never ends. Its first probes fail. Prints lines while it terminates, the last one without a line break. It ignores further
/// signals meanwhile: Slurm sends several to all processes of a job.
const ENDLESS: &str = r#"
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers:
      - name: main
        image: IMAGE
        command: [sh, -c, "trap 'trap \"\" TERM; sleep 1; echo goodbye; printf end; exit 0' TERM; echo started; sleep 2; touch /tmp/ready; while true; do sleep 0.1; done"]
        readinessProbe: {exec: {command: [test, -e, /tmp/ready]}, periodSeconds: 1}
---
apiVersion: v1
kind: Pod
metadata: {name: endless}
spec:
  containers: [{name: main, image: IMAGE, command: [sleep, "1000"]}]
"#;

/// An image that no registry has, and a pod that no node can take.
const HOPELESS: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: wrong}
spec: {containers: [{name: c, image: "coracle.test/no-such-image:1"}]}
---
apiVersion: v1
kind: Pod
metadata: {name: huge}
spec: {containers: [{name: c, image: IMAGE, resources: {requests: {cpu: 5000}}}]}
"#;

const MANY: &str = r#"
apiVersion: batch/v1
kind: Job
metadata: {name: many}
spec:
  completions: 24
  parallelism: 12
  completionMode: Indexed
  template:
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: 1
      containers:
      - name: main
        image: IMAGE
        command: [sh, -c, "for i in $(seq 1 200); do echo pod $JOB_COMPLETION_INDEX line $i; done"]
"#;

fn start(lab: &Lab, args: &[&str], manifests: &str) -> Running {
    lab.load_busybox();
    let mut run = lab
        .command(&[&["coracle", "run"], args, &["-"]].concat())
        .start();
    run.write(&manifests.replace("IMAGE", BUSYBOX));
    run.close_stdin();
    run
}

fn wait(run: Running) -> Output {
    run.wait(Duration::from_secs(90))
}

/// The lines with this prefix, without it.
fn lines_of(output: &Output, prefix: &str) -> Vec<String> {
    let lines = output.stdout.lines();
    lines
        .filter_map(|line| line.strip_prefix(prefix))
        .map(str::to_owned)
        .collect()
}

#[test]
fn logs_are_streamed_kept_and_summarised() {
    let lab = Lab::acquire();
    lab.remove("run-logs");
    lab.write("run-logs/manifests", "");
    let mut run = start(&lab, &["-N2", "--logs", "run-logs/kept"], MIXED);
    run.wait_for_stdout("gated/main waiting\n");
    assert!(!run.stdout().contains("released"));
    lab.write("run-logs/go", "");
    let output = wait(run).exited_with(1);

    let output = output.stdout_has(&[
        "gated/main released\n",
        "restarted/init from init\n",
        "restarted/main run 1\n",
        "restarted/main run 2\n",
        "difficult/control a red bell\\u{7}\n",
        "claims/main claimed\n",
        "/main no data\n",
    ]);
    let numbers: Vec<String> = (1..=3000).map(|n| n.to_string()).collect();
    assert_eq!(lines_of(&output, "difficult/many "), numbers);
    let long = lines_of(&output, "difficult/long ");
    assert_eq!(long.concat(), "x".repeat(100_000));
    assert!(long.iter().all(|line| line.len() <= 16 * 1024));
    // In any order: the second run may begin before the first one's log is requested.
    let mut runs = lines_of(&output, "restarted/main ");
    runs.sort();
    assert_eq!(runs, ["run 1", "run 2"]);
    assert!(!output.stdout.contains('\x1b'), "{output}");

    let output = output.stderr_has(&[
        "coracle: job/train failed\n",
        "container main: exit code 3: no data",
        "coracle:   pod/gated succeeded after ",
        "coracle:   pod/restarted succeeded after ",
        ": the workload is done",
    ]);
    assert!(!output.stderr.contains("FailedScheduling"), "{output}");
    let kept = "cd run-logs/kept/pods/default; wc -l < difficult/many.log; sort restarted/main.log; stat -c %a gated; od -c difficult/control.log";
    lab.sh(kept)
        .run()
        .succeeded()
        .stdout_has(&["3000\nrun 1\nrun 2\n700\n", "033"]);
    lab.remove("run-logs");
    lab.assert_nothing_left();
}

#[test]
fn lines_of_many_pods_are_complete_and_unmixed() {
    let lab = Lab::acquire();
    let output = wait(start(&lab, &["-N3", "--log-prefix=none"], MANY)).succeeded();
    for pod in 0..24 {
        let lines: Vec<String> = lines_of(&output, &format!("pod {pod} line "));
        let expected: Vec<String> = (1..=200).map(|n| n.to_string()).collect();
        assert_eq!(lines, expected, "pod {pod}");
    }
    assert_eq!(output.stdout.lines().count(), 24 * 200);
    output.stderr_has(&["coracle:   job/many succeeded after "]);
    lab.assert_nothing_left();
}

/// Waits until the Deployment is ready, ends the cluster, and checks what was shown.
fn check_end(mut run: Running, end: impl FnOnce(&Running), reason: &str) -> Output {
    run.wait_for_stderr("coracle: deployment/web is ready 2/2\n");
    assert!(!run.stderr().contains("Unhealthy"), "{}", run.stderr());
    end(&run);
    let output = run.wait(Duration::from_secs(150));
    for line in ["/main goodbye", "/main end"] {
        let count = output.stdout.lines().filter(|shown| shown.ends_with(line));
        assert_eq!(count.count(), 2, "{line}{output}");
    }
    output.stderr_has(&[
        "coracle: stopping pods, up to ",
        "coracle:   pod/endless still ran after ",
        "coracle:   deployment/web had ",
        reason,
    ])
}

#[test]
fn output_of_terminating_pods_is_shown_after_ctrl_c() {
    let lab = Lab::acquire();
    let run = start(&lab, &["-N2"], ENDLESS);
    let interrupt = |run: &Running| run.signal(Signal::INT);
    check_end(run, interrupt, ": interrupted (Ctrl-C)\n").exited_with(130);
    lab.assert_nothing_left();
}

#[test]
fn output_of_terminating_pods_is_shown_after_scancel() {
    let lab = Lab::acquire();
    let run = start(&lab, &["-N2"], ENDLESS);
    let cancel = |_: &Running| {
        lab.sh("scancel --user=user1").run().succeeded();
    };
    check_end(run, cancel, ": the job was cancelled (scancel").exited_with(143);
    lab.assert_nothing_left();
}

#[test]
fn output_of_terminating_pods_is_shown_at_the_time_limit() {
    let lab = Lab::acquire();
    let run = start(&lab, &["-N2", "--time=1"], ENDLESS);
    check_end(run, |_| {}, ": the job reached its time limit\n").exited_with(143);
    lab.assert_nothing_left();
}

#[test]
fn pods_that_can_never_run_end_the_cluster() {
    let lab = Lab::acquire();
    let run = start(&lab, &["-N1", "--give-up-after=12s", "--no-logs"], HOPELESS);
    let output = wait(run).exited_with(77);
    output.stdout_is("").stderr_has(&[
        "2 pods cannot run; giving up 12 s after the first failure (--give-up-after)",
        "pod/huge: no node can take it: ",
        "pod/wrong: the image of container c cannot be pulled: ",
        "hint: ",
        "coracle:   pod/wrong had not started\n",
        ": pods could not run\n",
    ]);
    lab.assert_nothing_left();
}

#[test]
fn default_of_give_up_after_is_printed() {
    let lab = Lab::acquire();
    lab.sh("coracle run --help").run().succeeded().stdout_has(&[
        "--give-up-after",
        "[default: 5m]",
        "--log-prefix",
    ]);
    let mut run = start(&lab, &["-N1"], HOPELESS);
    run.wait_for_stderr("cannot run; giving up 5 min after the first failure");
    run.signal(Signal::INT);
    wait_until(60, "the cluster has ended", || run.has_exited());
    lab.assert_nothing_left();
}
