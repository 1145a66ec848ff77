//! The example workloads of KSI: a Job whose logs are followed, a Pod, a manifest in a file, a Job that trains on data of the host,
//! a web server, and the API by curl.
//!
//! KSI's examples are under the GPL, so these are rewritten, with the same commands, variables and fields in the same order.
//! With `CORACLE_KSI_EXAMPLES=DIR`, the directory `example-workloads` of a checkout of KSI, the tests run the originals instead.
//! They replace only the images.
//!
//! Images come from `tests/conformance/build` (`make suite`).

use e2e::{Lab, Output};

/// KSI's images, and their replacements.
const IMAGES: [(&str, &str); 3] = [
    ("severalnines/sysbench", "coracle.test/sysbench:1"),
    ("alpine", "registry.k8s.io/e2e-test-images/busybox:1.37.0-2"),
    ("nginx", "registry.k8s.io/e2e-test-images/nginx:1.27.0-2"),
];

const FOLLOWED_JOB: &str = r#"#!/bin/bash
set -x
kubectl create --context "$K8S_CLUSTER_NAME" namespace bench
kubectl create -n bench --context "$K8S_CLUSTER_NAME" -f - <<MANIFEST
apiVersion: batch/v1
kind: Job
metadata: {name: sysbench-cpu}
spec:
  template:
    spec:
      restartPolicy: Never
      containers:
      - name: sysbench-cpu
        image: severalnines/sysbench
        command: [sysbench, cpu, --threads=56, --cpu-max-prime=20000, run]
MANIFEST
kubectl wait -n bench --context "$K8S_CLUSTER_NAME" --for=condition=ready pod --selector=job-name=sysbench-cpu --timeout=10m
kubectl logs -f job/sysbench-cpu -n bench --context "$K8S_CLUSTER_NAME"
kubectl delete --context "$K8S_CLUSTER_NAME" namespace bench
"#;

const POD: &str = r#"#!/bin/bash
set -x
kubectl create --context "$K8S_CLUSTER_NAME" namespace bench
kubectl create -n bench --context "$K8S_CLUSTER_NAME" -f - <<MANIFEST
apiVersion: v1
kind: Pod
metadata:
  name: sysbench-cpu
  labels: {app: sysbench}
spec:
  restartPolicy: Never
  containers:
  - name: sysbench-cpu
    image: severalnines/sysbench
    command: [sysbench, cpu, --threads=56, --cpu-max-prime=20000, run]
MANIFEST
kubectl wait -n bench --context "$K8S_CLUSTER_NAME" --for condition=Ready --timeout=10m pod/sysbench-cpu
kubectl logs -f sysbench-cpu -n bench --context "$K8S_CLUSTER_NAME"
kubectl delete --context "$K8S_CLUSTER_NAME" namespace bench
"#;

/// Unlike KSI's, this one does not exit at once: otherwise it would depend on timing whether it is ever seen as ready.
const MANIFEST_FILE: &str = r#"
apiVersion: batch/v1
kind: Job
metadata: {name: hello}
spec:
  template:
    spec:
      securityContext: {runAsUser: 0}
      restartPolicy: OnFailure
      containers:
      - name: hello
        image: alpine
        command: ['sh', '-c', 'echo hello world; sleep 3']
        volumeMounts: [{name: project-vol, mountPath: /app}]
      volumes:
      - name: project-vol
        hostPath: {path: /app, type: Directory}
"#;

const MANIFEST_WORKLOAD: &str = r#"#!/bin/bash
set -x
kubectl create --context "$K8S_CLUSTER_NAME" namespace example
kubectl create --context "$K8S_CLUSTER_NAME" -n example -f example-workloads/workload-yaml/job-hello-world.yaml
kubectl wait -n example --context "$K8S_CLUSTER_NAME" --for=condition=ready pod --selector=job-name=hello --timeout=10m
kubectl logs -f --context "$K8S_CLUSTER_NAME" -n example job/hello
kubectl delete --context "$K8S_CLUSTER_NAME" namespace example
"#;

