//! Creates, awaits and inspects pods of a cluster.

use serde_json::Value;

use crate::{BUSYBOX, Lab, Process, TestCluster, eventually};

/// The directory of manifests, in the home directory of `user1`.
const DIR: &str = "pods";

impl TestCluster {
    /// Creates the objects in these manifests. `IMAGE` is replaced by [`BUSYBOX`].
    #[track_caller]
    pub fn create(&mut self, lab: &Lab, manifests: &str) {
        let file = lab.write(
            &format!("{DIR}/manifest.yaml"),
            &manifests.replace("IMAGE", BUSYBOX),
        );
        self.shell(&format!("kubectl create --filename={file}"));
        lab.remove(DIR);
    }

    /// Waits for a pod with `kubectl wait --for=CONDITION`.
    #[track_caller]
    pub fn wait_for(&mut self, pod: &str, condition: &str) {
        let (code, text) = self.try_shell(&format!(
            "kubectl wait pod/{pod} --for={condition} --timeout=45s"
        ));
        if code != 0 {
            let (_, state) = self.try_shell(&format!(
                "kubectl get pod {pod} --output=jsonpath={{.status}}; kubectl get events --field-selector involvedObject.name={pod} --no-headers"
            ));
            panic!(
                "pod {pod}: timed out waiting for {condition}: {text}\n{state}\n{}",
                self.run.stderr()
            );
        }
    }

    /// Waits until a pod is in this phase; returns the pod.
    #[track_caller]
    pub fn wait_for_phase(&mut self, pod: &str, phase: &str) -> Value {
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
    pub fn pod_until(
        &mut self,
        name: &str,
        condition: &str,
        holds: impl Fn(&Value) -> bool,
    ) -> Value {
        let mut last = Value::Null;
        let timeout = std::time::Duration::from_secs(45);
        let held = eventually(timeout, || {
            last = self.pod(name);
            holds(&last).then_some(())
        });
        assert!(
            held.is_some(),
            "{name}: never {condition}: {:#}",
            last["status"]
        );
        last
    }

    /// The log of a container.
    #[track_caller]
    pub fn logs(&mut self, pod: &str, container: &str) -> String {
        self.shell(&format!("kubectl logs {pod} --container={container}"))
    }

    /// The reasons and messages of a pod's events, one per line.
    #[track_caller]
    pub fn events(&mut self, pod: &str) -> String {
        self.shell(&format!(
            "kubectl get events --field-selector involvedObject.name={pod} --output=jsonpath=\"{{range .items[*]}}{{.type}} {{.reason}} {{.message}}{{\\\"\\n\\\"}}{{end}}\""
        ))
    }

    /// Waits for an event of a pod that contains `expected`.
    #[track_caller]
    pub fn wait_for_event(&mut self, pod: &str, expected: &str) {
        let mut last = String::new();
        let seen = eventually(std::time::Duration::from_secs(30), || {
            last = self.events(pod);
            last.contains(expected).then_some(())
        });
        assert!(seen.is_some(), "no event {expected:?} of {pod}:\n{last}");
    }
}

/// The status of a container, init container or ephemeral container.
#[track_caller]
pub fn container_status<'a>(pod: &'a Value, name: &str) -> &'a Value {
    let fields = [
        "containerStatuses",
        "initContainerStatuses",
        "ephemeralContainerStatuses",
    ];
    let mut all = fields
        .iter()
        .filter_map(|field| pod["status"][field].as_array())
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
        let marked_on = |host: &String| {
            let all = self.processes(host).into_iter();
            let marked = all.filter(|process| process.args.contains(mark));
            marked
                .map(|process| (host.clone(), process))
                .collect::<Vec<_>>()
        };
        self.hosts().iter().flat_map(marked_on).collect()
    }
}
