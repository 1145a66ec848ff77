//! Admission of pods: pure checks, in the order and with the messages of upstream's kubelet.
//!
//! The scheduler has done most of these checks. But a pod may be bound without it, the scheduler may not know the newest pods
//! yet, and some facts are known only to the node.

mod node_affinity;
mod resources;
mod sysctls;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    AppArmorProfile, Container, ContainerPort, Pod, PodSpec, Taint, Toleration,
};
use pod_protocol::restart::is_sidecar;
use pod_protocol::{Problem, QosClass};

pub(crate) use self::resources::{pod_resources, requested};
use super::spec::{init_containers, is_critical, launcher_annotation};
use super::{LAUNCHER_ANNOTATION, LauncherKind};
use crate::{NodeCapacity, Pressures};

/// The state of the node that the checks use.
pub(crate) struct AdmissionContext<'a> {
    /// The Node's name.
    pub node: &'a str,
    /// The Node's labels, as last seen on the API server.
    pub labels: &'a BTreeMap<String, String>,
    /// The Node's taints, likewise.
    pub taints: &'a [Taint],
    pub capacity: &'a NodeCapacity,
    pub pressures: Pressures,
    /// The admitted pods that have not terminated.
    pub others: &'a [&'a Pod],
}

/// Why this node does not admit a pod.
#[derive(Debug)]
pub(crate) struct PodRejection {
    pub reason: RejectionReason,
    pub message: String,
}

/// `status.reason` of a rejected pod. [`UnknownLauncher`](Self::UnknownLauncher) and
/// [`UnsupportedFeature`](Self::UnsupportedFeature) are Coracle's own, all others are upstream's.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RejectionReason {
    AppArmor,
    NodeAffinity,
    NodePorts,
    /// The node has a pressure condition.
    NodePressure,
    NodeShutdown,
    /// The node does not have enough of this resource.
    OutOfResource(String),
    OsFieldMismatch,
    OsLabelMismatch,
    SysctlForbidden,
    TaintToleration,
    UnknownLauncher,
    UnsupportedFeature,
}

impl std::fmt::Display for RejectionReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::AppArmor => "AppArmor",
            Self::NodeAffinity => "NodeAffinity",
            Self::NodePorts => "NodePorts",
            Self::NodePressure => "Evicted",
            Self::NodeShutdown => "NodeShutdown",
            Self::OutOfResource(resource) => return write!(f, "OutOf{resource}"),
            Self::OsFieldMismatch => "PodOSNotSupported",
            Self::OsLabelMismatch => "PodOSSelectorNodeLabelDoesNotMatch",
            Self::SysctlForbidden => "SysctlForbidden",
            Self::TaintToleration => "TaintToleration",
            Self::UnknownLauncher => "UnknownLauncher",
            Self::UnsupportedFeature => "PodFeatureUnsupported",
        })
    }
}

impl PodRejection {
    pub(crate) fn new(reason: RejectionReason, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { reason, message }
    }
}

impl From<PodRejection> for Problem {
    fn from(rejection: PodRejection) -> Self {
        Self {
            reason: rejection.reason.to_string(),
            message: rejection.message,
        }
    }
}

/// Decides whether to admit a pod.
pub(crate) fn admit(pod: &Pod, context: &AdmissionContext) -> Result<(), PodRejection> {
    let Some(spec) = &pod.spec else { return Ok(()) };
    check_pressure(pod, spec, context)?;
    sysctls::check(spec)?;
    check_os(pod, spec)?;
    check_features(spec)?;
    check_launcher_annotation(pod)?;
    check_resources(pod, context)?;
    node_affinity::check(spec, context)?;
    check_host_ports(spec, context)?;
    check_taints(spec, context)
}

/// Checks that the resources that a pod requests are free.
pub(crate) fn check_resources(pod: &Pod, context: &AdmissionContext) -> Result<(), PodRejection> {
    resources::check(pod, context)
}

/// Whether the node matches the pod's node selector and affinity.
pub(crate) fn matches_node_affinity(pod: &Pod, context: &AdmissionContext) -> bool {
    let spec = pod.spec.as_ref();
    spec.is_none_or(|spec| node_affinity::check(spec, context).is_ok())
}

/// A failed predicate of the scheduler.
fn predicate_failed(reason: RejectionReason, why: &str) -> PodRejection {
    let message = format!("Predicate {reason} failed: {why}");
    PodRejection::new(reason, message)
}

/// Under pressure only critical pods are admitted; under memory pressure alone also pods with memory requests.
fn check_pressure(
    pod: &Pod,
    spec: &PodSpec,
    context: &AdmissionContext,
) -> Result<(), PodRejection> {
    let Pressures { memory, disk, pid } = context.pressures;
    if !(memory || disk || pid) || is_critical(pod) {
        return Ok(());
    }
    let only_memory = memory && !disk && !pid;
    if only_memory {
        let taint = Taint {
            key: "node.kubernetes.io/memory-pressure".to_owned(),
            effect: "NoSchedule".to_owned(),
            ..Default::default()
        };
        let mut tolerations = spec.tolerations.iter().flatten();
        if QosClass::of(pod) != Some(QosClass::BestEffort)
            || tolerations.any(|one| tolerates(one, &taint))
        {
            return Ok(());
        }
    }
    let conditions = [
        (disk, "DiskPressure"),
        (memory, "MemoryPressure"),
        (pid, "PIDPressure"),
    ];
    let present: Vec<_> = conditions
        .into_iter()
        .filter_map(|(is_true, condition)| is_true.then_some(condition))
        .collect();
    Err(PodRejection::new(
        RejectionReason::NodePressure,
        format!("The node had condition: [{}]. ", present.join(" ")),
    ))
}

