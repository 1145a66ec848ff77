//! The conditions of a pod that the kubelet sets, with upstream's reasons and messages.

use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodCondition, PodSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use pod_protocol::restart::{is_sidecar, may_restart_all};

use super::phase::{any_started, find_status, is_restarting_all};
use crate::pods::spec::{PodPhase, init_containers};

/// A condition's value: `Ok` is "True", with a reason; `Err` is "False", with reason and message.
type ConditionResult = Result<Option<&'static str>, (&'static str, String)>;

const TRUE: ConditionResult = Ok(None);

/// The facts that determine the conditions.
pub(super) struct ConditionInputs<'a> {
    pub pod: &'a Pod,
    pub spec: &'a PodSpec,
    pub phase: PodPhase,
    pub init: &'a [ContainerStatus],
    pub regular: &'a [ContainerStatus],
    pub sandbox_ready: bool,
}

/// The kubelet's conditions, in upstream's order. A condition whose status is the same in `previous` keeps its transition time.
pub(super) fn conditions(
    inputs: &ConditionInputs,
    previous: &[PodCondition],
    now: Timestamp,
) -> Vec<PodCondition> {
    let containers_ready = containers_ready(inputs);
    let results = [
        ("PodReadyToStartContainers", sandbox_ready(inputs)),
        ("Initialized", initialized(inputs)),
        ("Ready", ready(inputs, &containers_ready)),
        ("ContainersReady", containers_ready),
        // The scheduler sets it too, unless the pod was bound without it.
        ("PodScheduled", TRUE),
    ];
    results
        .into_iter()
        .map(|(type_, result)| match result {
            Ok(reason) => (type_, "True", reason, None),
            Err((reason, message)) => (type_, "False", Some(reason), Some(message)),
        })
        .chain(all_containers_restarting(inputs))
        .map(|(type_, status, reason, message)| {
            let condition = PodCondition {
                type_: type_.to_owned(),
                status: status.to_owned(),
                reason: reason.map(str::to_owned),
                message: message.filter(|message| !message.is_empty()),
                observed_generation: inputs.pod.metadata.generation,
                ..Default::default()
            };
            with_transition_time(condition, previous, now)
        })
        .collect()
}

/// Sets the transition time: the previous one if the status is the same, else now.
pub(super) fn with_transition_time(
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

/// `AllContainersRestarting`, only for pods with such a rule: type, status, reason and message.
fn all_containers_restarting(
    inputs: &ConditionInputs,
) -> Option<(
    &'static str,
    &'static str,
    Option<&'static str>,
    Option<String>,
)> {
    let spec = inputs.spec;
    let mut containers = init_containers(spec).iter().chain(&spec.containers);
    if !containers.any(may_restart_all) {
        return None;
    }
    let (status, reason, message) = match inputs.phase {
        PodPhase::Succeeded => ("False", Some("PodCompleted"), None),
        PodPhase::Failed => ("False", Some("PodFailed"), None),
        _ if is_restarting_all(spec, inputs.init, inputs.regular) => (
            "True",
            Some("RestartAllContainersStarted"),
            Some("container exited with restart policy rule".to_owned()),
        ),
        _ => ("False", None, None),
    };
    Some(("AllContainersRestarting", status, reason, message))
}

fn sandbox_ready(inputs: &ConditionInputs) -> ConditionResult {
    if inputs.sandbox_ready {
        TRUE
    } else {
        Err(("PodSandboxNotReady", String::new()))
    }
}

fn initialized(inputs: &ConditionInputs) -> ConditionResult {
    let (mut unknown, mut incomplete) = (vec![], vec![]);
    for container in init_containers(inputs.spec) {
        match find_status(inputs.init, &container.name) {
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
    if inputs.phase == PodPhase::Succeeded && unknown.is_empty() {
        return Ok(Some("PodCompleted"));
    }
    // A sidecar that restarts later does not change it.
    if any_started(&inputs.spec.containers, inputs.regular) {
        return TRUE;
    }
    match name_list(&[("unknown", &unknown), ("incomplete", &incomplete)]) {
        message if message.is_empty() => TRUE,
        message => Err(("ContainersNotInitialized", message)),
    }
}

fn containers_ready(inputs: &ConditionInputs) -> ConditionResult {
    let (mut unknown, mut unready) = (vec![], vec![]);
    let sidecars = init_containers(inputs.spec)
        .iter()
        .filter(|container| is_sidecar(container))
        .map(|container| (container, inputs.init));
    let regular = inputs
        .spec
        .containers
        .iter()
        .map(|container| (container, inputs.regular));
    for (container, statuses) in sidecars.chain(regular) {
        match find_status(statuses, &container.name) {
            None => unknown.push(container.name.as_str()),
            Some(status) if !status.ready => unready.push(container.name.as_str()),
            Some(_) => {}
        }
    }
    match inputs.phase {
        PodPhase::Succeeded if unknown.is_empty() => return Err(("PodCompleted", String::new())),
        PodPhase::Failed => return Err(("PodFailed", String::new())),
        _ => {}
    }
    match name_list(&[("unknown", &unknown), ("unready", &unready)]) {
        message if message.is_empty() => TRUE,
        message => Err(("ContainersNotReady", message)),
    }
}

fn ready(inputs: &ConditionInputs, containers_ready: &ConditionResult) -> ConditionResult {
    if containers_ready.is_err() {
        return containers_ready.clone();
    }
    // Other components set the conditions of readiness gates, so read them from the API server's pod.
    let conditions = inputs
        .pod
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_deref())
        .unwrap_or_default();
    let gates = inputs.spec.readiness_gates.as_deref().unwrap_or_default();
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
fn name_list(groups: &[(&str, &[&str])]) -> String {
    let parts: Vec<_> = groups
        .iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(kind, names)| format!("containers with {kind} status: [{}]", names.join(" ")))
        .collect();
    parts.join(", ")
}
