//! The summary at the end of a workload of manifests: a pure function of its objects.

use std::collections::HashMap;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;

use super::state::{WorkloadState, job_duration, phase, pod_duration};
use crate::commands::run::object_ref::ObjectRef;
use crate::commands::run::pod_logs::printable;
use kubelet_api::PodPhase;

/// Limit on lines about objects. Failed objects come first.
const MAX_LINES: usize = 60;
/// Limit on the length of a line.
const MAX_LINE_CHARS: usize = 500;

/// The last line of each container, by namespace, pod and container.
type LastLinesByContainer = HashMap<(String, String, String), String>;

/// One line per Job, Pod and controller of the manifests.
pub fn object_lines(
    state: &WorkloadState,
    last_lines: &LastLinesByContainer,
    now: Timestamp,
) -> Vec<String> {
    let of_object = |object: &ObjectRef| object_line(state, object, last_lines, now);
    let mut lines: Vec<(Rank, String)> = state.applied.iter().filter_map(of_object).collect();
    // A stable sort keeps the order of names.
    lines.sort_by_key(|(rank, _)| *rank);
    let left_out = lines.len().saturating_sub(MAX_LINES);
    let mut lines: Vec<String> = lines
        .into_iter()
        .take(MAX_LINES)
        .map(|(_, line)| one_line(&line))
        .collect();
    if left_out > 0 {
        let failed = state.results.values().filter(|result| !result.succeeded);
        let (failed, ended) = (failed.count(), state.results.len());
        lines.push(format!(
            "… and {left_out} more; of all {ended} that ended, {failed} failed"
        ));
    }
    lines
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Failed,
    Unfinished,
    Controller,
    Succeeded,
}

fn object_line(
    state: &WorkloadState,
    object: &ObjectRef,
    last_lines: &LastLinesByContainer,
    now: Timestamp,
) -> Option<(Rank, String)> {
    if let Some(replicas) = state.replicas.get(object) {
        let line = format!(
            "{object} had {}/{} pods ready",
            replicas.ready, replicas.desired
        );
        return Some((Rank::Controller, line));
    }
    if !object.ends() {
        return None;
    }
    let Some(result) = state.results.get(object) else {
        return Some((Rank::Unfinished, unfinished_line(state, object, now)));
    };
    let after = result
        .duration
        .map(|time| format!(" after {}", duration_text(time)));
    let after = after.unwrap_or_default();
    if result.succeeded {
        return Some((Rank::Succeeded, format!("{object} succeeded{after}")));
    }
    let failure = state.failures.get(object);
    let causes = [
        Some(result.reason.clone()),
        failure.map(|failure| failure.describe(object.kind != "Pod", last_lines)),
    ];
    let causes: Vec<String> = causes
        .into_iter()
        .flatten()
        .filter(|cause| !cause.is_empty())
        .collect();
    let mut line = format!("{object} failed{after}");
    if !causes.is_empty() {
        line.push_str(&format!(": {}", causes.join("; ")));
    }
    Some((Rank::Failed, line))
}

fn unfinished_line(state: &WorkloadState, object: &ObjectRef, now: Timestamp) -> String {
    let ObjectRef {
        namespace, name, ..
    } = object;
    let (verb, duration) = match object.kind.as_str() {
        "Job" => {
            let job = state.jobs.get(namespace, name);
            let duration = job.and_then(|job| job_duration(job, now));
            let is_active = (job.and_then(|job| job.status.as_ref())).is_some_and(|status| {
                let counts = [status.active, status.failed, status.succeeded];
                counts.into_iter().flatten().any(|count| count > 0)
            });
            (is_active, duration)
        }
        _ => {
            let pod = state.pods.get(namespace, name);
            let is_active = pod.is_some_and(|pod| phase(pod) == PodPhase::Running);
            let duration = pod.and_then(|pod| pod_duration(pod, Some(now)));
            (is_active, duration)
        }
    };
    let verb = if verb { "still ran" } else { "had not started" };
    match duration.filter(|_| verb == "still ran") {
        Some(duration) => format!("{object} {verb} after {}", duration_text(duration)),
        None => format!("{object} {verb}"),
    }
}

