//! The statuses of a pod's containers, from the sandbox's statuses, the previous ones, and the spec.

use k8s_openapi::api::core::v1::{
    Container, ContainerState, ContainerStateTerminated, ContainerStateWaiting, ContainerStatus,
    EphemeralContainer, PodSpec, VolumeMountStatus,
};
use pod_protocol::mounts::mount_status;
use pod_protocol::restart::is_sidecar;
use pod_protocol::termination::lost_container;

use super::phase::{find_status, last_termination};
use crate::pods::spec::{init_containers, restarts};

/// Maximum size of all termination messages of a pod, in bytes.
const MAX_TERMINATION_MESSAGES: usize = 12 * 1024;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ContainerKind {
    Init,
    Regular,
    Ephemeral,
}

/// The statuses of `containers`, in the order of the spec. `current` are the sandbox's statuses, if it has reported any.
pub(super) fn merge_statuses(
    spec: &PodSpec,
    kind: ContainerKind,
    containers: &[Container],
    current: Option<&[ContainerStatus]>,
    previous: &[ContainerStatus],
) -> Vec<ContainerStatus> {
    containers
        .iter()
        .map(|container| {
            let before = find_status(previous, &container.name);
            let now = current.and_then(|current| find_status(current, &container.name));
            let mut status = match (now, before) {
                (Some(now), Some(before)) => merge_status(spec, kind, container, now, before),
                (Some(now), None) => now.clone(),
                (None, Some(before)) => before.clone(),
                (None, None) => not_started(spec, container),
            };
            if status.volume_mounts.is_none() {
                status.volume_mounts = mount_statuses(container);
            }
            if kind != ContainerKind::Ephemeral {
                fill_in_resources(&mut status, container);
            }
            status
        })
        .collect()
}

/// The current status, unless it contradicts the previous one: a container that has terminated for good does not run again.
fn merge_status(
    spec: &PodSpec,
    kind: ContainerKind,
    container: &Container,
    now: &ContainerStatus,
    before: &ContainerStatus,
) -> ContainerStatus {
    if let Some(termination) = terminated(before) {
        let may_run_again = kind != ContainerKind::Ephemeral
            && match kind {
                ContainerKind::Init if is_sidecar(container) => true,
                // An init container runs again after success only if the whole pod is restarted.
                ContainerKind::Init if termination.exit_code == 0 => {
                    now.restart_count > before.restart_count
                }
                _ => restarts(container, spec, termination.exit_code),
            };
        if !may_run_again && terminated(now).is_none() {
            return before.clone();
        }
    }
    let mut status = now.clone();
    status.restart_count = status.restart_count.max(before.restart_count);
    if last_termination(&status).is_none() {
        let same_run = status.container_id == before.container_id;
        let last = match terminated(before) {
            Some(termination) if !same_run => Some(termination),
            _ => last_termination(before),
        };
        status.last_state = last.map(|termination| ContainerState {
            terminated: Some(termination.clone()),
            ..Default::default()
        });
    }
    if status.image_id.is_empty() {
        status.image_id.clone_from(&before.image_id);
    }
    status
}

fn not_started(spec: &PodSpec, container: &Container) -> ContainerStatus {
    let reason = if init_containers(spec).is_empty() {
        "ContainerCreating"
    } else {
        "PodInitializing"
    };
    ContainerStatus {
        name: container.name.clone(),
        image: container.image.clone().unwrap_or_default(),
        started: Some(false),
        state: Some(ContainerState {
            waiting: Some(ContainerStateWaiting {
                reason: Some(reason.to_owned()),
                message: None,
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// The statuses of a container's volume mounts.
fn mount_statuses(container: &Container) -> Option<Vec<VolumeMountStatus>> {
    let mounts = container.volume_mounts.as_deref()?;
    Some(mounts.iter().map(mount_status).collect())
}

/// Sets the resources of a started container to those of its spec, if the sandbox did not report them.
fn fill_in_resources(status: &mut ContainerStatus, container: &Container) {
    if status.container_id.is_none() || status.resources.is_some() {
        return;
    }
    if let Some(resources) = &container.resources {
        status.allocated_resources.clone_from(&resources.requests);
        let mut resources = resources.clone();
        resources.claims = None;
        status.resources = Some(resources);
    }
}

/// Converts ephemeral containers to containers, with the fields that a status needs.
pub(super) fn as_containers(ephemeral: &[EphemeralContainer]) -> Vec<Container> {
    ephemeral
        .iter()
        .map(|container| Container {
            name: container.name.clone(),
            image: container.image.clone(),
            volume_mounts: container.volume_mounts.clone(),
            ..Default::default()
        })
        .collect()
}

/// The statuses after the sandbox was lost: running containers have terminated, with an unknown result.
pub(crate) fn terminate_running(statuses: &[ContainerStatus]) -> Vec<ContainerStatus> {
    let mut statuses = statuses.to_vec();
    for status in &mut statuses {
        let state = status.state.take().unwrap_or_default();
        status.state = Some(match state.running {
            Some(running) => ContainerState {
                terminated: Some(ContainerStateTerminated {
                    started_at: running.started_at,
                    container_id: status.container_id.clone(),
                    ..lost_container()
                }),
                ..Default::default()
            },
            None => state,
        });
        if terminated(status).is_none_or(|termination| termination.exit_code != 0) {
            status.ready = false;
        }
        status.started = Some(false);
    }
    statuses
}

/// Applies the statuses of a sandbox's checkpoint that are newer: `statuses` may have later runs than the checkpoint.
pub(crate) fn apply_checkpoint(
    statuses: &mut Vec<ContainerStatus>,
    checkpoint: &[ContainerStatus],
) {
    for saved in checkpoint {
        let known = statuses.iter_mut().find(|known| known.name == saved.name);
        let Some(known) = known else {
            statuses.push(saved.clone());
            continue;
        };
        let is_newer = saved.restart_count > known.restart_count
            || (saved.restart_count == known.restart_count
                && saved.container_id.is_some()
                && terminated(known).is_none());
        if is_newer {
            known.clone_from(saved);
        }
    }
}

/// Marks all containers as terminated, for a pod that has ended without its sandbox: those without a known result have failed.
pub(super) fn terminate_all(statuses: &mut [ContainerStatus]) {
    for status in statuses {
        if terminated(status).is_none() {
            status.state = Some(ContainerState {
                terminated: Some(lost_container()),
                ..Default::default()
            });
        }
        status.started = Some(false);
        if terminated(status).is_none_or(|termination| termination.exit_code != 0) {
            status.ready = false;
        }
    }
}

/// Truncates termination messages: each container may use an equal share of [`MAX_TERMINATION_MESSAGES`].
pub(super) fn truncate_messages(mut lists: [Vec<ContainerStatus>; 3]) -> [Vec<ContainerStatus>; 3] {
    let count: usize = lists.iter().map(Vec::len).sum();
    let share = MAX_TERMINATION_MESSAGES / count.max(1);
    for status in lists.iter_mut().flatten() {
        let states = [&mut status.state, &mut status.last_state];
        let terminations = states
            .into_iter()
            .filter_map(|state| state.as_mut()?.terminated.as_mut());
        for message in terminations.filter_map(|termination| termination.message.as_mut()) {
            message.truncate(message.floor_char_boundary(share));
        }
    }
    lists
}

pub(super) fn terminated(status: &ContainerStatus) -> Option<&ContainerStateTerminated> {
    status.state.as_ref()?.terminated.as_ref()
}
