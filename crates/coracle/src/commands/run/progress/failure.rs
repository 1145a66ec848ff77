//! Finds out why a pod or a Job failed. Pure.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kubelet_api::PodPhase;

/// A container that failed, or a pod that failed without one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodFailure {
    pub namespace: String,
    pub pod: String,
    /// The failed container with its exit code.
    pub container: Option<(String, i32)>,
    /// `OOMKilled`, `Evicted: the node …`; may be empty.
    pub reason: String,
    pub time: Option<Timestamp>,
}

impl PodFailure {
    /// The newest failure of a pod's containers, or of the pod itself.
    pub fn of(pod: &Pod) -> Option<Self> {
        let status = pod.status.as_ref()?;
        let base = Self {
            namespace: pod.namespace().unwrap_or_default(),
            pod: pod.name_any(),
            container: None,
            reason: String::new(),
            time: None,
        };
        let all = [&status.init_container_statuses, &status.container_statuses];
        let failed = all
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|status| Some((status, failed_run(status)?)));
        if let Some((container, run)) =
            failed.max_by_key(|(_, run)| run.finished_at.as_ref().map(|time| time.0))
        {
            let reason = run.reason.clone().unwrap_or_default();
            return Some(Self {
                container: Some((container.name.clone(), run.exit_code)),
                // The exit code says the same.
                reason: match (reason.as_str(), &run.message) {
                    ("Error", _) => String::new(),
                    // There is no output: the command was not found, or could not be executed.
                    ("StartError", Some(message)) => format!("{reason}: {message}"),
                    _ => reason,
                },
                time: run.finished_at.as_ref().map(|time| time.0),
                ..base
            });
        }
        if PodPhase::of(Some(status)) != PodPhase::Failed {
            return None;
        }
        let reasons = [status.reason.clone(), status.message.clone()];
        let reasons: Vec<String> = reasons.into_iter().flatten().collect();
        Some(Self {
            reason: reasons.join(": "),
            ..base
        })
    }

    /// Describes it with the container's last line. `names_pod` unless the context does.
    pub fn describe(
        &self,
        names_pod: bool,
        last_lines: &HashMap<(String, String, String), String>,
    ) -> String {
        let key = |container: &str| {
            let names = [self.namespace.as_str(), self.pod.as_str(), container];
            let [namespace, pod, container] = names.map(str::to_owned);
            (namespace, pod, container)
        };
        let container = self.container.as_ref();
        let last_line = container.and_then(|(name, _)| last_lines.get(&key(name)));
        let what = [
            names_pod.then(|| format!("pod {}", self.pod)),
            container.map(|(name, _)| format!("container {name}")),
        ];
        let what: Vec<String> = what.into_iter().flatten().collect();
        let parts = [
            what.join(", "),
            container.map_or(String::new(), |(_, code)| format!("exit code {code}")),
            self.reason.clone(),
            last_line.cloned().unwrap_or_default(),
        ];
        let parts = parts.into_iter().filter(|part| !part.is_empty());
        parts.collect::<Vec<_>>().join(": ")
    }
}

/// The newest run of a container that failed.
fn failed_run(status: &ContainerStatus) -> Option<&ContainerStateTerminated> {
    let states = [&status.state, &status.last_state];
    let mut runs = states
        .into_iter()
        .filter_map(|state| state.as_ref()?.terminated.as_ref());
    runs.find(|run| run.exit_code != 0)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn failure(status: Value) -> Option<PodFailure> {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "n"}, "status": status}))
        .unwrap();
        PodFailure::of(&pod)
    }

    fn container(name: &str, state: Value, last_state: Value) -> Value {
        json!({"name": name, "ready": false, "restartCount": 0, "image": "", "imageID": "", "state": state, "lastState": last_state})
    }

    fn terminated(code: i32, reason: &str, second: u32) -> Value {
        json!({"terminated": {"exitCode": code, "reason": reason, "finishedAt": format!("2026-01-01T00:00:{second:02}Z")}})
    }

    #[test]
    fn newest_failed_container_is_named() {
        let status = json!({"phase": "Failed", "containerStatuses": [
            container("a", terminated(137, "OOMKilled", 5), json!({})),
            container("b", terminated(3, "Error", 7), json!({})),
            container("c", terminated(0, "Completed", 9), json!({})),
        ]});
        let failure = failure(status).unwrap();
        let mut last_lines = HashMap::new();
        assert_eq!(
            failure.describe(true, &last_lines),
            "pod p, container b: exit code 3"
        );
        let key = ("n".to_owned(), "p".to_owned(), "b".to_owned());
        last_lines.insert(key, "no such file".to_owned());
        assert_eq!(
            failure.describe(true, &last_lines),
            "pod p, container b: exit code 3: no such file"
        );
    }

    #[test]
    fn command_that_was_not_found_is_named() {
        let mut state = terminated(128, "StartError", 5);
        state["terminated"]["message"] = json!("exec: \"nope\": not found");
        let status =
            json!({"phase": "Failed", "containerStatuses": [container("a", state, json!({}))]});
        assert_eq!(
            failure(status).unwrap().describe(false, &HashMap::new()),
            "container a: exit code 128: StartError: exec: \"nope\": not found"
        );
    }

    #[test]
    fn restarted_container_has_failed_before() {
        let status = json!({"phase": "Running", "containerStatuses": [
            container("a", json!({"running": {}}), terminated(137, "OOMKilled", 5)),
        ]});
        assert_eq!(
            failure(status).unwrap().describe(true, &HashMap::new()),
            "pod p, container a: exit code 137: OOMKilled"
        );
    }

    #[test]
    fn pod_may_fail_without_a_container() {
        let status =
            json!({"phase": "Failed", "reason": "NodeAffinity", "message": "no node matches"});
        assert_eq!(
            failure(status).unwrap().describe(true, &HashMap::new()),
            "pod p: NodeAffinity: no node matches"
        );
        let failed = failure(json!({"phase": "Failed"})).unwrap();
        assert_eq!(failed.describe(false, &HashMap::new()), "");
        assert_eq!(failure(json!({"phase": "Running"})), None);
        assert_eq!(failure(json!({"phase": "Succeeded"})), None);
    }
}
