//! Generates a pod's status, with pure functions.
//!
//! The sandbox reports container statuses. The status of the pod as a whole (phase, conditions, addresses) is computed here, by
//! the rules of upstream's kubelet. A status never goes back: a terminal phase stays, restart counts do not decrease, and a
//! container that has terminated for good does not run again.

mod conditions;
mod containers;
mod phase;
#[cfg(test)]
mod tests;

use k8s_openapi::api::core::v1::{
    ContainerStatus, HostIP, Pod, PodCondition, PodIP, PodSpec, PodStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use pod_protocol::{PodFailure, PodState, Problem};
use serde_json::{Value, json};

pub(crate) use containers::{apply_checkpoint, terminate_running};

use self::conditions::{ConditionInputs, conditions, with_transition_time};
use self::containers::{
    ContainerKind, as_containers, merge_statuses, terminate_all, truncate_messages,
};
use super::spec::{PodPhase, init_containers, uses_host_network};

const RESIZE_PENDING: &str = "PodResizePending";
const RESIZE_IN_PROGRESS: &str = "PodResizeInProgress";

/// The facts that determine a pod's status.
pub(crate) struct StatusInputs<'a> {
    /// The API server's pod.
    pub pod: &'a Pod,
    /// The sandbox's last report; `None` before the first one.
    pub state: Option<&'a PodState>,
    /// The status that was generated last; at first, the API server's.
    pub previous: &'a PodStatus,
    /// The pod is being deleted or stopped: no container will be restarted.
    pub terminating: bool,
    /// Why the resources in the spec are not allocated yet.
    pub pending_resize: Option<&'a Problem>,
}

/// Generates the status of a pod.
pub(crate) fn pod_status(inputs: &StatusInputs, now: Timestamp) -> PodStatus {
    let StatusInputs {
        pod,
        state,
        previous,
        ..
    } = *inputs;
    let default_spec = Default::default();
    let spec = pod.spec.as_ref().unwrap_or(&default_spec);

    let [init, regular, ephemeral] = container_statuses(spec, state, previous);
    let finished = state.is_some_and(|state| state.finished);
    let failure = state.and_then(|state| state.failure.as_ref());
    let previous_phase = PodPhase::of(Some(previous));
    let terminating = inputs.terminating || finished;
    let phase = match phase::phase(spec, &init, &regular, terminating) {
        _ if previous_phase.is_terminal() => previous_phase,
        // The phase becomes terminal only when the sandbox has finished: then the pod's resources are free.
        phase if phase.is_terminal() && !finished => previous_phase,
        PodPhase::Succeeded if failure.is_none() => PodPhase::Succeeded,
        _ if finished => PodPhase::Failed,
        phase => phase,
    };
    // Reason and message are set together with the terminal phase.
    let (reason, message) = match failure {
        Some(failure) if phase.is_terminal() && !previous_phase.is_terminal() => {
            let reason = failure.cause.reason().to_owned();
            (Some(reason), Some(failure.message.clone()))
        }
        _ if phase == previous_phase => (previous.reason.clone(), previous.message.clone()),
        _ => (None, None),
    };

    let before = previous.conditions.as_deref().unwrap_or_default();
    let mut conditions = conditions(
        &ConditionInputs {
            pod,
            spec,
            phase,
            init: &init,
            regular: &regular,
            sandbox_ready: state.is_some_and(|state| state.sandbox_ready && !finished),
        },
        before,
        now,
    );
    let further = if phase.is_terminal() {
        failure.and_then(|failure| disruption_target(pod, failure))
    } else {
        resize_condition(pod, inputs.pending_resize, [&init, &regular])
    };
    conditions.extend(further.map(|condition| with_transition_time(condition, before, now)));

    let host_ips = host_ips(inputs);
    let pod_ips = pod_ips(inputs, &host_ips);
    let reported_start = state.and_then(|state| state.host.started_at).map(Time);
    PodStatus {
        phase: Some(phase.as_str().to_owned()),
        reason,
        message,
        // The first sandbox's start: the pod's deadline counts from it.
        start_time: previous.start_time.clone().or(reported_start),
        host_ip: host_ips.first().cloned(),
        host_ips: non_empty(host_ips.into_iter().map(|ip| HostIP { ip }).collect()),
        pod_ip: pod_ips.first().cloned(),
        pod_ips: Some(pod_ips.into_iter().map(|ip| PodIP { ip }).collect()),
        qos_class: pod.status.as_ref().and_then(|s| s.qos_class.clone()),
        observed_generation: pod.metadata.generation.max(previous.observed_generation),
        conditions: Some(conditions),
        init_container_statuses: non_empty(init),
        container_statuses: non_empty(regular),
        ephemeral_container_statuses: non_empty(ephemeral),
        ..Default::default()
    }
}

