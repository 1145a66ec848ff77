//! Selects the run of a container whose log is requested, by the container's status.

use k8s_openapi::api::core::v1::{ContainerState, ContainerStateTerminated, Pod};

use crate::pod_lookup::container_status;

/// Why a container has no log; the messages are upstream's.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum LogUnavailable {
    #[error("container {container:?} in pod {pod:?} is not available")]
    NoStatus { container: String, pod: String },
    #[error("previous terminated container {container:?} in pod {pod:?} not found")]
    NoPrevious { container: String, pod: String },
    #[error("container {container:?} in pod {pod:?} is terminated")]
    NeverRan { container: String, pod: String },
    #[error("container {container:?} in pod {pod:?} is waiting to start: {reason}")]
    WaitingToStart {
        container: String,
        pod: String,
        reason: String,
    },
    #[error("container {container:?} in pod {pod:?} is waiting to start - no logs yet")]
    NoState { container: String, pod: String },
}

/// Returns true if the requested run is the one before the container's newest run, false if it is the newest. An error if there is no such run.
///
/// This can differ from `previous_requested`: while a container waits for a restart, its last run is the newest, and its status
/// shows the same run as the previous one.
pub(super) fn select_previous_run(
    pod: &Pod,
    container: &str,
    previous_requested: bool,
) -> Result<bool, LogUnavailable> {
    let names = || {
        let pod = pod.metadata.name.clone().unwrap_or_default();
        (container.to_owned(), pod)
    };
    let status = container_status(pod, container).ok_or_else(|| {
        let (container, pod) = names();
        LogUnavailable::NoStatus { container, pod }
    })?;
    let ContainerState {
        waiting,
        running,
        terminated,
    } = status.state.clone().unwrap_or_default();
    let last = status
        .last_state
        .as_ref()
        .and_then(|last| last.terminated.as_ref());
    let last_has_run = last.is_some_and(has_run);

    if previous_requested {
        if !last_has_run {
            let (container, pod) = names();
            return Err(LogUnavailable::NoPrevious { container, pod });
        }
        // A current state that never ran has no log, so the last run is the newest.
        return Ok(running.is_some() || terminated.as_ref().is_some_and(has_run));
    }
    if running.is_some() || last_has_run || terminated.as_ref().is_some_and(has_run) {
        return Ok(false);
    }
    let (container, pod) = names();
    if terminated.is_some() || last.is_some() {
        return Err(LogUnavailable::NeverRan { container, pod });
    }
    match waiting {
        None => Err(LogUnavailable::NoState { container, pod }),
        Some(waiting) => {
            let reason = match waiting.reason.as_deref() {
                Some("ErrImagePull") => "image can't be pulled",
                Some("ImagePullBackOff") => "trying and failing to pull image",
                other => other.unwrap_or_default(),
            }
            .to_owned();
            Err(LogUnavailable::WaitingToStart {
                container,
                pod,
                reason,
            })
        }
    }
}

/// Whether the container ran at all. If it could not start, its status is terminated too, but has no container id.
fn has_run(terminated: &ContainerStateTerminated) -> bool {
    terminated
        .container_id
        .as_deref()
        .is_some_and(|id| !id.is_empty())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(kind: &str, state: Value, last_state: Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": { "name": "p" },
            "status": { kind: [
                { "name": "c", "ready": false, "restartCount": 1, "image": "", "imageID": "",
                  "state": state, "lastState": last_state }
            ] }
        }))
        .unwrap()
    }

    fn selected(state: Value, last_state: Value) -> [Result<bool, String>; 2] {
        let pod = pod("containerStatuses", state, last_state);
        [false, true].map(|previous| {
            select_previous_run(&pod, "c", previous).map_err(|error| error.to_string())
        })
    }

    fn running() -> Value {
        json!({ "running": {} })
    }

    fn terminated(id: &str) -> Value {
        json!({ "terminated": { "exitCode": 1, "containerID": id } })
    }

    fn waiting(reason: &str) -> Value {
        json!({ "waiting": { "reason": reason } })
    }

    #[test]
    fn running_container() {
        let no_previous = r#"previous terminated container "c" in pod "p" not found"#;
        assert_eq!(
            selected(running(), json!({})),
            [Ok(false), Err(no_previous.to_owned())]
        );
        assert_eq!(
            selected(running(), terminated("coracle://1")),
            [Ok(false), Ok(true)]
        );
    }

    #[test]
    fn container_in_back_off_selects_its_last_run() {
        assert_eq!(
            selected(waiting("CrashLoopBackOff"), terminated("coracle://1")),
            [Ok(false), Ok(false)]
        );
    }

    #[test]
    fn terminated_container() {
        assert_eq!(
            selected(terminated("coracle://2"), terminated("coracle://1")),
            [Ok(false), Ok(true)]
        );
        assert_eq!(
            selected(terminated(""), terminated("coracle://1")),
            [Ok(false), Ok(false)]
        );
        let [now, _] = selected(terminated(""), json!({}));
        assert_eq!(
            now.unwrap_err(),
            r#"container "c" in pod "p" is terminated"#
        );
    }

    #[test]
    fn waiting_container_has_no_log() {
        let message = |reason| selected(waiting(reason), json!({}))[0].clone().unwrap_err();
        let start = r#"container "c" in pod "p" is waiting to start: "#;
        assert_eq!(
            message("ContainerCreating"),
            format!("{start}ContainerCreating")
        );
        assert_eq!(
            message("ErrImagePull"),
            format!("{start}image can't be pulled")
        );
        assert_eq!(
            message("ImagePullBackOff"),
            format!("{start}trying and failing to pull image")
        );
        assert_eq!(
            selected(json!({}), json!({}))[0].clone().unwrap_err(),
            r#"container "c" in pod "p" is waiting to start - no logs yet"#
        );
    }

    #[test]
    fn finds_containers_of_every_kind() {
        for kind in [
            "containerStatuses",
            "initContainerStatuses",
            "ephemeralContainerStatuses",
        ] {
            let pod = pod(kind, running(), json!({}));
            assert_eq!(select_previous_run(&pod, "c", false), Ok(false));
            assert_eq!(
                select_previous_run(&pod, "other", false)
                    .unwrap_err()
                    .to_string(),
                r#"container "other" in pod "p" is not available"#
            );
        }
    }
}
