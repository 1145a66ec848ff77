//! Creates, awaits and inspects pods of a cluster.

use serde_json::Value;

use crate::{BUSYBOX, Cluster, Lab, Process, eventually};

/// The directory of manifests, in the home directory of `user1`.
const DIR: &str = "pods";

impl Cluster {
    /// Creates the objects in these manifests. `IMAGE` is replaced by [`BUSYBOX`].
    #[track_caller]
    pub fn create(&mut self, lab: &Lab, manifests: &str) {
        let file = lab.write(
            &format!("{DIR}/manifest.yaml"),
            &manifests.replace("IMAGE", BUSYBOX),
        );
        self.ask(&format!("kubectl create --filename={file}"));
        lab.remove(DIR);
    }

    /// Waits for a pod with `kubectl wait --for=WHAT`.
    #[track_caller]
    pub fn wait_for(&mut self, pod: &str, what: &str) {
        let (code, text) = self.try_ask(&format!(
            "kubectl wait pod/{pod} --for={what} --timeout=45s"
        ));
        if code != 0 {
            let (_, seen) = self.try_ask(&format!(
                "kubectl get pod {pod} --output=jsonpath={{.status}}; kubectl get events --field-selector involvedObject.name={pod} --no-headers"
            ));
            panic!(
                "pod {pod} never got {what}: {text}\n{seen}\n{}",
                self.run.stderr()
            );
        }
    }

    /// Waits until a pod is in this phase; returns the pod.
    #[track_caller]
    pub fn in_phase(&mut self, pod: &str, phase: &str) -> Value {
        self.wait_for(pod, &format!("jsonpath={{.status.phase}}={phase}"));
        self.pod(pod)
    }

    /// Gets a pod.
    #[track_caller]
    pub fn pod(&mut self, name: &str) -> Value {
        self.json(&format!("get pod {name}"))
    }

    /// Polls a pod until `holds` returns true. Fails the test after a time-out.
    #[track_caller]
    pub fn pod_until(&mut self, name: &str, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let mut last = Value::Null;
        let patience = std::time::Duration::from_secs(45);
        let seen = eventually(patience, || {
            last = self.pod(name);
            holds(&last).then_some(())
        });
        assert!(seen.is_some(), "{name}: never {what}: {:#}", last["status"]);
        last
    }

    /// The log of a container.
    #[track_caller]
    pub fn logs(&mut self, pod: &str, container: &str) -> String {
        self.ask(&format!("kubectl logs {pod} --container={container}"))
    }

    /// The reasons and messages of a pod's events, one per line.
    #[track_caller]
    pub fn events(&mut self, pod: &str) -> String {
        self.ask(&format!(
            "kubectl get events --field-selector involvedObject.name={pod} --output=jsonpath=\"{{range .items[*]}}{{.type}} {{.reason}} {{.message}}{{\\\"\\n\\\"}}{{end}}\""
        ))
    }

    /// Waits for an event of a pod that contains `words`.
    #[track_caller]
    pub fn event(&mut self, pod: &str, words: &str) {
        let mut last = String::new();
        let seen = eventually(std::time::Duration::from_secs(30), || {
            last = self.events(pod);
            last.contains(words).then_some(())
        });
        assert!(seen.is_some(), "no event {words:?} of {pod}:\n{last}");
    }
}

/// The status of a container, init container or ephemeral container.
#[track_caller]
pub fn container<'a>(pod: &'a Value, name: &str) -> &'a Value {
    let kinds = [
        "containerStatuses",
        "initContainerStatuses",
        "ephemeralContainerStatuses",
    ];
    let mut all = kinds
        .iter()
        .filter_map(|kind| pod["status"][kind].as_array())
        .flatten();
    all.find(|status| status["name"] == name)
        .unwrap_or_else(|| panic!("no status of {name}: {:#}", pod["status"]))
}

/// The status and reason of a condition; the status is empty if the condition is missing.
pub fn condition(pod: &Value, kind: &str) -> String {
    let all = pod["status"]["conditions"].as_array();
    let found = all.and_then(|all| all.iter().find(|condition| condition["type"] == kind));
    let text = |field: &str| {
        found
            .and_then(|found| found[field].as_str())
            .unwrap_or_default()
    };
    format!("{} {}", text("status"), text("reason"))
        .trim()
        .to_owned()
}

impl Lab {
    /// The processes of all hosts whose command line contains `mark`, with their hosts.
    pub fn marked(&self, mark: &str) -> Vec<(String, Process)> {
        let on = |host: &String| {
            let all = self.processes(host).into_iter();
            let theirs = all.filter(|process| process.args.contains(mark));
            theirs
                .map(|process| (host.clone(), process))
                .collect::<Vec<_>>()
        };
        self.hosts().iter().flat_map(on).collect()
    }
}