/// The statuses of init, regular and ephemeral containers.
fn container_statuses(
    spec: &PodSpec,
    state: Option<&PodState>,
    previous: &PodStatus,
) -> [Vec<ContainerStatus>; 3] {
    let init = merge_statuses(
        spec,
        ContainerKind::Init,
        init_containers(spec),
        state.map(|state| &state.init_containers[..]),
        previous
            .init_container_statuses
            .as_deref()
            .unwrap_or_default(),
    );
    let regular = merge_statuses(
        spec,
        ContainerKind::Regular,
        &spec.containers,
        state.map(|state| &state.containers[..]),
        previous.container_statuses.as_deref().unwrap_or_default(),
    );
    let ephemeral = merge_statuses(
        spec,
        ContainerKind::Ephemeral,
        &as_containers(spec.ephemeral_containers.as_deref().unwrap_or_default()),
        state.map(|state| &state.ephemeral_containers[..]),
        previous
            .ephemeral_container_statuses
            .as_deref()
            .unwrap_or_default(),
    );

    truncate_messages([init, regular, ephemeral])
}

/// Whether a pod is restarted after its sandbox was lost, by its containers' restart policies.
pub(crate) fn restarts_after_loss(pod: &Pod, status: &PodStatus) -> bool {
    let terminated = |statuses: &Option<Vec<_>>| {
        let statuses = statuses.as_deref();
        statuses.map(terminate_running).unwrap_or_default()
    };
    pod.spec.as_ref().is_some_and(|spec| {
        let init = terminated(&status.init_container_statuses);
        let regular = terminated(&status.container_statuses);
        !phase::phase(spec, &init, &regular, false).is_terminal()
    })
}

/// The terminal status of a pod whose sandbox was lost and is not started again.
pub(crate) fn terminal_status(
    inputs: &StatusInputs,
    failure: Option<&PodFailure>,
    now: Timestamp,
) -> PodStatus {
    let mut previous = inputs.previous.clone();
    let started = |statuses: &Option<Vec<_>>| {
        statuses.iter().flatten().any(|status: &ContainerStatus| {
            status.container_id.is_some() || status.restart_count > 0
        })
    };
    // In an initialized pod, containers without a known result have failed. Before that they were never created.
    if started(&previous.container_statuses) {
        terminate_all(
            previous
                .container_statuses
                .as_deref_mut()
                .unwrap_or_default(),
        );
    }
    let last_started = previous
        .init_container_statuses
        .as_deref()
        .unwrap_or_default()
        .iter()
        .rposition(|status| status.container_id.is_some());
    if let (Some(last), Some(init)) = (
        last_started,
        previous.init_container_statuses.as_deref_mut(),
    ) {
        terminate_all(&mut init[..=last]);
    }
    let state = PodState {
        finished: true,
        failure: failure.cloned(),
        pod_ips: previous
            .pod_ips
            .iter()
            .flatten()
            .map(|ip| ip.ip.clone())
            .collect(),
        init_containers: previous.init_container_statuses.clone().unwrap_or_default(),
        containers: previous.container_statuses.clone().unwrap_or_default(),
        ephemeral_containers: previous
            .ephemeral_container_statuses
            .as_deref()
            .map(terminate_running)
            .unwrap_or_default(),
        ..Default::default()
    };
    pod_status(
        &StatusInputs {
            state: Some(&state),
            previous: &previous,
            terminating: true,
            ..*inputs
        },
        now,
    )
}

/// The status of a pod that this node does not admit, as in upstream.
pub(crate) fn rejected_status(pod: &Pod, problem: &Problem, now: Timestamp) -> PodStatus {
    PodStatus {
        phase: Some(PodPhase::Failed.as_str().to_owned()),
        reason: Some(problem.reason.clone()),
        message: Some(format!("Pod was rejected: {}", problem.message)),
        start_time: Some(Time(now)),
        observed_generation: pod.metadata.generation,
        ..Default::default()
    }
}