fn one_line(text: &str) -> String {
    let text = printable(text);
    match text.char_indices().nth(MAX_LINE_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// `7 s`, `3 min 20 s`, `2 h 5 min`.
pub fn duration_text(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (hours, minutes, rest) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match (hours, minutes, rest) {
        (0, 0, _) => format!("{rest} s"),
        (0, _, 0) => format!("{minutes} min"),
        (0, ..) => format!("{minutes} min {rest} s"),
        (_, 0, _) => format!("{hours} h"),
        _ => format!("{hours} h {minutes} min"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::state::Replicas;
    use super::*;
    use kube::runtime::watcher::Event;
    use serde_json::{Value, json};

    fn state() -> WorkloadState {
        let mut state = WorkloadState::new(
            [
                ("ConfigMap", "settings"),
                ("Deployment", "web"),
                ("Job", "late"),
                ("Job", "sort"),
                ("Job", "train"),
                ("Pod", "crashed"),
                ("Pod", "server"),
                ("Pod", "waiting"),
            ]
            .map(|(kind, name)| ObjectRef::new(kind, "default", name))
            .to_vec(),
        );
        let replicas = Replicas {
            ready: 1,
            desired: 2,
        };
        let web = ObjectRef::new("Deployment", "default", "web");
        state.replicas.insert(web, replicas);
        let mut job = |name: &str, status: Value| {
            let job = json!({"metadata": {"name": name, "namespace": "default"}, "status": status});
            state.handle_job(Event::Apply(serde_json::from_value(job).unwrap()));
        };
        let start = "2026-01-01T00:00:00Z";
        job("late", json!({"startTime": start, "ready": 1, "active": 1}));
        job(
            "sort",
            json!({"startTime": start, "completionTime": "2026-01-01T00:03:20Z",
                   "conditions": [{"type": "Complete", "status": "True", "reason": "CompletionsReached", "message": "Reached"}]}),
        );
        job(
            "train",
            json!({"startTime": start, "conditions": [{"type": "Failed", "status": "True",
                   "reason": "BackoffLimitExceeded", "message": "Job has reached the specified backoff limit",
                   "lastTransitionTime": "2026-01-01T02:05:01Z"}]}),
        );
        let mut pod = |name: &str, owner: Value, status: Value| {
            let pod = json!({"metadata": {"name": name, "namespace": "default", "ownerReferences": owner}, "status": status});
            state.handle_pod(Event::Apply(serde_json::from_value(pod).unwrap()));
        };
        let container = |state: Value| json!([{"name": "main", "ready": false, "restartCount": 0, "image": "", "imageID": "", "state": state}]);
        let exit = |code: i32, reason: &str| json!({"terminated": {"exitCode": code, "reason": reason, "finishedAt": "2026-01-01T00:00:07Z"}});
        pod(
            "train-x2x9p",
            json!([{"kind": "Job", "name": "train", "controller": true, "apiVersion": "", "uid": ""}]),
            json!({"phase": "Failed", "startTime": start, "containerStatuses": container(exit(3, "Error"))}),
        );
        pod(
            "crashed",
            json!([]),
            json!({"phase": "Failed", "startTime": start, "containerStatuses": container(exit(137, "OOMKilled"))}),
        );
        pod(
            "server",
            json!([]),
            json!({"phase": "Running", "startTime": start}),
        );
        pod("waiting", json!([]), json!({"phase": "Pending"}));
        state
    }

    #[test]
    fn summary_names_results_and_reasons() {
        let key = ["default", "train-x2x9p", "main"].map(str::to_owned);
        let [namespace, pod, container] = key;
        let last_lines = HashMap::from([(
            (namespace, pod, container),
            "ValueError: no data".to_owned(),
        )]);
        let now = "2026-01-01T00:10:00Z".parse().unwrap();
        insta::assert_snapshot!(object_lines(&state(), &last_lines, now).join("\n"));
    }

    #[test]
    fn summary_of_many_objects_is_bounded() {
        let many = (0..200).map(|n| ObjectRef::new("Pod", "default", &format!("pod-{n:04}")));
        let mut state = WorkloadState::new(many.collect());
        for n in 0..200 {
            let phase = if n == 199 { "Failed" } else { "Succeeded" };
            let pod = json!({"metadata": {"name": format!("pod-{n:04}"), "namespace": "default"}, "status": {"phase": phase}});
            state.handle_pod(Event::Apply(serde_json::from_value(pod).unwrap()));
        }
        let lines = object_lines(&state, &HashMap::new(), Timestamp::UNIX_EPOCH);
        assert_eq!(lines.len(), MAX_LINES + 1);
        assert_eq!(lines[0], "pod/pod-0199 failed");
        assert_eq!(
            lines[MAX_LINES],
            "… and 140 more; of all 200 that ended, 1 failed"
        );
    }

    #[test]
    fn durations_are_readable() {
        let text = |seconds| duration_text(Duration::from_secs(seconds));
        assert_eq!(
            [0, 59, 60, 200, 3600, 7501].map(text),
            ["0 s", "59 s", "1 min", "3 min 20 s", "1 h", "2 h 5 min"]
        );
    }
}
