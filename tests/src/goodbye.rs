//! Pods that terminate gracefully when their job ends, and checks of what they did.

use serde_json::{Value, json};

use crate::{BUSYBOX, Cluster, Lab, Watched, condition, container, merged, pod};

/// The directory, in the home directory of `user1`, to which the pod on this node writes when it terminates.
fn place(node: &str) -> String {
    format!("goodbye-{node}")
}

impl Cluster {
    /// Creates a pod on each of these nodes that terminates gracefully. Returns once they are ready, with a watch on them.
    #[track_caller]
    pub fn with_polite_pods(&mut self, lab: &Lab, nodes: &[&str]) -> Watched {
        let watched = self.watch_pods(lab);
        let pods: Vec<Value> = nodes.iter().map(|node| polite(node)).collect();
        self.create_objects(&pods);
        for node in nodes {
            self.wait_for(&format!("polite-{node}"), "condition=Ready");
        }
        watched
    }
}

/// A pod on a node, with a preStop hook, a SIGTERM handler and a sidecar that ends last.
fn polite(node: &str) -> Value {
    let says = |word: &str, last: &str| {
        format!("trap 'echo {word} >> /out/words; {last}' TERM; while true; do sleep 0.1; done")
    };
    let container = |name: &str, script: &str, more: Value| {
        let own = json!({"name": name, "image": BUSYBOX, "command": ["sh", "-c", script],
            "volumeMounts": [{"name": "out", "mountPath": "/out"}]});
        merged(own, more)
    };
    let hook = json!({"exec": {"command": ["sh", "-c", "echo hook >> /out/words"]}});
    let side = container(
        "side",
        &says("side", "exit 0"),
        json!({"restartPolicy": "Always"}),
    );
    let main = container(
        "main",
        &says("term", "exit 7"),
        json!({"lifecycle": {"preStop": hook}}),
    );
    let place = format!("/home/user1/{}", place(node));
    let place = json!({"path": place, "type": "DirectoryOrCreate"});
    let spec = json!({"nodeName": node, "restartPolicy": "Always", "terminationGracePeriodSeconds": 600,
        "volumes": [{"name": "out", "hostPath": place}], "initContainers": [side]});
    pod(&format!("polite-{node}"), spec, &[main])
}

/// After the end of the job: checks that the pods on these nodes reported their final status to the API server. Returns what each
/// of them wrote.
#[track_caller]
pub fn said_goodbye(lab: &Lab, watched: &Watched, nodes: &[&str]) -> Vec<String> {
    let mut words = Vec::new();
    for node in nodes {
        let said = lab.sh(&format!("echo $(cat {}/words)", place(node)));
        words.push(said.run().stdout.trim().to_owned());
        lab.remove(&place(node));
        let pod = watched.last_of(&format!("polite-{node}"));
        let status = &pod["status"];
        assert_eq!(status["phase"], "Failed", "{status:#}");
        assert_eq!(status["reason"], "Terminated", "{status:#}");
        let why = "Pod was terminated in response to imminent node shutdown.";
        assert_eq!(status["message"], why, "{status:#}");
        for (name, code) in [("main", 7), ("side", 0)] {
            let ended = &container(&pod, name)["state"]["terminated"];
            assert_eq!(ended["exitCode"], code, "{status:#}");
        }
        assert_eq!(
            condition(&pod, "DisruptionTarget"),
            "True TerminationByKubelet"
        );
        assert_eq!(condition(&pod, "Ready"), "False PodFailed", "{status:#}");
    }
    words
}
