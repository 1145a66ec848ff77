//! Converts records to API statuses.

use k8s_openapi::api::core::v1::{
    ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting,
    ContainerStatus, VolumeMount, VolumeMountStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::plan::restarts_to_resize;
use super::record::{Kind, Record, Stage, terminated};
use super::restart::RestartPolicy;

/// The pod's state, as far as container statuses depend on it.
#[derive(Clone, Copy, Debug)]
pub struct Around {
    /// The pod's restart policy.
    pub policy: RestartPolicy,
    /// The pod has init containers.
    pub has_init: bool,
    /// No container is started any more.
    pub ending: bool,
}

pub fn status(record: &Record, around: Around) -> ContainerStatus {
    let created = record.has_run;
    let (state, last_state) = states(record, around);
    let ready = match record.kind {
        Kind::Ephemeral => false,
        Kind::Init => record
            .ended
            .as_ref()
            .is_some_and(|ended| ended.state.exit_code == 0),
        Kind::Sidecar | Kind::Regular => record.ready(),
    };
    let image = record.image.as_ref().filter(|_| created);
    let given = record.spec.resources.clone().unwrap_or_default();
    // Until it is restarted for a resize, a container has the resources that it was started with.
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
        started: (record.kind != Kind::Ephemeral).then(|| record.started()),
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

/// `state` and `lastState` of a container.
fn states(record: &Record, around: Around) -> (ContainerState, ContainerState) {
    let ended = record.ended.as_ref().map(|ended| &ended.state);
    let last = |state: Option<&ContainerStateTerminated>| {
        state.cloned().map(terminated).unwrap_or_default()
    };
    if let Some(Stage::Running { at }) = record.run.as_ref().map(|run| run.stage) {
        let running = ContainerState {
            running: Some(ContainerStateRunning {
                started_at: Some(Time(at)),
            }),
            ..Default::default()
        };
        return (running, last(record.previous.as_ref()));
    }
    // A run that is being prepared is not shown yet; the status still shows the run before.
    let restarting = !around.ending && (record.run.is_some() || record.wants_start(around.policy));
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

/// Marks containers that should have run but did not as failed. Called when the pod is finished.
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

/// The id with the `coracle://` prefix, as the API shows it.
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