/// KSI's example of machine learning, with less data. Its output stays in the user's directory.
const TRAINING: &str = r#"#!/bin/bash
set -x
kubectl create --context "$K8S_CLUSTER_NAME" namespace training
kubectl create --context "$K8S_CLUSTER_NAME" -n training -f - <<MANIFEST
apiVersion: batch/v1
kind: Job
metadata: {name: training}
spec:
  template:
    spec:
      securityContext: {runAsUser: 0}
      restartPolicy: OnFailure
      containers:
      - name: training
        image: alpine
        command: [sh, -c, 'mkdir -p /app/out && cp /app/data /app/out/model && echo trained']
        volumeMounts: [{name: project-vol, mountPath: /app}]
      volumes:
      - name: project-vol
        hostPath: {path: /app/project, type: Directory}
MANIFEST
kubectl wait --context "$K8S_CLUSTER_NAME" --for=condition=complete --timeout=10h job/training -n training
kubectl logs --context "$K8S_CLUSTER_NAME" -n training job/training
kubectl delete --context "$K8S_CLUSTER_NAME" namespace training
"#;

const WEB_SERVER: &str = r#"#!/bin/bash
set -x
kubectl create --context "$K8S_CLUSTER_NAME" namespace nginx
kubectl create -n nginx --context "$K8S_CLUSTER_NAME" -f - <<MANIFEST
apiVersion: v1
kind: Pod
metadata:
  name: nginx
  labels: {app: nginx}
spec:
  containers:
  - name: nginx
    image: nginx
    ports: [{containerPort: 80}]
---
apiVersion: v1
kind: Service
metadata: {name: nginx}
spec:
  type: NodePort
  selector: {app: nginx}
  ports: [{name: http, port: 80, nodePort: $K8S_PORT}]
MANIFEST
kubectl wait -n nginx --context "$K8S_CLUSTER_NAME" --for condition=Ready --timeout=10m pod/nginx
kubectl wait -n nginx --context "$K8S_CLUSTER_NAME" --for condition=Ready=False --timeout=200h pod/nginx
kubectl logs nginx -n nginx --context "$K8S_CLUSTER_NAME"
kubectl delete --context "$K8S_CLUSTER_NAME" namespace nginx
"#;

const API_BY_CURL: &str = r#"#!/bin/bash
set -x
curl -X GET "$K8S_CLUSTER_API/api/v1/namespaces" --header "Authorization: Bearer $K8S_CLUSTER_API_TOKEN" --insecure
curl -X GET "$K8S_CLUSTER_API/api/v1/namespaces/default/pods" --header "Authorization: Bearer $K8S_CLUSTER_API_TOKEN" --insecure
"#;

/// Runs beside the web server: gets its page, then deletes its pod.
const CLIENT: &str = r#"
bash ./workload.sh &
until kubectl wait -n nginx --for=condition=Ready --timeout=60s pod/nginx; do sleep 0.2; done
kubectl get --raw /api/v1/namespaces/nginx/pods/nginx:80/proxy/
kubectl delete pod nginx -n nginx
wait
"#;

#[test]
fn curl_can_use_the_api() {
    let lab = Lab::acquire();
    let output = run(&lab, "workload-kube-api/workload-kube-api.sh", API_BY_CURL);
    output.stdout_has(&["\"kind\": \"NamespaceList\"", "\"kind\": \"PodList\""]);
    clean_up(&lab);
}

#[test]
fn job_is_created_and_its_logs_followed() {
    let lab = Lab::acquire();
    load_images(&lab);
    let name = "workload-job-follow-logs/workload-job-follow-logs.sh";
    run(&lab, name, FOLLOWED_JOB).stdout_has(SYSBENCH_DONE);
    clean_up(&lab);
}