/// A strategic merge patch that sets `status` and keeps the conditions of other components.
pub(crate) fn status_patch(uid: &str, status: &PodStatus) -> Value {
    let mut status = json!(status);
    // The API server merges these lists by key; stale addresses must be removed.
    for list in ["podIPs", "hostIPs"] {
        if let Some(Value::Array(items)) = status.get_mut(list) {
            items.insert(0, json!({ "$patch": "replace" }));
        }
    }
    // Conditions are merged field by field; stale reasons and messages must be removed.
    for condition in status["conditions"].as_array_mut().into_iter().flatten() {
        for field in ["reason", "message"] {
            if condition.get(field).is_none() {
                condition[field] = Value::Null;
            }
        }
    }
    // Resize conditions are deleted as a whole.
    let conditions = status["conditions"].as_array_mut().into_iter();
    for conditions in conditions {
        for type_ in [RESIZE_PENDING, RESIZE_IN_PROGRESS] {
            if !conditions.iter().any(|have| have["type"] == type_) {
                conditions.push(json!({ "$patch": "delete", "type": type_ }));
            }
        }
    }
    // The uid is a precondition: a new pod of the same name must not get this status.
    json!({ "metadata": { "uid": uid }, "status": status })
}

/// `PodResizePending` or `PodResizeInProgress`, if the pod's resources are to change.
fn resize_condition(
    pod: &Pod,
    pending: Option<&Problem>,
    statuses: [&[ContainerStatus]; 2],
) -> Option<PodCondition> {
    let condition = |type_: &str, problem: Option<&Problem>| PodCondition {
        type_: type_.to_owned(),
        status: "True".to_owned(),
        reason: problem.map(|problem| problem.reason.clone()),
        message: problem.map(|problem| problem.message.clone()),
        observed_generation: pod.metadata.generation,
        ..Default::default()
    };
    if pending.is_some() {
        return Some(condition(RESIZE_PENDING, pending));
    }
    // The sandbox reports the resources that a running container has.
    let spec = pod.spec.as_ref()?;
    let mut containers = init_containers(spec).iter().chain(&spec.containers);
    let differs = containers.any(|container| {
        let mut statuses = statuses.into_iter().flatten();
        let status = statuses.find(|status| status.name == container.name && is_running(status));
        let actual = status.and_then(|status| status.resources.as_ref());
        actual.is_some_and(|actual| *actual != container.resources.clone().unwrap_or_default())
    });
    differs.then(|| condition(RESIZE_IN_PROGRESS, None))
}

fn is_running(status: &ContainerStatus) -> bool {
    let state = status.state.as_ref();
    state.is_some_and(|state| state.running.is_some())
}

/// `DisruptionTarget`, if the node caused the failure. A pod that exceeds its own limits does not get it.
fn disruption_target(pod: &Pod, failure: &PodFailure) -> Option<PodCondition> {
    failure.cause.is_disruption().then(|| PodCondition {
        type_: "DisruptionTarget".to_owned(),
        status: "True".to_owned(),
        reason: Some("TerminationByKubelet".to_owned()),
        message: Some(failure.message.clone()),
        observed_generation: pod.metadata.generation,
        ..Default::default()
    })
}

/// The addresses of the machine on which the pod's sandbox runs.
fn host_ips(inputs: &StatusInputs) -> Vec<String> {
    let reported = inputs.state.map(|state| &state.host.host_ips);
    match reported.filter(|ips| !ips.is_empty()) {
        Some(ips) => ips.iter().map(ToString::to_string).collect(),
        None => {
            let before = inputs.previous.host_ips.iter().flatten();
            before.map(|host| host.ip.clone()).collect()
        }
    }
}

fn pod_ips(inputs: &StatusInputs, host_ips: &[String]) -> Vec<String> {
    let reported = inputs.state.map(|state| state.pod_ips.clone());
    match reported {
        Some(ips) if !ips.is_empty() => ips,
        _ if uses_host_network(inputs.pod) => host_ips.to_vec(),
        _ => {
            let before = inputs.previous.pod_ips.iter().flatten();
            before.map(|ip| ip.ip.clone()).collect()
        }
    }
}

fn non_empty<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}
