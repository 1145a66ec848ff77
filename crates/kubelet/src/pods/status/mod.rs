//! The status of a pod: pure functions from what is known to what the API server is told.
//!
//! The sandbox says how its containers are; all that is said of the pod as a whole (phase, conditions, addresses) is
//! concluded here, by the rules of upstream's kubelet. A status never goes backwards: a final phase stays, restarts
//! only grow, a container that has ended for good doesn't run again.

mod conditions;
mod containers;
mod phase;
#[cfg(test)]
mod tests;

use std::net::IpAddr;

use k8s_openapi::api::core::v1::{ContainerStatus, HostIP, Pod, PodCondition, PodIP, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use pod_protocol::{PodState, Problem};
use serde_json::{Value, json};

pub(crate) use containers::{lost, recall};

use self::conditions::{Evidence, conditions, since};
use self::containers::{Kind, as_containers, ended, merged, shortened};
use super::eviction::NODE_LOW;
use super::spec::{init_containers, is_final, uses_host_network};

const RESIZE_PENDING: &str = "PodResizePending";
const RESIZE_IN_PROGRESS: &str = "PodResizeInProgress";

/// What a pod's status is concluded from.
pub(crate) struct Known<'a> {
    /// The pod, as the API server last showed it.
    pub pod: &'a Pod,
    /// What its sandbox last said; `None` before it has spoken.
    pub state: Option<&'a PodState>,
    /// The status that was concluded last; at first, the API server's.
    pub previous: &'a PodStatus,
    /// None of its containers will be started again: it is to be deleted, or was stopped.
    pub ending: bool,
    /// The node's addresses, the preferred one first.
    pub host_ips: &'a [IpAddr],
    /// Why it can't have the resources that it wants.
    pub resize: Option<&'a Problem>,
}