#[test]
fn pod_is_created_and_its_logs_followed() {
    let lab = Lab::acquire();
    load_images(&lab);
    let name = "workload-pod-sysbench/workload-pod-sysbench.sh";
    run(&lab, name, POD).stdout_has(SYSBENCH_DONE);
    clean_up(&lab);
}

#[test]
fn manifest_file_runs_with_a_host_path() {
    let lab = Lab::acquire();
    load_images(&lab);
    let file = "workload-yaml/job-hello-world.yaml";
    lab.write(
        &format!("ksi/example-workloads/{file}"),
        &text(file, MANIFEST_FILE),
    );
    run(&lab, "workload-yaml/workload-yaml.sh", MANIFEST_WORKLOAD).stdout_has(&["hello world"]);
    clean_up(&lab);
}

#[test]
fn job_writes_results_to_the_users_directory() {
    let lab = Lab::acquire();
    load_images(&lab);
    // The current directory is /app.
    lab.write("ksi/project/data", "weights\n");
    run(&lab, "", TRAINING).stdout_has(&["trained"]);
    lab.sh("cat ksi/project/out/model; stat -c %U ksi/project/out/model")
        .run()
        .succeeded()
        .stdout_is("weights\nuser1");

    // KSI's second argument names another directory.
    lab.write("shared/app/project/data", "other weights\n");
    lab.sh("cd ksi && srun -N2 /bin/bash /opt/coracle-src/examples/ksi/run-workload.sh $PWD/workload.sh ~/shared")
        .within(120)
        .run()
        .succeeded()
        .stdout_has(&["trained"]);
    lab.sh("cat shared/app/project/out/model; rm -r shared")
        .run()
        .succeeded()
        .stdout_is("other weights");
    clean_up(&lab);
}

#[test]
#[ignore = "needs the pod network: the API server cannot reach pods yet"]
fn web_server_responds_until_deleted() {
    let lab = Lab::acquire();
    load_images(&lab);
    let script = text("workload-pod-nginx/workload-pod-nginx.sh", WEB_SERVER);
    lab.write("ksi/workload.sh", &script);
    lab.write("ksi/client.sh", CLIENT);
    let output = lab
        .sh("cd ksi && srun -N2 coracle run bash ./client.sh")
        .within(120)
        .run();
    output.succeeded().stdout_has(&["Welcome to nginx!"]);
    clean_up(&lab);
}

/// The last lines of the output of `sysbench cpu`.
const SYSBENCH_DONE: &[&str] = &["Number of threads: 56", "Threads fairness:"];

/// Runs a workload as KSI's users do, on two nodes.
#[track_caller]
fn run(lab: &Lab, name: &str, rewritten: &str) -> Output {
    lab.write("ksi/workload.sh", &text(name, rewritten));
    lab.sh("cd ksi && srun -N2 coracle run ./workload.sh")
        .within(120)
        .run()
        .succeeded()
}

/// The rewritten example or KSI's original, with the images of [`IMAGES`].
fn text(name: &str, rewritten: &str) -> String {
    let mut text = match std::env::var("CORACLE_KSI_EXAMPLES") {
        Ok(dir) if !name.is_empty() => std::fs::read_to_string(format!("{dir}/{name}"))
            .unwrap_or_else(|error| panic!("{dir}/{name}: {error}")),
        _ => rewritten.to_owned(),
    };
    for (original, replacement) in IMAGES {
        text = text.replace(
            &format!("image: {original}\n"),
            &format!("image: {replacement}\n"),
        );
    }
    text
}

fn load_images(lab: &Lab) {
    lab.command(&[
        "coracle",
        "image",
        "load",
        "--input",
        "/opt/coracle-src/target/conformance/images.tar",
    ])
    .run()
    .succeeded();
}

#[track_caller]
fn clean_up(lab: &Lab) {
    lab.remove("ksi");
    lab.assert_nothing_left();
}
