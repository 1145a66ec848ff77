//! The phase of a pod, by the rules of upstream's kubelet.

use k8s_openapi::api::core::v1::{
    Container, ContainerState, ContainerStateTerminated, ContainerStatus, PodSpec,
};
use pod_protocol::restart::{RESTARTING_ALL_CONTAINERS, is_sidecar, restarts_all};

use crate::pods::spec::{PodPhase, init_containers, restarts};

/// How far a container has come.
enum Progress<'a> {
    /// It has no status.
    Unknown,
    /// It has never run.
    Waiting,
    Running,
    Terminated(&'a ContainerStateTerminated),
    /// It has terminated, and waits to run again.
    Restarting(&'a ContainerStateTerminated),
}

/// The phase that follows from the container statuses. With `terminating`, no container is restarted, whatever its policy.
pub(super) fn phase(
    spec: &PodSpec,
    init: &[ContainerStatus],
    regular: &[ContainerStatus],
    terminating: bool,
) -> PodPhase {
    let restarting_all = !terminating && is_restarting_all(spec, init, regular);
    let restarts =
        |container: &Container, exit_code| restarting_all || restarts(container, spec, exit_code);
    let started = regular.iter().any(|status| {
        !matches!(
            progress(Some(status)),
            Progress::Unknown | Progress::Waiting
        )
    });

    let restarts_init = |container: &Container, code| !terminating && restarts(container, code);
    let Some(init_pending) = pending_init_containers(spec, init, restarts_init) else {
        return PodPhase::Failed;
    };
    let mut counts = ProgressCounts::default();
    counts.add_sidecars(spec, init);
    counts.add_containers(spec, regular, restarts);
    // A pod that has run does not become Pending again because a sidecar restarts.
    let initializing = init_pending > 0 || (counts.sidecars_pending > 0 && !started);
    if initializing || counts.waiting > 0 {
        return PodPhase::Pending;
    }
    match (counts.running > 0, counts.stopped > 0, counts.unknown) {
        (true, _, 0) => PodPhase::Running,
        (false, true, 0) => {
            if !terminating && counts.stopped != counts.stay_stopped {
                PodPhase::Running
            } else if counts.stopped == counts.succeeded {
                PodPhase::Succeeded
            } else {
                PodPhase::Failed
            }
        }
        _ => PodPhase::Pending,
    }
}

/// The number of init containers that have not succeeded yet; `None` if one has failed for good.
fn pending_init_containers(
    spec: &PodSpec,
    statuses: &[ContainerStatus],
    restarts: impl Fn(&Container, i32) -> bool,
) -> Option<usize> {
    let mut pending = 0;
    for container in init_containers(spec).iter().filter(|c| !is_sidecar(c)) {
        match progress(find_status(statuses, &container.name)) {
            Progress::Unknown | Progress::Waiting | Progress::Running => pending += 1,
            Progress::Terminated(end) | Progress::Restarting(end) if end.exit_code != 0 => {
                if !restarts(container, end.exit_code) {
                    return None;
                }
                // It runs again, or will: the pod is not initialized.
                pending += 1;
            }
            Progress::Terminated(_) | Progress::Restarting(_) => {}
        }
    }
    Some(pending)
}

/// Numbers of sidecars and containers.
#[derive(Default)]
struct ProgressCounts {
    unknown: usize,
    waiting: usize,
    running: usize,
    /// Sidecars that have not started.
    sidecars_pending: usize,
    /// Containers that have terminated.
    stopped: usize,
    /// Of these, containers that are not restarted.
    stay_stopped: usize,
    /// Containers that have terminated with exit code 0 and do not wait for a restart.
    succeeded: usize,
}

impl ProgressCounts {
    fn add_sidecars(&mut self, spec: &PodSpec, statuses: &[ContainerStatus]) {
        for container in init_containers(spec).iter().filter(|c| is_sidecar(c)) {
            let status = find_status(statuses, &container.name);
            match progress(status) {
                Progress::Unknown => self.unknown += 1,
                Progress::Waiting => {
                    self.sidecars_pending += 1;
                    self.waiting += 1;
                }
                Progress::Running => {
                    if status.and_then(|status| status.started) != Some(true) {
                        self.sidecars_pending += 1;
                    }
                    self.running += 1;
                }
                // A terminated sidecar does not count.
                Progress::Terminated(_) | Progress::Restarting(_) => {}
            }
        }
    }

    fn add_containers(
        &mut self,
        spec: &PodSpec,
        statuses: &[ContainerStatus],
        restarts: impl Fn(&Container, i32) -> bool,
    ) {
        for container in &spec.containers {
            match progress(find_status(statuses, &container.name)) {
                Progress::Unknown => self.unknown += 1,
                Progress::Waiting => self.waiting += 1,
                Progress::Running => self.running += 1,
                Progress::Terminated(end) => {
                    self.stopped += 1;
                    self.succeeded += usize::from(end.exit_code == 0);
                    self.stay_stopped += usize::from(!restarts(container, end.exit_code));
                }
                Progress::Restarting(end) => {
                    self.stopped += 1;
                    self.stay_stopped += usize::from(!restarts(container, end.exit_code));
                }
            }
        }
    }
}

/// Whether a container's exit has triggered a restart of all containers that is not complete yet.
pub(super) fn is_restarting_all(
    spec: &PodSpec,
    init: &[ContainerStatus],
    regular: &[ContainerStatus],
) -> bool {
    let of_init = init_containers(spec).iter().map(|one| (one, init));
    let of_regular = spec.containers.iter().map(|one| (one, regular));
    of_init.chain(of_regular).any(|(container, statuses)| {
        let Some(status) = find_status(statuses, &container.name) else {
            return false;
        };
        let waits = status
            .state
            .as_ref()
            .and_then(|state| state.waiting.as_ref())
            .is_some_and(|waiting| waiting.reason.as_deref() == Some(RESTARTING_ALL_CONTAINERS));
        let triggers = matches!(progress(Some(status)), Progress::Terminated(end) if restarts_all(container, end.exit_code));
        waits || triggers
    })
}

fn progress(status: Option<&ContainerStatus>) -> Progress<'_> {
    let Some(status) = status else {
        return Progress::Unknown;
    };
    match status.state.as_ref() {
        Some(ContainerState {
            running: Some(_), ..
        }) => Progress::Running,
        Some(ContainerState {
            terminated: Some(end),
            ..
        }) => Progress::Terminated(end),
        Some(ContainerState {
            waiting: Some(_), ..
        }) => match last_termination(status) {
            Some(end) => Progress::Restarting(end),
            None => Progress::Waiting,
        },
        _ => Progress::Unknown,
    }
}

/// The termination of a container's previous run.
pub(super) fn last_termination(status: &ContainerStatus) -> Option<&ContainerStateTerminated> {
    status.last_state.as_ref()?.terminated.as_ref()
}

pub(super) fn find_status<'a>(
    statuses: &'a [ContainerStatus],
    name: &str,
) -> Option<&'a ContainerStatus> {
    statuses.iter().find(|status| status.name == name)
}

/// Whether at least one of the containers has been started.
pub(super) fn any_started(containers: &[Container], statuses: &[ContainerStatus]) -> bool {
    containers.iter().any(|container| {
        find_status(statuses, &container.name)
            .and_then(|status| status.state.as_ref())
            .is_some_and(|state| state.running.is_some() || state.terminated.is_some())
    })
}
