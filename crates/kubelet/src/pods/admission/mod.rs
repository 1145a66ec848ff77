//! Whether this node can take a pod: pure, in the order and the words of upstream's kubelet.
//!
//! The scheduler has asked most of this before, but a pod may be bound by hand, the scheduler may not have heard of the
//! last pod yet, and some things only the node knows.

mod affinity;
mod resources;
mod sysctls;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    AppArmorProfile, Container, ContainerPort, Pod, PodSpec, Taint, Toleration,
};
use pod_protocol::Problem;

pub(crate) use self::resources::{needs, requested};
use super::launch::{LAUNCHER_ANNOTATION, Way};
use super::spec::{init_containers, is_critical, is_sidecar, launcher};
use crate::{Capacity, Pressures};

/// What a pod is judged by.
pub(crate) struct Space<'a> {
    /// The Node's name.
    pub node: &'a str,
    /// The Node's labels, as the API server last showed them.
    pub labels: &'a BTreeMap<String, String>,
    /// The Node's taints, likewise.
    pub taints: &'a [Taint],
    /// What there is.
    pub capacity: &'a Capacity,
    /// What the machine is short of.
    pub pressures: Pressures,
    /// Who uses it: the pods that were admitted and are not over.
    pub others: &'a [&'a Pod],
}

/// Takes a pod, or says why not.
pub(crate) fn admit(pod: &Pod, space: &Space) -> Result<(), Problem> {
    let Some(spec) = &pod.spec else { return Ok(()) };
    machine_has_room(pod, spec, space)?;
    sysctls::allowed(spec)?;
    system(pod, spec)?;
    features(spec)?;
    launcher_is_known(pod)?;
    resources::fit(pod, space)?;
    affinity::matches(spec, space)?;
    ports_are_free(spec, space)?;
    taints_are_tolerated(spec, space)
}

/// Whether what a pod asks for is free.
pub(crate) fn has_room(pod: &Pod, space: &Space) -> Result<(), Problem> {
    resources::fit(pod, space)
}

/// Whether the node is one that the pod asks for.
pub(crate) fn selects(pod: &Pod, space: &Space) -> bool {
    let spec = pod.spec.as_ref();
    spec.is_none_or(|spec| affinity::matches(spec, space).is_ok())
}

/// The reason of a pod that is refused for its node selector or affinity alone: the labels may be newer than we know.
pub(crate) const NODE_AFFINITY: &str = "NodeAffinity";

/// One of the scheduler's predicates fails.
fn predicate(name: &str, why: &str) -> Problem {
    problem(name, format!("Predicate {name} failed: {why}"))
}

fn problem(reason: &str, message: impl Into<String>) -> Problem {
    Problem {
        reason: reason.to_owned(),
        message: message.into(),
    }
}

/// A machine that is short takes no more; while only its memory is, pods that say how much they need are welcome.
fn machine_has_room(pod: &Pod, spec: &PodSpec, space: &Space) -> Result<(), Problem> {
    let Pressures { memory, disk, pid } = space.pressures;
    let conditions = [
        (disk, "DiskPressure"),
        (memory, "MemoryPressure"),
        (pid, "PIDPressure"),
    ];
    let short: Vec<_> = conditions
        .into_iter()
        .filter_map(|(short, condition)| short.then_some(condition))
        .collect();
    if short.is_empty() || is_critical(pod) {
        return Ok(());
    }
    if short == ["MemoryPressure"] {
        let status = pod.status.as_ref();
        let class = status.and_then(|status| status.qos_class.as_deref());
        let taint = Taint {
            key: "node.kubernetes.io/memory-pressure".to_owned(),
            effect: "NoSchedule".to_owned(),
            ..Default::default()
        };
        let mut tolerations = spec.tolerations.iter().flatten();
        if class != Some("BestEffort") || tolerations.any(|own| tolerates(own, &taint)) {
            return Ok(());
        }
    }
    Err(problem(
        "Evicted",
        format!("The node had condition: [{}]. ", short.join(" ")),
    ))
}

