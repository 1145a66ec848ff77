//! The resources that a pod requests, and whether they are free.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use pod_protocol::restart::is_sidecar;
use quantity::Amount;

use super::{AdmissionContext, PodRejection, RejectionReason};
use crate::pods::PodResources;
use crate::pods::spec::init_containers;

/// Amounts by resource: CPUs in thousandths, all others in units, as in upstream.
type Amounts = BTreeMap<String, i64>;

pub(super) fn check(pod: &Pod, context: &AdmissionContext) -> Result<(), PodRejection> {
    let insufficient = |resource: &str, requested: i64, used: i64, capacity: i64| {
        PodRejection::new(
            RejectionReason::OutOfResource(resource.to_owned()),
            format!(
                "Node didn't have enough resource: {resource}, requested: {requested}, used: {used}, capacity: {capacity}"
            ),
        )
    };
    let count = i64::try_from(context.others.len()).unwrap_or(i64::MAX);
    let max = i64::from(context.capacity.pods);
    if count + 1 > max {
        return Err(insufficient("pods", 1, count, max));
    }
    let requested = requests(pod);
    let mut used = Amounts::new();
    for other in context.others {
        add(&mut used, &requests(other));
    }
    for (resource, capacity) in capacity(context) {
        let requested = requested.get(&resource).copied().unwrap_or(0);
        let used = used.get(&resource).copied().unwrap_or(0);
        if requested > 0 && requested > capacity - used {
            return Err(insufficient(&resource, requested, used, capacity));
        }
    }
    // As in upstream, resources that the node does not have are ignored.
    Ok(())
}

/// The node's resources, in the order in which upstream checks them.
fn capacity(context: &AdmissionContext) -> Vec<(String, i64)> {
    let capacity = context.capacity;
    let basic = [
        ("cpu", u64::from(capacity.cpus) * 1000),
        ("memory", capacity.memory_bytes),
        ("ephemeral-storage", capacity.ephemeral_storage_bytes),
    ];
    let basic = basic.map(|(name, amount)| (name.to_owned(), amount));
    let extended = capacity.extended.iter().map(|(name, &n)| (name.clone(), n));
    basic
        .into_iter()
        .chain(extended)
        .map(|(name, amount)| (name, i64::try_from(amount).unwrap_or(i64::MAX)))
        .collect()
}

/// The resources that a launcher allocates to a pod.
pub(crate) fn pod_resources(pod: &Pod) -> PodResources {
    let count = |amount: Option<&i64>| amount.map_or(0, |amount| amount.unsigned_abs());
    let requested = requests(pod);
    // The memory limit, not the request: too few CPUs make a pod slow, but too little memory kills it.
    let allowed = total(pod, |resources| {
        let mut allowed = amounts(resources.requests.as_ref());
        allowed.extend(amounts(resources.limits.as_ref()));
        allowed
    });
    let is_extended = |name: &str| name.contains('/') && !name.contains("kubernetes.io/");
    PodResources {
        cpu_millis: count(requested.get("cpu")),
        memory_bytes: count(allowed.get("memory")),
        extended: requested
            .iter()
            .filter(|(name, _)| is_extended(name))
            .map(|(name, amount)| (name.clone(), amount.unsigned_abs()))
            .collect(),
    }
}

/// The amount of one resource that a pod requests.
pub(crate) fn requested(pod: &Pod, resource: &str) -> u64 {
    let requests = requests(pod);
    requests
        .get(resource)
        .map_or(0, |amount| amount.unsigned_abs())
}

/// The pod's requests: the largest amounts that it needs at any one time.
fn requests(pod: &Pod) -> Amounts {
    total(pod, |resources| amounts(resources.requests.as_ref()))
}

fn total(pod: &Pod, of: impl Fn(&ResourceRequirements) -> Amounts) -> Amounts {
    let Some(spec) = &pod.spec else {
        return Amounts::new();
    };
    let mut sum = total_of_containers(spec, &of);
    if let Some(pod_level) = &spec.resources {
        sum.extend(of(pod_level));
    }
    add(&mut sum, &amounts(spec.overhead.as_ref()));
    sum
}

fn total_of_containers(spec: &PodSpec, of: impl Fn(&ResourceRequirements) -> Amounts) -> Amounts {
    let of = |container: &Container| {
        let resources = container.resources.as_ref();
        resources.map(&of).unwrap_or_default()
    };
    let mut running = Amounts::new();
    for container in &spec.containers {
        add(&mut running, &of(container));
    }
    // Init containers run one after the other, together with the sidecars before them.
    let (mut sidecars, mut starting) = (Amounts::new(), Amounts::new());
    for container in init_containers(spec) {
        let mut concurrent = of(container);
        if is_sidecar(container) {
            add(&mut sidecars, &concurrent);
            concurrent = sidecars.clone();
        } else {
            add(&mut concurrent, &sidecars);
        }
        maximize(&mut starting, &concurrent);
    }
    add(&mut running, &sidecars);
    maximize(&mut running, &starting);
    running
}

fn amounts(list: Option<&BTreeMap<String, Quantity>>) -> Amounts {
    list.into_iter()
        .flatten()
        .map(|(name, quantity)| (name.clone(), amount(name, quantity)))
        .collect()
}

fn amount(name: &str, quantity: &Quantity) -> i64 {
    let amount = Amount::of(quantity).unwrap_or_default();
    if name == "cpu" {
        amount.milli_value()
    } else {
        amount.value()
    }
}

fn add(total: &mut Amounts, more: &Amounts) {
    for (name, amount) in more {
        let have = total.entry(name.clone()).or_default();
        *have = have.saturating_add(*amount);
    }
}

fn maximize(total: &mut Amounts, other: &Amounts) {
    for (name, &amount) in other {
        let have = total.entry(name.clone()).or_default();
        *have = (*have).max(amount);
    }
}
