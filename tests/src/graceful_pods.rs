//! Pods that terminate gracefully when their job ends, and checks of their termination.

use serde_json::{Value, json};

use crate::{BUSYBOX, Lab, PodWatch, TestCluster, condition, container_status, merged, pod};

fn pod_name(node: &str) -> String {
    format!("graceful-{node}")
}

/// The directory, in the home directory of `user1`, to which the pod on this node writes when it terminates.
fn record_dir(node: &str) -> String {
    format!("terminated-{node}")
}

impl TestCluster {
    /// Creates a pod on each of these nodes that terminates gracefully. Returns once they are ready, with a watch on them.
    #[track_caller]
    pub fn create_graceful_pods(&mut self, lab: &Lab, nodes: &[&str]) -> PodWatch {
        let watch = self.watch_pods(lab);
        let pods: Vec<Value> = nodes.iter().map(|node| graceful_pod(node)).collect();
        self.create_objects(&pods);
        for node in nodes {
            self.wait_for(&pod_name(node), "condition=Ready");
        }
        watch
    }
}

/// A pod on a node, with a preStop hook, a SIGTERM handler and a sidecar that ends last.
fn graceful_pod(node: &str) -> Value {
    let on_sigterm = |record: &str, last: &str| {
        format!("trap 'echo {record} >> /out/records; {last}' TERM; while true; do sleep 0.1; done")
    };
    let container = |name: &str, script: &str, more: Value| {
        let own = json!({"name": name, "image": BUSYBOX, "command": ["sh", "-c", script],
            "volumeMounts": [{"name": "out", "mountPath": "/out"}]});
        merged(own, more)
    };
    let hook = json!({"exec": {"command": ["sh", "-c", "echo hook >> /out/records"]}});
    let side = container(
        "side",
        &on_sigterm("side", "exit 0"),
        json!({"restartPolicy": "Always"}),
    );
    let main = container(
        "main",
        &on_sigterm("term", "exit 7"),
        json!({"lifecycle": {"preStop": hook}}),
    );
    let dir = format!("/home/user1/{}", record_dir(node));
    let host_path = json!({"path": dir, "type": "DirectoryOrCreate"});
    let spec = json!({"nodeName": node, "restartPolicy": "Always", "terminationGracePeriodSeconds": 600,
        "volumes": [{"name": "out", "hostPath": host_path}], "initContainers": [side]});
    pod(&pod_name(node), spec, &[main])
}

/// After the end of the job: checks that the pods on these nodes reported their final status to the API server. Returns the records
/// that each of them wrote.
#[track_caller]
pub fn assert_graceful_termination(lab: &Lab, watch: &PodWatch, nodes: &[&str]) -> Vec<String> {
    let mut all_records = Vec::new();
    for node in nodes {
        let records = lab.sh(&format!("echo $(cat {}/records)", record_dir(node)));
        all_records.push(records.run().stdout.trim().to_owned());
        lab.remove(&record_dir(node));
        let pod = watch.latest_of(&pod_name(node));
        let status = &pod["status"];
        assert_eq!(status["phase"], "Failed", "{status:#}");
        assert_eq!(status["reason"], "Terminated", "{status:#}");
        let message = "Pod was terminated in response to imminent node shutdown.";
        assert_eq!(status["message"], message, "{status:#}");
        for (name, code) in [("main", 7), ("side", 0)] {
            let terminated = &container_status(&pod, name)["state"]["terminated"];
            assert_eq!(terminated["exitCode"], code, "{status:#}");
        }
        assert_eq!(
            condition(&pod, "DisruptionTarget"),
            "True TerminationByKubelet"
        );
        assert_eq!(condition(&pod, "Ready"), "False PodFailed", "{status:#}");
    }
    all_records
}