/// What the API server should be told of a pod.
pub(crate) fn pod_status(known: &Known, now: Timestamp) -> PodStatus {
    let Known {
        pod,
        state,
        previous,
        ..
    } = *known;
    let default_spec = Default::default();
    let spec = pod.spec.as_ref().unwrap_or(&default_spec);

    let init = merged(
        spec,
        Kind::Init,
        init_containers(spec),
        state.map(|state| &state.init_containers[..]),
        previous
            .init_container_statuses
            .as_deref()
            .unwrap_or_default(),
    );
    let regular = merged(
        spec,
        Kind::Regular,
        &spec.containers,
        state.map(|state| &state.containers[..]),
        previous.container_statuses.as_deref().unwrap_or_default(),
    );
    let ephemeral = merged(
        spec,
        Kind::Ephemeral,
        &as_containers(spec.ephemeral_containers.as_deref().unwrap_or_default()),
        state.map(|state| &state.ephemeral_containers[..]),
        previous
            .ephemeral_container_statuses
            .as_deref()
            .unwrap_or_default(),
    );

    let [init, regular, ephemeral] = shortened([init, regular, ephemeral]);

    let finished = state.is_some_and(|state| state.finished);
    let failure = state.and_then(|state| state.failure.as_ref());
    let said_phase = previous.phase.as_deref().unwrap_or("Pending");
    let phase = match phase::phase(spec, &init, &regular, known.ending || finished) {
        _ if is_final(said_phase) => said_phase,
        // A pod is over only when nothing of it runs any more: others count on what it held being free then.
        over if is_final(over) && !finished => said_phase,
        "Succeeded" if failure.is_none() => "Succeeded",
        _ if finished => "Failed",
        other => other,
    };
    // Why a pod is over is said together with the fact.
    let (reason, message) = match failure {
        Some(problem) if is_final(phase) && !is_final(said_phase) => {
            (Some(problem.reason.clone()), Some(problem.message.clone()))
        }
        _ if phase == said_phase => (previous.reason.clone(), previous.message.clone()),
        _ => (None, None),
    };

    let before = previous.conditions.as_deref().unwrap_or_default();
    let mut conditions = conditions(
        &Evidence {
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
    if !is_final(phase) {
        let resizing = resizing(pod, known.resize, [&init, &regular]);
        conditions.extend(resizing.map(|condition| since(condition, before, now)));
    }
    if is_final(phase) {
        conditions.extend(
            failure
                .and_then(|problem| disruption(pod, problem))
                .map(|condition| since(condition, before, now)),
        );
    }

    let pod_ips = pod_ips(known);
    PodStatus {
        phase: Some(phase.to_owned()),
        reason,
        message,
        start_time: previous.start_time.clone().or(Some(Time(now))),
        host_ip: known.host_ips.first().map(ToString::to_string),
        host_ips: Some(
            known
                .host_ips
                .iter()
                .map(|ip| HostIP { ip: ip.to_string() })
                .collect(),
        ),
        pod_ip: pod_ips.first().cloned(),
        pod_ips: Some(pod_ips.into_iter().map(|ip| PodIP { ip }).collect()),
        qos_class: pod.status.as_ref().and_then(|s| s.qos_class.clone()),
        observed_generation: pod.metadata.generation.max(previous.observed_generation),
        conditions: Some(conditions),
        init_container_statuses: some(init),
        container_statuses: some(regular),
        ephemeral_container_statuses: some(ephemeral),
        ..Default::default()
    }
}

/// Whether a pod whose sandbox was lost goes on, by its containers' policies.
pub(crate) fn survives(pod: &Pod, status: &PodStatus) -> bool {
    let left = |statuses: &Option<Vec<_>>| statuses.as_deref().map(lost).unwrap_or_default();
    pod.spec.as_ref().is_some_and(|spec| {
        let init = left(&status.init_container_statuses);
        let regular = left(&status.container_statuses);
        !is_final(phase::phase(spec, &init, &regular, false))
    })
}

/// The end of a pod whose sandbox is gone and will not be started again.
pub(crate) fn lost_for_good(known: &Known, failure: Option<&Problem>, now: Timestamp) -> PodStatus {
    let mut previous = known.previous.clone();
    let started = |statuses: &Option<Vec<_>>| {
        statuses
            .iter()
            .flatten()
            .any(|status: &k8s_openapi::api::core::v1::ContainerStatus| {
                status.container_id.is_some() || status.restart_count > 0
            })
    };
    // Once it was initialised, a container of which nothing is known has failed; before, it has never been there.
    if started(&previous.container_statuses) {
        ended(
            previous
                .container_statuses
                .as_deref_mut()
                .unwrap_or_default(),
        );
    }
    let ran = previous
        .init_container_statuses
        .as_deref()
        .unwrap_or_default()
        .iter()
        .rposition(|status| status.container_id.is_some());
    if let (Some(last), Some(init)) = (ran, previous.init_container_statuses.as_deref_mut()) {
        ended(&mut init[..=last]);
    }
    let over = PodState {
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
            .map(lost)
            .unwrap_or_default(),
        ..Default::default()
    };
    pod_status(
        &Known {
            state: Some(&over),
            previous: &previous,
            ending: true,
            ..*known
        },
        now,
    )
}

/// The status of a pod that this node can't admit, as upstream's kubelet sets it.
pub(crate) fn refusal(pod: &Pod, problem: &Problem, now: Timestamp) -> PodStatus {
    PodStatus {
        phase: Some("Failed".to_owned()),
        reason: Some(problem.reason.clone()),
        message: Some(format!("Pod was rejected: {}", problem.message)),
        start_time: Some(Time(now)),
        observed_generation: pod.metadata.generation,
        ..Default::default()
    }
}

/// The body of a request that makes `status` the pod's, leaving what others say in it alone.
pub(crate) fn status_patch(uid: &str, status: &PodStatus) -> Value {
    let mut status = json!(status);
    // Lists that the API server merges by key; an address that is no longer the pod's must go.
    for list in ["podIPs", "hostIPs"] {
        if let Some(Value::Array(items)) = status.get_mut(list) {
            items.insert(0, json!({ "$patch": "replace" }));
        }
    }
    // Conditions are merged field by field; a reason that no longer holds must go.
    for condition in status["conditions"].as_array_mut().into_iter().flatten() {
        for field in ["reason", "message"] {
            if condition.get(field).is_none() {
                condition[field] = Value::Null;
            }
        }
    }
    // And one that holds no longer goes as a whole.
    let conditions = status["conditions"].as_array_mut().into_iter();
    for conditions in conditions {
        for type_ in [RESIZE_PENDING, RESIZE_IN_PROGRESS] {
            if !conditions.iter().any(|have| have["type"] == type_) {
                conditions.push(json!({ "$patch": "delete", "type": type_ }));
            }
        }
    }
    // The uid makes it a precondition: a new pod of the same name is not this pod.
    json!({ "metadata": { "uid": uid }, "status": status })
}

/// The condition of a pod whose resources are to change: it can't be, or is under way.
fn resizing(
    pod: &Pod,
    refused: Option<&Problem>,
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
    if refused.is_some() {
        return Some(condition(RESIZE_PENDING, refused));
    }
    // What a container has is what its sandbox says it has.
    let spec = pod.spec.as_ref()?;
    let mut containers = init_containers(spec).iter().chain(&spec.containers);
    let differs = containers.any(|container| {
        let mut own = statuses.into_iter().flatten();
        let own = own.find(|own| own.name == container.name && is_running(own));
        let has = own.and_then(|own| own.resources.as_ref());
        has.is_some_and(|has| *has != container.resources.clone().unwrap_or_default())
    });
    differs.then(|| condition(RESIZE_IN_PROGRESS, None))
}

fn is_running(status: &ContainerStatus) -> bool {
    let state = status.state.as_ref();
    state.is_some_and(|state| state.running.is_some())
}

/// Pods that the node itself put an end to say so, for those who count disruptions. Who went beyond its own limits has
/// only itself to blame.
fn disruption(pod: &Pod, problem: &Problem) -> Option<PodCondition> {
    let by_node = problem.reason == "Terminated" || problem.message.starts_with(NODE_LOW);
    by_node.then(|| PodCondition {
        type_: "DisruptionTarget".to_owned(),
        status: "True".to_owned(),
        reason: Some("TerminationByKubelet".to_owned()),
        message: Some(problem.message.clone()),
        observed_generation: pod.metadata.generation,
        ..Default::default()
    })
}

fn pod_ips(known: &Known) -> Vec<String> {
    let said = known.state.map(|state| state.pod_ips.clone());
    match said {
        Some(ips) if !ips.is_empty() => ips,
        _ if uses_host_network(known.pod) => {
            known.host_ips.iter().map(ToString::to_string).collect()
        }
        _ => {
            let before = known.previous.pod_ips.iter().flatten();
            before.map(|ip| ip.ip.clone()).collect()
        }
    }
}

fn some<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}
