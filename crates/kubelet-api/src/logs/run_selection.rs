//! Which run of a container a request for its log means, judged by the container's status.

use k8s_openapi::api::core::v1::{ContainerState, ContainerStateTerminated, Pod};

use crate::pod_lookup::status_of;

/// Why a container has no log to show, in upstream's words.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum LogUnavailable {
    #[error("container {container:?} in pod {pod:?} is not available")]
    Unknown { container: String, pod: String },
    #[error("previous terminated container {container:?} in pod {pod:?} not found")]
    NoPrevious { container: String, pod: String },
    #[error("container {container:?} in pod {pod:?} is terminated")]
    NeverRan { container: String, pod: String },
    #[error("container {container:?} in pod {pod:?} is waiting to start: {why}")]
    Waiting {
        container: String,
        pod: String,
        why: String,
    },
    #[error("container {container:?} in pod {pod:?} is waiting to start - no logs yet")]
    Blank { container: String, pod: String },
}

/// Whether the run that is meant lies before the container's newest one; an error if the run that is meant never was.
///
/// The two differ where a container waits to be started again: its last run is then both its newest and, in the
/// words of its status, the previous one.
pub(super) fn select_previous_run(
    pod: &Pod,
    container: &str,
    previous_wanted: bool,
) -> Result<bool, LogUnavailable> {
    let names = || {
        let pod = pod.metadata.name.clone().unwrap_or_default();
        (container.to_owned(), pod)
    };
    let status = status_of(pod, container).ok_or_else(|| {
        let (container, pod) = names();
        LogUnavailable::Unknown { container, pod }
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
    let last_ran = last.is_some_and(ran);

    if previous_wanted {
        if !last_ran {
            let (container, pod) = names();
            return Err(LogUnavailable::NoPrevious { container, pod });
        }
        // What never ran has no log, and so is no run that the last one could lie before.
        return Ok(running.is_some() || terminated.as_ref().is_some_and(ran));
    }
    if running.is_some() || last_ran || terminated.as_ref().is_some_and(ran) {
        return Ok(false);
    }
    let (container, pod) = names();
    if terminated.is_some() || last.is_some() {
        return Err(LogUnavailable::NeverRan { container, pod });
    }
    match waiting {
        None => Err(LogUnavailable::Blank { container, pod }),
        Some(waiting) => {
            let why = match waiting.reason.as_deref() {
                Some("ErrImagePull") => "image can't be pulled",
                Some("ImagePullBackOff") => "trying and failing to pull image",
                reason => reason.unwrap_or_default(),
            }
            .to_owned();
            Err(LogUnavailable::Waiting {
                container,
                pod,
                why,
            })
        }
    }
}

/// A container that could not even be started is shown as terminated too, but without an id.
fn ran(terminated: &ContainerStateTerminated) -> bool {
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

    fn judged(state: Value, last_state: Value) -> [Result<bool, String>; 2] {
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
    fn a_container_that_runs() {
        let no_previous = r#"previous terminated container "c" in pod "p" not found"#;
        assert_eq!(
            judged(running(), json!({})),
            [Ok(false), Err(no_previous.to_owned())]
        );
        assert_eq!(
            judged(running(), terminated("coracle://1")),
            [Ok(false), Ok(true)]
        );
    }

    #[test]
    fn a_container_in_back_off_shows_its_last_run_either_way() {
        assert_eq!(
            judged(waiting("CrashLoopBackOff"), terminated("coracle://1")),
            [Ok(false), Ok(false)]
        );
    }

    #[test]
    fn a_container_that_ended() {
        assert_eq!(
            judged(terminated("coracle://2"), terminated("coracle://1")),
            [Ok(false), Ok(true)]
        );
        assert_eq!(
            judged(terminated(""), terminated("coracle://1")),
            [Ok(false), Ok(false)]
        );
        let [now, _] = judged(terminated(""), json!({}));
        assert_eq!(
            now.unwrap_err(),
            r#"container "c" in pod "p" is terminated"#
        );
    }

    #[test]
    fn a_container_that_waits() {
        let why = |reason| judged(waiting(reason), json!({}))[0].clone().unwrap_err();
        let start = r#"container "c" in pod "p" is waiting to start: "#;
        assert_eq!(
            why("ContainerCreating"),
            format!("{start}ContainerCreating")
        );
        assert_eq!(why("ErrImagePull"), format!("{start}image can't be pulled"));
        assert_eq!(
            why("ImagePullBackOff"),
            format!("{start}trying and failing to pull image")
        );
        assert_eq!(
            judged(json!({}), json!({}))[0].clone().unwrap_err(),
            r#"container "c" in pod "p" is waiting to start - no logs yet"#
        );
    }

    #[test]
    fn containers_of_every_kind_are_found() {
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
