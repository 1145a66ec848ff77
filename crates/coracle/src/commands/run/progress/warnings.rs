//! Warning events: the user sees why a pod cannot start. Pure.
//!
//! A warning is held for some seconds, and dropped if its cause is gone by then: claims that were not yet bound, a first failed probe.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, Pod};
use kubelet_api::PodPhase;
use tokio::time::Instant;

use super::state::phase;
use super::tracked::Tracked;
use crate::commands::run::pod_logs::printable;

/// How long a warning is held.
const HOLD_TIME: Duration = Duration::from_secs(5);
/// Limit on the length of a printed event.
const MAX_LINE_CHARS: usize = 400;
/// Limit on the number of printed events; more would not help the user.
const MAX_PRINTED: usize = 200;
/// Limit on the number of held events. Each is printed at most once, so the others are mostly repetitions.
const MAX_HELD: usize = 2000;

/// Warnings that are held, and those that were printed.
#[derive(Debug, Default)]
pub struct Warnings {
    held: VecDeque<(Instant, Event)>,
    /// The lines about all of them.
    known: HashSet<String>,
    printed: usize,
}

impl Warnings {
    /// Holds a warning.
    pub fn hold(&mut self, event: Event, now: Instant) {
        if self.printed < MAX_PRINTED
            && self.held.len() < MAX_HELD
            && self.known.insert(line(&event))
        {
            self.held.push_back((now, event));
        }
    }

    /// The lines about warnings that were held long enough and whose causes remain.
    pub fn due(&mut self, pods: &Tracked<Pod>, now: Instant) -> Vec<String> {
        let mut lines = Vec::new();
        while let Some((_, event)) = self
            .held
            .pop_front_if(|(since, _)| now.duration_since(*since) >= HOLD_TIME)
        {
            let line = line(&event);
            if is_healed(&event, pods) {
                self.known.remove(&line);
            } else if self.printed < MAX_PRINTED {
                self.printed += 1;
                lines.push(line);
            }
        }
        lines
    }
}

/// Whether the cause of a warning about a pod is gone. Warnings about other objects remain.
fn is_healed(event: &Event, pods: &Tracked<Pod>) -> bool {
    let object = &event.involved_object;
    if object.kind.as_deref() != Some("Pod") {
        return false;
    }
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let Some(pod) = pods.get(&text(&object.namespace), &text(&object.name)) else {
        // It was deleted, and its controller replaces it.
        return true;
    };
    match event.reason.as_deref().unwrap_or_default() {
        "FailedScheduling" => is_scheduled(pod),
        // Probes; a failed pod is reported as such.
        "Unhealthy" | "ProbeWarning" => phase(pod).is_terminal() || is_ready(pod),
        // The pod was rejected, evicted or has crashed. It does not heal.
        "BackOff" if has_restarted(pod) => is_ready(pod),
        _ => match phase(pod) {
            PodPhase::Running => all_started(pod),
            PodPhase::Succeeded => true,
            _ => false,
        },
    }
}

fn is_scheduled(pod: &Pod) -> bool {
    pod.spec
        .as_ref()
        .is_some_and(|spec| spec.node_name.is_some())
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    conditions
        .into_iter()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn has_restarted(pod: &Pod) -> bool {
    containers(pod).any(|status| status.restart_count > 0)
}

/// Whether no container waits.
fn all_started(pod: &Pod) -> bool {
    containers(pod).all(|status| {
        let state = status.state.as_ref();
        state.is_some_and(|state| state.waiting.is_none())
    })
}

fn containers(pod: &Pod) -> impl Iterator<Item = &k8s_openapi::api::core::v1::ContainerStatus> {
    pod.status
        .iter()
        .flat_map(|status| status.container_statuses.iter().flatten())
}

/// Formats an event as one line.
fn line(event: &Event) -> String {
    let object = &event.involved_object;
    let text_of = |text: &Option<String>| text.clone().unwrap_or_default();
    let line = format!(
        "{}/{}: {}: {}",
        text_of(&object.kind).to_lowercase(),
        text_of(&object.name),
        text_of(&event.reason),
        text_of(&event.message)
    );
    let line = printable(&line);
    match line.char_indices().nth(MAX_LINE_CHARS) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use kube::runtime::watcher;
    use serde_json::{Value, json};

    use super::*;

    fn event(reason: &str, message: &str) -> Event {
        serde_json::from_value(json!({
            "metadata": {}, "reason": reason, "message": message,
            "involvedObject": {"kind": "Pod", "name": "p", "namespace": "default"}}))
        .unwrap()
    }

    fn pods(node: Option<&str>, status: Value) -> Tracked<Pod> {
        let mut pods = Tracked::default();
        let pod = json!({"metadata": {"name": "p", "namespace": "default"},
            "spec": {"nodeName": node, "containers": []}, "status": status});
        pods.handle(watcher::Event::Apply(serde_json::from_value(pod).unwrap()));
        pods
    }

    fn container(state: Value, restarts: i32) -> Value {
        json!([{"name": "c", "ready": false, "restartCount": restarts, "image": "", "imageID": "", "state": state}])
    }

    #[test]
    fn warnings_that_heal_are_not_printed() {
        let pending = || pods(None, json!({"phase": "Pending"}));
        let ready = json!([{"type": "Ready", "status": "True"}]);
        let running = |state: Value, restarts: i32| {
            pods(
                Some("n"),
                json!({"phase": "Running", "containerStatuses": container(state, restarts)}),
            )
        };
        let started = || running(json!({"running": {}}), 0);
        let waiting = || running(json!({"waiting": {"reason": "ImagePullBackOff"}}), 0);
        let crashing = || running(json!({"waiting": {"reason": "CrashLoopBackOff"}}), 3);
        for (reason, pods, expected) in [
            ("FailedScheduling", pending(), false),
            ("FailedScheduling", started(), true),
            ("Unhealthy", started(), false),
            (
                "Unhealthy",
                pods(Some("n"), json!({"phase": "Running", "conditions": ready})),
                true,
            ),
            ("Failed", waiting(), false),
            ("Failed", started(), true),
            ("FailedMount", pending(), false),
            ("FailedMount", started(), true),
            ("BackOff", crashing(), false),
            (
                "Evicted",
                pods(Some("n"), json!({"phase": "Failed"})),
                false,
            ),
            ("Failed", Tracked::default(), true),
        ] {
            assert_eq!(is_healed(&event(reason, ""), &pods), expected, "{reason}");
        }
    }

    #[test]
    fn each_warning_is_printed_once_after_the_hold_time() {
        let mut warnings = Warnings::default();
        let pods = pods(None, json!({"phase": "Pending"}));
        let start = Instant::now();
        for _ in 0..3 {
            warnings.hold(event("FailedScheduling", "0/2 nodes"), start);
        }
        let soon = start + HOLD_TIME / 2;
        assert_eq!(warnings.due(&pods, soon), [""; 0]);
        let later = start + HOLD_TIME;
        assert_eq!(
            warnings.due(&pods, later),
            ["pod/p: FailedScheduling: 0/2 nodes"]
        );
        warnings.hold(event("FailedScheduling", "0/2 nodes"), later);
        assert_eq!(warnings.due(&pods, later + HOLD_TIME), [""; 0]);
    }

    #[test]
    fn event_is_formatted_as_one_line() {
        assert_eq!(
            line(&event("Failed", "first\n  second")),
            "pod/p: Failed: first second"
        );
        assert!(line(&event("Failed", &"é".repeat(1000))).chars().count() <= MAX_LINE_CHARS + 1);
    }
}
