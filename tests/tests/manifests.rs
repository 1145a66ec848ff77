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
const REFUSED_JOB: &str = r#"
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
    let lab = Lab::ready();
    lab.write("m/one.yaml", CONFIG_MAP);
    lab.write(
        "m/below/two.yml",
        "apiVersion: v1\nkind: Namespace\nmetadata: {name: other}\n",
    );
    let file = lab
        .call(&["srun", "-N1", "coracle", "run", "m/one.yaml"])
        .run();
    file.succeeded()
        .says(&["configmap/mine applied"])
        .printed("");
    let directory = lab.call(&["srun", "-N1", "coracle", "run", "m"]).run();
    directory
        .succeeded()
        .says(&["configmap/mine applied", "namespace/other applied"]);
    let stdin = lab
        .call(&["srun", "-N2", "coracle", "run", "-"])
        .stdin(CONFIG_MAP)
        .run();
    stdin.succeeded().says(&["configmap/mine applied"]);
    let outside = lab
        .call(&["coracle", "run", "-N2", "-"])
        .stdin(CONFIG_MAP)
        .run();
    outside.succeeded().says(&["configmap/mine applied"]);
    lab.remove("m");
    lab.nothing_left();
}

#[test]
fn run_waits_for_jobs() {
    let lab = Lab::ready();
    let output = lab
        .call(&["srun", "-N1", "coracle", "run", "-"])
        .stdin(EMPTY_JOB)
        .run();
    output
        .succeeded()
        .says(&["job/empty applied", "job/empty succeeded"]);
    lab.nothing_left();
}

#[test]
fn failed_job_exits_with_1_and_its_reason() {
    let lab = Lab::ready();
    let output = lab
        .call(&["srun", "-N1", "-wnode1", "coracle", "run", "-"])
        .stdin(REFUSED_JOB)
        .run();
    output
        .ended_with(1)
        .says(&["job/refused failed", "NodeAffinity"]);
    lab.nothing_left();
}

#[test]
fn invalid_manifests_exit_with_65_and_kubectls_message() {
    let lab = Lab::ready();
    for (text, words) in [
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
            .call(&["srun", "-N1", "coracle", "run", "-"])
            .stdin(text)
            .run();
        output
            .ended_with(65)
            .says(&["error: the manifests were refused", words, "hint: "]);
    }
    lab.nothing_left();
}

#[test]
fn one_file_may_define_and_use_a_kind() {
    let lab = Lab::ready();
    let output = lab
        .call(&["srun", "-N1", "coracle", "run", "-"])
        .stdin(NEW_KIND)
        .run();
    output.succeeded().says(&["boat/coracle applied"]);
    lab.nothing_left();
}

#[test]
fn reasons_of_pending_pods_are_reported() {
    const HOPELESS: &str = r#"
apiVersion: v1
kind: Pod
metadata: {name: wrong}
spec: {containers: [{name: c, image: "NOT::A NAME"}]}
---
apiVersion: v1
kind: Pod
metadata: {name: huge}
spec: {containers: [{name: c, image: none, resources: {requests: {cpu: 5000}}}]}
"#;
    let lab = Lab::ready();
    let mut run = lab.call(&["coracle", "run", "-N1", "-"]).start();
    run.write(HOPELESS);
    run.close_stdin();
    run.until_stderr("coracle: pod/wrong: InspectFailed: ");
    run.until_stderr("coracle: pod/huge: FailedScheduling: ");
    run.signal(rustix::process::Signal::INT);
    run.wait(std::time::Duration::from_secs(60));
    lab.nothing_left();
}
