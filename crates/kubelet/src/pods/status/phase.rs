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

    let mut init_pending = 0;
    for container in init_containers(spec).iter().filter(|c| !is_sidecar(c)) {
        match progress(find_status(init, &container.name)) {
            Progress::Unknown | Progress::Waiting | Progress::Running => init_pending += 1,
            Progress::Terminated(end) | Progress::Restarting(end) if end.exit_code != 0 => {
                if terminating || !restarts(container, end.exit_code) {
                    return PodPhase::Failed;
                }
                // It runs again, or will: the pod is not initialized.
                init_pending += 1;
            }
            Progress::Terminated(_) | Progress::Restarting(_) => {}
        }
    }

    let (mut unknown, mut running, mut waiting) = (0, 0, 0);
    let mut sidecars_pending = 0;
    for container in init_containers(spec).iter().filter(|c| is_sidecar(c)) {
        let status = find_status(init, &container.name);
        match progress(status) {
            Progress::Unknown => unknown += 1,
            Progress::Waiting => {
                sidecars_pending += 1;
                waiting += 1;
            }
            Progress::Running => {
                if status.and_then(|status| status.started) != Some(true) {
                    sidecars_pending += 1;
                }
                running += 1;
            }
            // A terminated sidecar does not count.
            Progress::Terminated(_) | Progress::Restarting(_) => {}
        }
    }

    let (mut stopped, mut stay_stopped, mut succeeded) = (0, 0, 0);
    for container in &spec.containers {
        match progress(find_status(regular, &container.name)) {
            Progress::Unknown => unknown += 1,
            Progress::Waiting => waiting += 1,
            Progress::Running => running += 1,
            Progress::Terminated(end) => {
                stopped += 1;
                succeeded += usize::from(end.exit_code == 0);
                stay_stopped += usize::from(!restarts(container, end.exit_code));
            }
            Progress::Restarting(end) => {
                stopped += 1;
                stay_stopped += usize::from(!restarts(container, end.exit_code));
            }
        }
    }

    // A pod that has run does not become Pending again because a sidecar restarts.
    let initializing = init_pending > 0 || (sidecars_pending > 0 && !started);
    if initializing || waiting > 0 {
        return PodPhase::Pending;
    }
    match (running > 0, stopped > 0, unknown) {
        (true, _, 0) => PodPhase::Running,
        (false, true, 0) => {
            if !terminating && stopped != stay_stopped {
                PodPhase::Running
            } else if stopped == succeeded {
                PodPhase::Succeeded
            } else {
                PodPhase::Failed
            }
        }
        _ => PodPhase::Pending,
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
