//! Converts records to API statuses.

use k8s_openapi::api::core::v1::{
    ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting,
    ContainerStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use pod_protocol::mounts::mount_status;
use pod_protocol::restart::RestartPolicy;
use pod_protocol::termination::lost_container;

use super::container_record::{
    ContainerRecord, ContainerType, RunStage, WaitingState, terminated_state,
};
use super::plan::resize_requires_restart;
use crate::container_id;

/// The pod's state, as far as container statuses depend on it.
#[derive(Clone, Copy, Debug)]
pub struct StatusContext {
    pub restart_policy: RestartPolicy,
    pub has_init_containers: bool,
    /// The pod is being stopped: no container is started any more.
    pub is_stopping: bool,
}

/// The status of a container.
pub fn status(record: &ContainerRecord, context: StatusContext) -> ContainerStatus {
    let created = record.has_run;
    let (state, last_state) = states(record, context);
    let ready = match record.container_type {
        ContainerType::Ephemeral => false,
        ContainerType::Init => record
            .last_run
            .as_ref()
            .is_some_and(|run| run.state.exit_code == 0),
        ContainerType::Sidecar | ContainerType::Regular => record.is_ready(),
    };
    let image = record.image.as_ref().filter(|_| created);
    let allocated = record.spec.resources.clone().unwrap_or_default();
    // Until it is restarted for a resize, a container has the resources that it was started with.
    let actual = match &record.run {
        Some(run) if resize_requires_restart(&record.spec, run.resources.as_ref()) => {
            run.resources.clone().unwrap_or_default()
        }
        _ => allocated.clone(),
    };
    let mounts = record.spec.volume_mounts.iter().flatten();
    ContainerStatus {
        name: record.name().to_owned(),
        state: Some(state),
        last_state: Some(last_state),
        ready,
        started: (record.container_type != ContainerType::Ephemeral).then(|| record.is_started()),
        restart_count: record.restart_count,
        image: image.map_or_else(
            || record.spec.image.clone().unwrap_or_default(),
            |image| image.reference.clone(),
        ),
        image_id: image.map(|image| image.id.clone()).unwrap_or_default(),
        container_id: record
            .id
            .as_deref()
            .filter(|_| created)
            .map(container_id::to_api),
        allocated_resources: allocated.requests.filter(|_| created),
        resources: created.then_some(actual),
        user: record.user.clone().filter(|_| created),
        volume_mounts: (record.spec.volume_mounts.is_some())
            .then(|| mounts.map(mount_status).collect()),
        stop_signal: record
            .spec
            .lifecycle
            .as_ref()
            .and_then(|lifecycle| lifecycle.stop_signal.clone())
            .filter(|_| created),
        ..Default::default()
    }
}

/// `state` and `lastState` of a container.
fn states(record: &ContainerRecord, context: StatusContext) -> (ContainerState, ContainerState) {
    let last_exit = record.last_run.as_ref().map(|run| &run.state);
    let last_state = |state: Option<&ContainerStateTerminated>| {
        state.cloned().map(terminated_state).unwrap_or_default()
    };
    if let Some(RunStage::Running { started_at }) = record.run.as_ref().map(|run| run.stage) {
        let running = ContainerState {
            running: Some(ContainerStateRunning {
                started_at: Some(Time(started_at)),
            }),
            ..Default::default()
        };
        return (running, last_state(record.run_before_last.as_ref()));
    }
    // A run that is being prepared is not shown yet; the status still shows the run before.
    let restarting = !context.is_stopping
        && (record.run.is_some() || record.should_start(context.restart_policy));
    match (last_exit, &record.waiting) {
        (Some(exit), None) => (
            terminated_state(exit.clone()),
            last_state(record.run_before_last.as_ref()),
        ),
        (Some(exit), _) if !restarting => (
            terminated_state(exit.clone()),
            last_state(record.run_before_last.as_ref()),
        ),
        (_, waiting) => {
            let shown = waiting.as_ref().and_then(WaitingState::reason_and_message);
            let (reason, message) = shown.unwrap_or(match context.has_init_containers {
                true => ("PodInitializing", ""),
                false => ("ContainerCreating", ""),
            });
            let waiting = ContainerState {
                waiting: Some(ContainerStateWaiting {
                    reason: Some(reason.to_owned()),
                    message: Some(message.to_owned()).filter(|message| !message.is_empty()),
                }),
                ..Default::default()
            };
            let last_exit = last_exit.or(record.run_before_last.as_ref());
            (waiting, last_state(last_exit))
        }
    }
}

/// Shows containers of a finished pod as failed if they should have run but did not terminate.
pub fn fail_unterminated(
    initialized: bool,
    init: &mut [ContainerStatus],
    regular: &mut [ContainerStatus],
) {
    if initialized || regular.iter().any(has_started) {
        regular.iter_mut().for_each(set_unknown_unless_terminated);
    }
    let reached = init.iter().rposition(has_started).unwrap_or(0) + 1;
    init.iter_mut()
        .take(reached)
        .for_each(set_unknown_unless_terminated);
}

fn has_started(status: &ContainerStatus) -> bool {
    let waiting = status
        .state
        .as_ref()
        .is_some_and(|state| state.waiting.is_some());
    !waiting
        || status
            .last_state
            .as_ref()
            .is_some_and(|state| state.terminated.is_some())
}

fn set_unknown_unless_terminated(status: &mut ContainerStatus) {
    if status
        .state
        .as_ref()
        .is_some_and(|state| state.terminated.is_some())
    {
        return;
    }
    status.state = Some(terminated_state(lost_container()));
}
