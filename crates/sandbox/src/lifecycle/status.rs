//! Records as the API shows them.

use k8s_openapi::api::core::v1::{
    ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting,
    ContainerStatus, VolumeMount, VolumeMountStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::plan::restarts_to_resize;
use super::container_record::{ContainerType, ContainerRecord, RunStage, terminated};
use super::restart::RestartPolicy;

/// What a container's status depends on beside its own record.
#[derive(Clone, Copy, Debug)]
pub struct StatusContext {
    /// The pod's restart policy.
    pub policy: RestartPolicy,
    /// The pod has init containers.
    pub has_init: bool,
    /// Nothing is started any more.
    pub ending: bool,
}

/// One container's status.
pub fn status(record: &ContainerRecord, around: StatusContext) -> ContainerStatus {
    let created = record.has_run;
    let (state, last_state) = states(record, around);
    let ready = match record.kind {
        ContainerType::Ephemeral => false,
        ContainerType::Init => record
            .ended
            .as_ref()
            .is_some_and(|ended| ended.state.exit_code == 0),
        ContainerType::Sidecar | ContainerType::Regular => record.ready(),
    };
    let image = record.image.as_ref().filter(|_| created);
    let given = record.spec.resources.clone().unwrap_or_default();
    // One that is restarted for other resources has, until then, those that it was started with.
    let has = match &record.run {
        Some(run) if restarts_to_resize(&record.spec, run.resources.as_ref()) => {
            run.resources.clone().unwrap_or_default()
        }
        _ => given.clone(),
    };
    let mounts = record.spec.volume_mounts.iter().flatten();
    ContainerStatus {
        name: record.name().to_owned(),
        state: Some(state),
        last_state: Some(last_state),
        ready,
        started: (record.kind != ContainerType::Ephemeral).then(|| record.started()),
        restart_count: record.restarts,
        image: image.map_or_else(
            || record.spec.image.clone().unwrap_or_default(),
            |image| image.reference.clone(),
        ),
        image_id: image.map(|image| image.id.clone()).unwrap_or_default(),
        container_id: record.id.as_deref().filter(|_| created).map(full_id),
        allocated_resources: given.requests.filter(|_| created),
        resources: created.then_some(has),
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

/// The state of a container and of its run before.
fn states(record: &ContainerRecord, around: StatusContext) -> (ContainerState, ContainerState) {
    let ended = record.ended.as_ref().map(|ended| &ended.state);
    let last = |state: Option<&ContainerStateTerminated>| {
        state.cloned().map(terminated).unwrap_or_default()
    };
    if let Some(RunStage::Running { at }) = record.run.as_ref().map(|run| run.stage) {
        let running = ContainerState {
            running: Some(ContainerStateRunning {
                started_at: Some(Time(at)),
            }),
            ..Default::default()
        };
        return (running, last(record.previous.as_ref()));
    }
    // A run that is being made is not seen yet; what was before it still is.
    let restarting = !around.stop_deadline && (record.run.is_some() || record.wants_start(around.policy));
    match (ended, &record.waiting) {
        (Some(ended), None) => (terminated(ended.clone()), last(record.previous.as_ref())),
        (Some(ended), _) if !restarting => {
            (terminated(ended.clone()), last(record.previous.as_ref()))
        }
        (_, waiting) => {
            let (reason, message) = match waiting {
                Some(problem) if problem.reason != "ContainerCreating" => (
                    problem.reason.clone(),
                    Some(problem.message.clone()).filter(|message| !message.is_empty()),
                ),
                _ if around.has_init => ("PodInitializing".to_owned(), None),
                _ => ("ContainerCreating".to_owned(), None),
            };
            let waiting = ContainerState {
                waiting: Some(ContainerStateWaiting {
                    reason: Some(reason),
                    message,
                }),
                ..Default::default()
            };
            (waiting, last(ended.or(record.previous.as_ref())))
        }
    }
}

/// When a pod is over, containers that should have run and did not count as failed.
pub fn give_up(initialized: bool, init: &mut [ContainerStatus], regular: &mut [ContainerStatus]) {
    if initialized || regular.iter().any(seen) {
        regular.iter_mut().for_each(unknown);
    }
    let tried = init.iter().rposition(seen).unwrap_or(0) + 1;
    init.iter_mut().take(tried).for_each(unknown);
}

fn seen(status: &ContainerStatus) -> bool {
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

fn unknown(status: &mut ContainerStatus) {
    if status
        .state
        .as_ref()
        .is_some_and(|state| state.terminated.is_some())
    {
        return;
    }
    status.state = Some(terminated(ContainerStateTerminated {
        reason: Some("ContainerStatusUnknown".to_owned()),
        message: Some("The container could not be located when the pod was terminated".to_owned()),
        exit_code: 137,
        ..Default::default()
    }));
}

/// An id as the API shows it.
pub fn full_id(id: &str) -> String {
    format!("coracle://{id}")
}

fn mount_status(mount: &VolumeMount) -> VolumeMountStatus {
    let read_only = mount.read_only == Some(true);
    let recursive = matches!(
        mount.recursive_read_only.as_deref(),
        Some("Enabled" | "IfPossible")
    );
    VolumeMountStatus {
        mount_path: mount.mount_path.clone(),
        name: mount.name.clone(),
        read_only: read_only.then_some(true),
        recursive_read_only: read_only
            .then(|| if recursive { "Enabled" } else { "Disabled" }.to_owned()),
        volume_status: None,
    }
}
