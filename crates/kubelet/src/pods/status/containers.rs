//! The statuses of a pod's containers: what the sandbox says, what was said before, and what is said until it speaks.

use k8s_openapi::api::core::v1::{
    Container, ContainerState, ContainerStateTerminated, ContainerStateWaiting, ContainerStatus,
    EphemeralContainer, PodSpec, VolumeMountStatus,
};

use super::phase::{find, last_end};
use crate::pods::spec::{init_containers, is_sidecar, restarts};

/// The exit code of a container whose end nobody saw.
const LOST_EXIT_CODE: i32 = 137;
/// What the containers of a pod may say together at their ends, in bytes.
const ALL_LAST_WORDS: usize = 12 * 1024;

/// Which of a pod's lists of containers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Init,
    Regular,
    Ephemeral,
}

/// The statuses of `containers`, in the order of the spec. `said` is what the sandbox says, if it has spoken.
pub(super) fn merged(
    spec: &PodSpec,
    kind: Kind,
    containers: &[Container],
    said: Option<&[ContainerStatus]>,
    previous: &[ContainerStatus],
) -> Vec<ContainerStatus> {
    containers
        .iter()
        .map(|container| {
            let before = find(previous, &container.name);
            let now = said.and_then(|said| find(said, &container.name));
            let mut status = match (now, before) {
                (Some(now), Some(before)) => forwards(spec, kind, container, now, before),
                (Some(now), None) => now.clone(),
                (None, Some(before)) => before.clone(),
                (None, None) => not_started(spec, container),
            };
            if status.volume_mounts.is_none() {
                status.volume_mounts = mounts(container);
            }
            if kind != Kind::Ephemeral {
                fill_in_resources(&mut status, container);
            }
            status
        })
        .collect()
}

/// What the sandbox says now, unless it contradicts what was said before.
fn forwards(
    spec: &PodSpec,
    kind: Kind,
    container: &Container,
    now: &ContainerStatus,
    before: &ContainerStatus,
) -> ContainerStatus {
    if let Some(end) = terminated(before) {
        let may_run_again = kind != Kind::Ephemeral
            && match kind {
                Kind::Init if is_sidecar(container) => true,
                // An init container that succeeded stays so, except when the whole pod is started anew.
                Kind::Init if end.exit_code == 0 => now.restart_count > before.restart_count,
                _ => restarts(container, spec, end.exit_code),
            };
        if !may_run_again && terminated(now).is_none() {
            return before.clone();
        }
    }
    let mut status = now.clone();
    status.restart_count = status.restart_count.max(before.restart_count);
    if last_end(&status).is_none() {
        let same_run = status.container_id == before.container_id;
        let end = match terminated(before) {
            Some(end) if !same_run => Some(end),
            _ => last_end(before),
        };
        status.last_state = end.map(|end| ContainerState {
            terminated: Some(end.clone()),
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

/// What is mounted where, as upstream tells it of every container.
fn mounts(container: &Container) -> Option<Vec<VolumeMountStatus>> {
    let mounts = container.volume_mounts.as_deref()?;
    let statuses = mounts.iter().map(|mount| {
        let read_only = mount.read_only == Some(true);
        let recursive = match mount.recursive_read_only.as_deref() {
            Some("Enabled" | "IfPossible") => "Enabled",
            _ => "Disabled",
        };
        VolumeMountStatus {
            name: mount.name.clone(),
            mount_path: mount.mount_path.clone(),
            read_only: read_only.then_some(true),
            recursive_read_only: read_only.then(|| recursive.to_owned()),
            ..Default::default()
        }
    });
    Some(statuses.collect())
}

/// A container that was started has what its spec asks for.
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

/// Ephemeral containers as containers: all that a status needs of them.
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

/// What is left of containers whose sandbox was lost: those that ran have ended, nobody knows how.
pub(crate) fn lost(statuses: &[ContainerStatus]) -> Vec<ContainerStatus> {
    let mut statuses = statuses.to_vec();
    for status in &mut statuses {
        let state = status.state.take().unwrap_or_default();
        status.state = Some(match state.running {
            Some(running) => ContainerState {
                terminated: Some(ContainerStateTerminated {
                    started_at: running.started_at,
                    container_id: status.container_id.clone(),
                    ..unknown_end()
                }),
                ..Default::default()
            },
            None => state,
        });
        if terminated(status).is_none_or(|end| end.exit_code != 0) {
            status.ready = false;
        }
        status.started = Some(false);
    }
    statuses
}

/// Brings `statuses` up to what a sandbox has left in its checkpoint. A kubelet that was connected may know of later runs.
pub(crate) fn recall(statuses: &mut Vec<ContainerStatus>, left: &[ContainerStatus]) {
    for left in left {
        let known = statuses.iter_mut().find(|known| known.name == left.name);
        let Some(known) = known else {
            statuses.push(left.clone());
            continue;
        };
        let is_newer = left.restart_count > known.restart_count
            || (left.restart_count == known.restart_count
                && left.container_id.is_some()
                && terminated(known).is_none());
        if is_newer {
            known.clone_from(left);
        }
    }
}

/// The containers of a pod that is over and whose sandbox can't be asked: each that may have run has failed.
pub(super) fn ended(statuses: &mut [ContainerStatus]) {
    for status in statuses {
        if terminated(status).is_none() {
            status.state = Some(ContainerState {
                terminated: Some(unknown_end()),
                ..Default::default()
            });
        }
        status.started = Some(false);
        if terminated(status).is_none_or(|end| end.exit_code != 0) {
            status.ready = false;
        }
    }
}

fn unknown_end() -> ContainerStateTerminated {
    ContainerStateTerminated {
        reason: Some("ContainerStatusUnknown".to_owned()),
        message: Some("The container could not be located when the pod was terminated".to_owned()),
        exit_code: LOST_EXIT_CODE,
        ..Default::default()
    }
}

/// Cuts the termination messages of a pod's containers to the share of each in what a pod may say.
pub(super) fn shortened(mut lists: [Vec<ContainerStatus>; 3]) -> [Vec<ContainerStatus>; 3] {
    let count: usize = lists.iter().map(Vec::len).sum();
    let share = ALL_LAST_WORDS / count.max(1);
    for status in lists.iter_mut().flatten() {
        let states = [&mut status.state, &mut status.last_state];
        let ends = states
            .into_iter()
            .filter_map(|state| state.as_mut()?.terminated.as_mut());
        for message in ends.filter_map(|end| end.message.as_mut()) {
            message.truncate(message.floor_char_boundary(share));
        }
    }
    lists
}

pub(super) fn terminated(status: &ContainerStatus) -> Option<&ContainerStateTerminated> {
    status.state.as_ref()?.terminated.as_ref()
}
