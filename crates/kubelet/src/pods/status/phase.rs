//! The phase of a pod, by the rules of upstream's kubelet.

use k8s_openapi::api::core::v1::{
    Container, ContainerState, ContainerStateTerminated, ContainerStatus, PodSpec,
};

use crate::pods::spec::{init_containers, is_sidecar, restarts, restarts_all};

/// How far a container has come.
enum Progress<'a> {
    /// Nothing is known of it.
    Unknown,
    /// It has never run.
    Waiting,
    /// It runs.
    Running,
    /// It has run, and ended so.
    Ended(&'a ContainerStateTerminated),
    /// It has run, ended so, and waits to run again.
    Restarting(&'a ContainerStateTerminated),
}

/// What the containers make of the pod. `ending`: none of them will be restarted, whatever the policy.
pub(super) fn phase(
    spec: &PodSpec,
    init: &[ContainerStatus],
    regular: &[ContainerStatus],
    ending: bool,
) -> &'static str {
    let starting_over = !ending && starting_over(spec, init, regular);
    let restarts =
        |container: &Container, exit_code| starting_over || restarts(container, spec, exit_code);
    let started = regular.iter().any(|status| {
        !matches!(
            progress(Some(status)),
            Progress::Unknown | Progress::Waiting
        )
    });

    let mut init_pending = 0;
    for container in init_containers(spec).iter().filter(|c| !is_sidecar(c)) {
        match progress(find(init, &container.name)) {
            Progress::Unknown | Progress::Waiting | Progress::Running => init_pending += 1,
            Progress::Ended(end) | Progress::Restarting(end) if end.exit_code != 0 => {
                if ending || !restarts(container, end.exit_code) {
                    return "Failed";
                }
                // Running again, or about to: the pod is not initialised.
                init_pending += 1;
            }
            Progress::Ended(_) | Progress::Restarting(_) => {}
        }
    }

    let (mut unknown, mut running, mut waiting) = (0, 0, 0);
    let mut sidecars_pending = 0;
    for container in init_containers(spec).iter().filter(|c| is_sidecar(c)) {
        let status = find(init, &container.name);
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
            // A sidecar that has ended doesn't count.
            Progress::Ended(_) | Progress::Restarting(_) => {}
        }
    }

    let (mut stopped, mut stay_stopped, mut succeeded) = (0, 0, 0);
    for container in &spec.containers {
        match progress(find(regular, &container.name)) {
            Progress::Unknown => unknown += 1,
            Progress::Waiting => waiting += 1,
            Progress::Running => running += 1,
            Progress::Ended(end) => {
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
    let initialising = init_pending > 0 || (sidecars_pending > 0 && !started);
    if initialising || waiting > 0 {
        return "Pending";
    }
    match (running > 0, stopped > 0, unknown) {
        (true, _, 0) => "Running",
        (false, true, 0) => {
            if !ending && stopped != stay_stopped {
                "Running"
            } else if stopped == succeeded {
                "Succeeded"
            } else {
                "Failed"
            }
        }
        _ => "Pending",
    }
}

/// Whether a container has ended so that all are to start over, which not all have done yet.
pub(super) fn starting_over(
    spec: &PodSpec,
    init: &[ContainerStatus],
    regular: &[ContainerStatus],
) -> bool {
    let of_init = init_containers(spec).iter().map(|one| (one, init));
    let of_regular = spec.containers.iter().map(|one| (one, regular));
    of_init.chain(of_regular).any(|(container, statuses)| {
        let Some(status) = find(statuses, &container.name) else {
            return false;
        };
        let waits = status
            .state
            .as_ref()
            .and_then(|state| state.waiting.as_ref())
            .is_some_and(|waiting| waiting.reason.as_deref() == Some("RestartingAllContainers"));
        let asks = matches!(progress(Some(status)), Progress::Ended(end) if restarts_all(container, end.exit_code));
        waits || asks
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
        }) => Progress::Ended(end),
        Some(ContainerState {
            waiting: Some(_), ..
        }) => match last_end(status) {
            Some(end) => Progress::Restarting(end),
            None => Progress::Waiting,
        },
        _ => Progress::Unknown,
    }
}

/// How a container's run before the current one ended.
pub(super) fn last_end(status: &ContainerStatus) -> Option<&ContainerStateTerminated> {
    status.last_state.as_ref()?.terminated.as_ref()
}

/// The status of a container by its name.
pub(super) fn find<'a>(statuses: &'a [ContainerStatus], name: &str) -> Option<&'a ContainerStatus> {
    statuses.iter().find(|status| status.name == name)
}

/// Whether a container of the spec is known to have been started at some time.
pub(super) fn any_started(containers: &[Container], statuses: &[ContainerStatus]) -> bool {
    containers.iter().any(|container| {
        find(statuses, &container.name)
            .and_then(|status| status.state.as_ref())
            .is_some_and(|state| state.running.is_some() || state.terminated.is_some())
    })
}