fn system(pod: &Pod, spec: &PodSpec) -> Result<(), Problem> {
    let label = pod.metadata.labels.as_ref();
    if label
        .and_then(|labels| labels.get("kubernetes.io/os"))
        .is_some_and(|os| os != "linux")
    {
        return Err(problem(
            "PodOSSelectorNodeLabelDoesNotMatch",
            "Failed to admit pod as the `kubernetes.io/os` label doesn't match node label",
        ));
    }
    if spec.os.as_ref().is_some_and(|os| os.name != "linux") {
        return Err(problem(
            "PodOSNotSupported",
            "Failed to admit pod as the OS field doesn't match node OS",
        ));
    }
    Ok(())
}

/// What a pod may ask for that can't be had without root, or isn't there.
fn features(spec: &PodSpec) -> Result<(), Problem> {
    let context = spec.security_context.as_ref();
    let of_pod = context.and_then(|c| c.app_armor_profile.as_ref());
    let of_containers = containers(spec).filter_map(|container| {
        let context = container.security_context.as_ref()?;
        context.app_armor_profile.as_ref()
    });
    let is_local = |profile: &AppArmorProfile| profile.type_ == "Localhost";
    if of_pod.into_iter().chain(of_containers).any(is_local) {
        return Err(problem(
            "AppArmor",
            "Cannot enforce AppArmor: profiles of the host can't be used without root",
        ));
    }
    let claims = spec.resource_claims.as_deref().unwrap_or_default();
    if !claims.is_empty() {
        return Err(problem(
            "PodFeatureUnsupported",
            "dynamic resource allocation (spec.resourceClaims) is not supported on this node",
        ));
    }
    let devices = containers(spec).any(|container| {
        let devices = container.volume_devices.as_deref();
        !devices.unwrap_or_default().is_empty()
    });
    if devices {
        return Err(problem(
            "PodFeatureUnsupported",
            "block devices (volumeDevices) can't be had without root",
        ));
    }
    Ok(())
}

/// A pod that wants to be started in a way that there isn't would not run as it expects.
fn launcher_is_known(pod: &Pod) -> Result<(), Problem> {
    match launcher(pod) {
        Some(value) if Way::named(value).is_none() => Err(problem(
            "UnknownLauncher",
            format!(
                "the annotation {LAUNCHER_ANNOTATION} is {value:?}; this node knows \"fork\" and \"step\""
            ),
        )),
        _ => Ok(()),
    }
}

fn ports_are_free(spec: &PodSpec, space: &Space) -> Result<(), Problem> {
    let taken: Vec<_> = space
        .others
        .iter()
        .filter_map(|pod| pod.spec.as_ref())
        .flat_map(host_ports)
        .collect();
    let clash = host_ports(spec).any(|wanted| taken.iter().any(|have| collide(&wanted, have)));
    if clash {
        let why = "node(s) didn't have free ports for the requested pod ports";
        return Err(predicate("NodePorts", why));
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

fn collide(one: &(&str, &str, i32), other: &(&str, &str, i32)) -> bool {
    let any = |address: &str| matches!(address, "" | "0.0.0.0" | "::");
    one.0 == other.0 && one.2 == other.2 && (one.1 == other.1 || any(one.1) || any(other.1))
}

/// Only NoExecute is the kubelet's business.
fn taints_are_tolerated(spec: &PodSpec, space: &Space) -> Result<(), Problem> {
    let tolerations = spec.tolerations.as_deref().unwrap_or_default();
    let mut taints = space
        .taints
        .iter()
        .filter(|taint| taint.effect == "NoExecute");
    if taints.any(|taint| {
        !tolerations
            .iter()
            .any(|toleration| tolerates(toleration, taint))
    }) {
        let why = "node(s) had taints that the pod didn't tolerate";
        return Err(predicate("TaintToleration", why));
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