fn check_os(pod: &Pod, spec: &PodSpec) -> Result<(), PodRejection> {
    let label = pod.metadata.labels.as_ref();
    if label
        .and_then(|labels| labels.get("kubernetes.io/os"))
        .is_some_and(|os| os != "linux")
    {
        return Err(PodRejection::new(
            RejectionReason::OsLabelMismatch,
            "Failed to admit pod as the `kubernetes.io/os` label doesn't match node label",
        ));
    }
    if spec.os.as_ref().is_some_and(|os| os.name != "linux") {
        return Err(PodRejection::new(
            RejectionReason::OsFieldMismatch,
            "Failed to admit pod as the OS field doesn't match node OS",
        ));
    }
    Ok(())
}

/// Rejects features that need root, or are not implemented.
fn check_features(spec: &PodSpec) -> Result<(), PodRejection> {
    let context = spec.security_context.as_ref();
    let of_pod = context.and_then(|c| c.app_armor_profile.as_ref());
    let of_containers = containers(spec).filter_map(|container| {
        let context = container.security_context.as_ref()?;
        context.app_armor_profile.as_ref()
    });
    let is_local = |profile: &AppArmorProfile| profile.type_ == "Localhost";
    if of_pod.into_iter().chain(of_containers).any(is_local) {
        return Err(PodRejection::new(
            RejectionReason::AppArmor,
            "Cannot enforce AppArmor: profiles of the host cannot be used without root",
        ));
    }
    let claims = spec.resource_claims.as_deref().unwrap_or_default();
    if !claims.is_empty() {
        return Err(PodRejection::new(
            RejectionReason::UnsupportedFeature,
            "dynamic resource allocation (spec.resourceClaims) is not supported on this node",
        ));
    }
    let devices = containers(spec).any(|container| {
        let devices = container.volume_devices.as_deref();
        !devices.unwrap_or_default().is_empty()
    });
    if devices {
        return Err(PodRejection::new(
            RejectionReason::UnsupportedFeature,
            "block devices (volumeDevices) are not supported on this node: they need root",
        ));
    }
    Ok(())
}

/// Rejects a pod whose launcher annotation has an unknown value.
fn check_launcher_annotation(pod: &Pod) -> Result<(), PodRejection> {
    match launcher_annotation(pod) {
        Some(value) if LauncherKind::parse(value).is_none() => Err(PodRejection::new(
            RejectionReason::UnknownLauncher,
            format!(
                "unknown value {value:?} of annotation {LAUNCHER_ANNOTATION} (hint: use \"fork\" or \"step\")"
            ),
        )),
        _ => Ok(()),
    }
}

fn check_host_ports(spec: &PodSpec, context: &AdmissionContext) -> Result<(), PodRejection> {
    let used: Vec<_> = context
        .others
        .iter()
        .filter_map(|pod| pod.spec.as_ref())
        .flat_map(host_ports)
        .collect();
    let conflict = host_ports(spec).any(|port| used.iter().any(|other| conflicts(&port, other)));
    if conflict {
        return Err(predicate_failed(
            RejectionReason::NodePorts,
            "node(s) didn't have free ports for the requested pod ports",
        ));
    }
    Ok(())
}

/// Protocol, address and number of each host port of a pod.
fn host_ports(spec: &PodSpec) -> impl Iterator<Item = (&str, &str, i32)> {
    let sidecars = init_containers(spec).iter().filter(|c| is_sidecar(c));
    let ports = sidecars
        .chain(&spec.containers)
        .flat_map(|container| container.ports.as_deref().unwrap_or_default());
    ports.filter_map(|port: &ContainerPort| {
        let protocol = port.protocol.as_deref().unwrap_or("TCP");
        let address = port.host_ip.as_deref().unwrap_or_default();
        Some((protocol, address, port.host_port.filter(|&port| port > 0)?))
    })
}

fn conflicts(one: &(&str, &str, i32), other: &(&str, &str, i32)) -> bool {
    let any = |address: &str| matches!(address, "" | "0.0.0.0" | "::");
    one.0 == other.0 && one.2 == other.2 && (one.1 == other.1 || any(one.1) || any(other.1))
}

/// The kubelet only checks taints with the effect NoExecute.
fn check_taints(spec: &PodSpec, context: &AdmissionContext) -> Result<(), PodRejection> {
    let tolerations = spec.tolerations.as_deref().unwrap_or_default();
    let mut taints = context
        .taints
        .iter()
        .filter(|taint| taint.effect == "NoExecute");
    if taints.any(|taint| {
        !tolerations
            .iter()
            .any(|toleration| tolerates(toleration, taint))
    }) {
        return Err(predicate_failed(
            RejectionReason::TaintToleration,
            "node(s) had taints that the pod didn't tolerate",
        ));
    }
    Ok(())
}

fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let effect = toleration.effect.as_deref().unwrap_or_default();
    let key = toleration.key.as_deref().unwrap_or_default();
    let value = |value: &Option<String>| value.clone().unwrap_or_default();
    (effect.is_empty() || effect == taint.effect)
        && (key.is_empty() || key == taint.key)
        && match toleration.operator.as_deref() {
            Some("Exists") => true,
            _ => !key.is_empty() && value(&toleration.value) == value(&taint.value),
        }
}

fn containers(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    init_containers(spec).iter().chain(&spec.containers)
}
