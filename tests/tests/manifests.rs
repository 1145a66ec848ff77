//! Manifests as a workload.

use e2e::Lab;

const CONFIG_MAP: &str = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: mine}\ndata: {a: b}\n";

/// With no completions, so it is complete at once.
const EMPTY_JOB: &str = r#"
apiVersion: batch/v1
kind: Job
metadata: {name: empty}
spec:
  completions: 0
  template:
    spec:
      restartPolicy: Never
      containers: [{name: c, image: none}]
"#;

/// Its pod has `nodeName` and a node selector that does not match, so the node rejects it.
const REJECTED_JOB: &str = r#"
apiVersion: batch/v1
kind: Job
metadata: {name: refused}
spec:
  backoffLimit: 0
  template:
    spec:
      restartPolicy: Never
      nodeName: node1
      nodeSelector: {example.org/no-such: label}
      containers: [{name: c, image: none}]
"#;

const NEW_KIND: &str = r#"
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: boats.example.org}
spec:
  group: example.org
  names: {kind: Boat, plural: boats, singular: boat}
  scope: Namespaced
  versions:
  - name: v1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
---
apiVersion: example.org/v1
kind: Boat
metadata: {name: coracle}
spec: {paddles: 1}
"#;

#[test]
fn file_directory_and_standard_input_are_applied() {
    let lab = Lab::acquire();
    lab.write("m/one.yaml", CONFIG_MAP);
    lab.write(
        "m/below/two.yml",
        "apiVersion: v1\nkind: Namespace\nmetadata: {name: other}\n",
    );
    let file = lab
        .command(&["srun", "-N1", "coracle", "run", "m/one.yaml"])
        .run();
    file.succeeded()
        .stderr_has(&["configmap/mine applied"])
        .stdout_is("");
    let directory = lab.command(&["srun", "-N1", "coracle", "run", "m"]).run();
    directory
        .succeeded()
        .stderr_has(&["configmap/mine applied", "namespace/other applied"]);
    let stdin = lab
        .command(&["srun", "-N2", "coracle", "run", "-"])
        .stdin(CONFIG_MAP)
        .run();
    stdin.succeeded().stderr_has(&["configmap/mine applied"]);
    let outside = lab
        .command(&["coracle", "run", "-N2", "-"])
        .stdin(CONFIG_MAP)
        .run();
    outside.succeeded().stderr_has(&["configmap/mine applied"]);
    lab.remove("m");
    lab.assert_nothing_left();
}

#[test]
fn run_waits_for_jobs() {
    let lab = Lab::acquire();
    let output = lab
        .command(&["srun", "-N1", "coracle", "run", "-"])
        .stdin(EMPTY_JOB)
        .run();
    output
        .succeeded()
        .stderr_has(&["job/empty applied", "job/empty succeeded"]);
    lab.assert_nothing_left();
}

#[test]
fn failed_job_exits_with_1_and_its_reason() {
    let lab = Lab::acquire();
    let output = lab
        .command(&["srun", "-N1", "-wnode1", "coracle", "run", "-"])
        .stdin(REJECTED_JOB)
        .run();
    output
        .exited_with(1)
        .stderr_has(&["job/refused failed", "NodeAffinity"]);
    lab.assert_nothing_left();
}

#[test]
fn invalid_manifests_exit_with_65_and_kubectls_message() {
    let lab = Lab::acquire();
    for (manifest, error) in [
        ("a: b: c", "mapping values are not allowed"),
        (
            "apiVersion: v1\nkind: Nonsense\nmetadata: {name: a}\n",
            "no matches for kind",
        ),
        (
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: NOT_A_NAME}\n",
            "NOT_A_NAME",
        ),
        ("", "no objects passed"),
    ] {
        let output = lab
            .command(&["srun", "-N1", "coracle", "run", "-"])
            .stdin(manifest)
            .run();
        output
            .exited_with(65)
            .stderr_has(&["error: the manifests were refused", error, "hint: "]);
    }
    lab.assert_nothing_left();
}

#[test]
fn one_file_may_define_and_use_a_kind() {
    let lab = Lab::acquire();
    let output = lab
        .command(&["srun", "-N1", "coracle", "run", "-"])
        .stdin(NEW_KIND)
        .run();
    output.succeeded().stderr_has(&["boat/coracle applied"]);
    lab.assert_nothing_left();
}

#[test]
fn reasons_of_pending_pods_are_reported() {
    const UNSCHEDULABLE: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: wrong}
spec: {containers: [{name: c, image: registry.invalid/none}]}
---
apiVersion: v1
kind: Pod
metadata: {name: huge}
spec: {containers: [{name: c, image: none, resources: {requests: {cpu: 5000}}}]}
"#;
    let lab = Lab::acquire();
    let mut run = lab.command(&["coracle", "run", "-N1", "-"]).start();
    run.write(UNSCHEDULABLE);
    run.close_stdin();
    run.wait_for_stderr("coracle: pod/wrong: Failed: Failed to pull image ");
    run.wait_for_stderr("coracle: pod/huge: FailedScheduling: ");
    run.signal(rustix::process::Signal::INT);
    run.wait(std::time::Duration::from_secs(60));
    lab.assert_nothing_left();
}
