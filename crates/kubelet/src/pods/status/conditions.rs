//! The conditions of a pod that are the kubelet's to judge, in upstream's words.

use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodCondition, PodSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::phase::{any_started, find, starting_over};
use crate::pods::spec::{init_containers, is_sidecar};

/// What a condition says; `Ok` is "True".
type Judgement = Result<Option<&'static str>, (&'static str, String)>;

const TRUE: Judgement = Ok(None);

/// What conditions are judged by.
pub(super) struct Evidence<'a> {
    pub pod: &'a Pod,
    pub spec: &'a PodSpec,
    pub phase: &'a str,
    pub init: &'a [ContainerStatus],
    pub regular: &'a [ContainerStatus],
    pub sandbox_ready: bool,
}

/// The kubelet's conditions, in upstream's order; `previous` tells since when each has been so.
pub(super) fn conditions(
    evidence: &Evidence,
    previous: &[PodCondition],
    now: Timestamp,
) -> Vec<PodCondition> {
    let containers_ready = containers_ready(evidence);
    let judged = [
        ("PodReadyToStartContainers", sandbox_ready(evidence)),
        ("Initialized", initialized(evidence)),
        ("Ready", ready(evidence, &containers_ready)),
        ("ContainersReady", containers_ready),
        // It is here; the scheduler says so too, unless the pod was bound by hand.
        ("PodScheduled", TRUE),
    ];
    judged
        .into_iter()
        .map(|(type_, judgement)| match judgement {
            Ok(reason) => (type_, "True", reason, None),
            Err((reason, message)) => (type_, "False", Some(reason), Some(message)),
        })
        .chain(all_restarting(evidence))
        .map(|(type_, status, reason, message)| {
            let condition = PodCondition {
                type_: type_.to_owned(),
                status: status.to_owned(),
                reason: reason.map(str::to_owned),
                message: message.filter(|message| !message.is_empty()),
                observed_generation: evidence.pod.metadata.generation,
                ..Default::default()
            };
            since(condition, previous, now)
        })
        .collect()
}

/// Gives a condition the time at which it came to its status.
pub(super) fn since(
    mut condition: PodCondition,
    previous: &[PodCondition],
    now: Timestamp,
) -> PodCondition {
    let before = previous
        .iter()
        .find(|have| have.type_ == condition.type_ && have.status == condition.status);
    condition.last_transition_time = before
        .and_then(|have| have.last_transition_time.clone())
        .or(Some(Time(now)));
    condition
}

/// Only where a rule can make all containers start over: type, status, reason and message.
fn all_restarting(
    evidence: &Evidence,
) -> Option<(
    &'static str,
    &'static str,
    Option<&'static str>,
    Option<String>,
)> {
    let spec = evidence.spec;
    let mut rules = init_containers(spec)
        .iter()
        .chain(&spec.containers)
        .flat_map(|container| container.restart_policy_rules.iter().flatten());
    if !rules.any(|rule| rule.action == "RestartAllContainers") {
        return None;
    }
    let (status, reason, message) = match evidence.phase {
        "Succeeded" => ("False", Some("PodCompleted"), None),
        "Failed" => ("False", Some("PodFailed"), None),
        _ if starting_over(spec, evidence.init, evidence.regular) => (
            "True",
            Some("RestartAllContainersStarted"),
            Some("container exited with restart policy rule".to_owned()),
        ),
        _ => ("False", None, None),
    };
    Some(("AllContainersRestarting", status, reason, message))
}

fn sandbox_ready(evidence: &Evidence) -> Judgement {
    if evidence.sandbox_ready {
        TRUE
    } else {
        Err(("PodSandboxNotReady", String::new()))
    }
}

fn initialized(evidence: &Evidence) -> Judgement {
    let (mut unknown, mut incomplete) = (vec![], vec![]);
    for container in init_containers(evidence.spec) {
        match find(evidence.init, &container.name) {
            None => unknown.push(container.name.as_str()),
            Some(status) => {
                let done = if is_sidecar(container) {
                    status.started == Some(true)
                } else {
                    status.ready
                };
                if !done {
                    incomplete.push(container.name.as_str());
                }
            }
        }
    }
    if evidence.phase == "Succeeded" && unknown.is_empty() {
        return Ok(Some("PodCompleted"));
    }
    // Sidecars that restart later don't undo it.
    if any_started(&evidence.spec.containers, evidence.regular) {
        return TRUE;
    }
    match list(&[("unknown", &unknown), ("incomplete", &incomplete)]) {
        message if message.is_empty() => TRUE,
        message => Err(("ContainersNotInitialized", message)),
    }
}

fn containers_ready(evidence: &Evidence) -> Judgement {
    let (mut unknown, mut unready) = (vec![], vec![]);
    let sidecars = init_containers(evidence.spec)
        .iter()
        .filter(|container| is_sidecar(container))
        .map(|container| (container, evidence.init));
    let regular = evidence
        .spec
        .containers
        .iter()
        .map(|container| (container, evidence.regular));
    for (container, statuses) in sidecars.chain(regular) {
        match find(statuses, &container.name) {
            None => unknown.push(container.name.as_str()),
            Some(status) if !status.ready => unready.push(container.name.as_str()),
            Some(_) => {}
        }
    }
    match evidence.phase {
        "Succeeded" if unknown.is_empty() => return Err(("PodCompleted", String::new())),
        "Failed" => return Err(("PodFailed", String::new())),
        _ => {}
    }
    match list(&[("unknown", &unknown), ("unready", &unready)]) {
        message if message.is_empty() => TRUE,
        message => Err(("ContainersNotReady", message)),
    }
}

fn ready(evidence: &Evidence, containers_ready: &Judgement) -> Judgement {
    if containers_ready.is_err() {
        return containers_ready.clone();
    }
    // The gates' conditions are set by others, so they are in the API server's view of the pod.
    let conditions = evidence
        .pod
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_deref())
        .unwrap_or_default();
    let gates = evidence.spec.readiness_gates.as_deref().unwrap_or_default();
    let closed: Vec<_> = gates
        .iter()
        .filter_map(|gate| {
            let type_ = &gate.condition_type;
            match conditions.iter().find(|have| have.type_ == *type_) {
                None => Some(format!(
                    "corresponding condition of pod readiness gate {type_:?} does not exist."
                )),
                Some(have) if have.status != "True" => Some(format!(
                    "the status of pod readiness gate {type_:?} is not \"True\", but {}",
                    have.status
                )),
                Some(_) => None,
            }
        })
        .collect();
    if closed.is_empty() {
        TRUE
    } else {
        Err(("ReadinessGatesNotReady", closed.join(", ")))
    }
}

/// `containers with unknown status: [a b], containers with unready status: [c]`
fn list(groups: &[(&str, &[&str])]) -> String {
    let parts: Vec<_> = groups
        .iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(kind, names)| format!("containers with {kind} status: [{}]", names.join(" ")))
        .collect();
    parts.join(", ")
}
