//! Decides which logs to read next, by the statuses of a pod's containers. Pure.
//!
//! The API offers the logs of a container's newest run and of the one before. A log that was read to its end is read once more after the
//! run has ended: the stream may have broken without an error. And it is read once more as the previous one after a restart, because the
//! restart may have come before the request for the newest.

use std::collections::VecDeque;

use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, Pod};
use kubelet_api::PodPhase;

/// The runs of a container that have logs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerRuns {
    pub newest: Option<ContainerRun>,
    /// The container id of the run before the newest.
    pub previous: Option<String>,
    /// No other run follows.
    pub is_last: bool,
}

/// One run of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerRun {
    /// The container id.
    pub id: String,
    pub has_ended: bool,
}

/// A log to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogRequest {
    pub run: ContainerRun,
    pub is_previous: bool,
}

/// The last runs of a container whose logs were read completely.
#[derive(Debug, Default)]
pub struct ReadRuns(VecDeque<LogRequest>);

impl ReadRuns {
    /// Statuses contain two runs. A status that arrives late may contain an older one.
    const MAX: usize = 6;

    /// Marks a log as completely read.
    pub fn insert(&mut self, request: &LogRequest) {
        self.0.push_back(request.clone());
        if self.0.len() > Self::MAX {
            self.0.pop_front();
        }
    }

    fn contains(&self, id: &str) -> bool {
        self.0.iter().any(|read| read.run.id == id)
    }

    fn contains_previous(&self, id: &str) -> bool {
        let mut read = self.0.iter().filter(|read| read.is_previous);
        read.any(|read| read.run.id == id)
    }
}

/// The runs of all containers of a pod, with their names. `is_deleted` if the pod no longer exists.
pub fn container_runs(pod: &Pod, is_deleted: bool) -> Vec<(String, ContainerRuns)> {
    let Some(status) = &pod.status else {
        return Vec::new();
    };
    let is_last = is_deleted || PodPhase::of(Some(status)).is_terminal();
    [
        &status.init_container_statuses,
        &status.container_statuses,
        &status.ephemeral_container_statuses,
    ]
    .into_iter()
    .flatten()
    .flatten()
    .map(|status| (status.name.clone(), runs_of(status, is_last)))
    .collect()
}

fn runs_of(status: &ContainerStatus, is_last: bool) -> ContainerRuns {
    let current = status.state.as_ref().and_then(|state| {
        let id = status.container_id.clone();
        match state {
            ContainerState {
                running: Some(_), ..
            } => Some((id?, false)),
            _ => terminated_id(Some(state)).map(|id| (id, true)),
        }
    });
    let last = terminated_id(status.last_state.as_ref());
    let (newest, previous) = match current {
        Some(current) => (Some(current), last),
        // The container waits for its restart, so its last run is the newest.
        None => (last.map(|id| (id, true)), None),
    };
    ContainerRuns {
        newest: newest
            .filter(|(id, _)| !id.is_empty())
            .map(|(id, has_ended)| ContainerRun {
                id,
                // The last status of a deleted pod may say that it runs.
                has_ended: has_ended || is_last,
            }),
        previous,
        is_last,
    }
}

/// The id of a terminated container that has run. A container that could not start has no id and no log.
fn terminated_id(state: Option<&ContainerState>) -> Option<String> {
    let id = state?.terminated.as_ref()?.container_id.clone()?;
    (!id.is_empty()).then_some(id)
}

/// The log to read next; `None` if all were read.
pub fn next_request(runs: &ContainerRuns, read: &ReadRuns) -> Option<LogRequest> {
    if let Some(id) = &runs.previous
        && !read.contains_previous(id)
    {
        let run = ContainerRun {
            id: id.clone(),
            has_ended: true,
        };
        return Some(LogRequest {
            run,
            is_previous: true,
        });
    }
    let run = runs.newest.clone().filter(|run| !read.contains(&run.id))?;
    Some(LogRequest {
        run,
        is_previous: false,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn runs(phase: &str, id: &str, state: Value, last_state: Value) -> ContainerRuns {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p"},
            "status": {"phase": phase, "containerStatuses": [
                {"name": "c", "ready": false, "restartCount": 0, "image": "", "imageID": "", "containerID": id,
                 "state": state, "lastState": last_state}]}
        }))
        .unwrap();
        let all = container_runs(&pod, false);
        assert_eq!(all.len(), 1);
        all[0].1.clone()
    }

    fn terminated(id: &str) -> Value {
        json!({"terminated": {"exitCode": 1, "containerID": id}})
    }

    fn request(id: &str, has_ended: bool, is_previous: bool) -> Option<LogRequest> {
        let run = ContainerRun {
            id: id.to_owned(),
            has_ended,
        };
        Some(LogRequest { run, is_previous })
    }

    #[test]
    fn each_run_is_read_to_its_end() {
        let mut read = ReadRuns::default();
        let waiting = json!({"waiting": {"reason": "ContainerCreating"}});
        let runs_now = runs("Pending", "", waiting, json!({}));
        assert_eq!(next_request(&runs_now, &read), None);

        let running = runs("Running", "1", json!({"running": {}}), json!({}));
        assert_eq!(next_request(&running, &read), request("1", false, false));
        let ended = runs("Succeeded", "1", terminated("1"), json!({}));
        assert!(ended.is_last);
        assert_eq!(next_request(&ended, &read), request("1", true, false));
        read.insert(&next_request(&ended, &read).unwrap());
        assert_eq!(next_request(&ended, &read), None);
    }

    #[test]
    fn restarted_container_is_read_from_its_previous_run() {
        let mut read = ReadRuns::default();
        let restarted = runs("Running", "2", json!({"running": {}}), terminated("1"));
        assert_eq!(next_request(&restarted, &read), request("1", true, true));
        read.insert(&next_request(&restarted, &read).unwrap());
        assert_eq!(next_request(&restarted, &read), request("2", false, false));

        let backing_off = json!({"waiting": {"reason": "CrashLoopBackOff"}});
        let waiting = runs("Running", "2", backing_off, terminated("2"));
        assert_eq!(next_request(&waiting, &read), request("2", true, false));
        read.insert(&next_request(&waiting, &read).unwrap());
        assert_eq!(next_request(&waiting, &read), None);
    }

    #[test]
    fn run_that_was_the_newest_is_read_again_as_previous() {
        let mut read = ReadRuns::default();
        let ended = runs("Running", "1", terminated("1"), json!({}));
        read.insert(&next_request(&ended, &read).unwrap());
        let restarted = runs("Running", "2", json!({"running": {}}), terminated("1"));
        assert_eq!(next_request(&restarted, &read), request("1", true, true));
    }

    #[test]
    fn container_of_a_lost_pod_has_ended() {
        // The node was lost, so no kubelet has reported the container's end.
        let lost = runs("Failed", "1", json!({"running": {}}), json!({}));
        let read = ReadRuns::default();
        assert_eq!(next_request(&lost, &read), request("1", true, false));
    }

    #[test]
    fn container_that_never_ran_has_no_log() {
        let failed = runs("Failed", "", terminated(""), json!({}));
        assert_eq!(next_request(&failed, &ReadRuns::default()), None);
    }

    #[test]
    fn number_of_remembered_runs_is_bounded() {
        let mut read = ReadRuns::default();
        for id in 0..100 {
            read.insert(&request(&id.to_string(), true, false).unwrap());
        }
        assert_eq!(read.0.len(), ReadRuns::MAX);
        assert!(read.contains("99"));
    }
}
