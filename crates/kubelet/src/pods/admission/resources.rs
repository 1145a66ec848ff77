//! Whether what a pod asks for is free.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use pod_protocol::Problem;
use quantity::Amount;

use super::{Space, problem};
use crate::pods::launch::Needs;
use crate::pods::spec::{init_containers, is_sidecar};

/// Amounts by resource, counted as upstream does: CPUs in thousandths, everything else in ones.
type Amounts = BTreeMap<String, i64>;

pub(super) fn fit(pod: &Pod, space: &Space) -> Result<(), Problem> {
    let short = |resource: &str, requested: i64, used: i64, capacity: i64| {
        problem(
            &format!("OutOf{resource}"),
            format!(
                "Node didn't have enough resource: {resource}, requested: {requested}, used: {used}, capacity: {capacity}"
            ),
        )
    };
    let count = i64::try_from(space.others.len()).unwrap_or(i64::MAX);
    let most = i64::from(space.capacity.pods);
    if count + 1 > most {
        return Err(short("pods", 1, count, most));
    }
    let wanted = requests(pod);
    let mut used = Amounts::new();
    for other in space.others {
        add(&mut used, &requests(other));
    }
    for (resource, capacity) in capacity(space) {
        let wanted = wanted.get(&resource).copied().unwrap_or(0);
        let used = used.get(&resource).copied().unwrap_or(0);
        if wanted > 0 && wanted > capacity - used {
            return Err(short(&resource, wanted, used, capacity));
        }
    }
    // What the node has none of is somebody else's to give, as upstream sees it.
    Ok(())
}

/// In upstream's order of complaints.
fn capacity(space: &Space) -> Vec<(String, i64)> {
    let capacity = space.capacity;
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

/// What a pod asks for, for those who give it a share of its own.
pub(crate) fn needs(pod: &Pod) -> Needs {
    let count = |amount: Option<&i64>| amount.map_or(0, |amount| amount.unsigned_abs());
    let requested = requests(pod);
    // Too few CPUs make a pod slow, too little memory ends it: what it may use must be there.
    let allowed = in_all(pod, |resources| {
        let mut allowed = amounts(resources.requests.as_ref());
        allowed.extend(amounts(resources.limits.as_ref()));
        allowed
    });
    let is_extended = |name: &str| name.contains('/') && !name.contains("kubernetes.io/");
    Needs {
        cpu_millis: count(requested.get("cpu")),
        memory_bytes: count(allowed.get("memory")),
        extended: requested
            .iter()
            .filter(|(name, _)| is_extended(name))
            .map(|(name, amount)| (name.clone(), amount.unsigned_abs()))
            .collect(),
    }
}

/// How much of one resource a pod asks for.
pub(crate) fn requested(pod: &Pod, resource: &str) -> u64 {
    let requests = requests(pod);
    requests
        .get(resource)
        .map_or(0, |amount| amount.unsigned_abs())
}

/// What a pod asks for in all: the most that it needs at any one time.
fn requests(pod: &Pod) -> Amounts {
    in_all(pod, |resources| amounts(resources.requests.as_ref()))
}

fn in_all(pod: &Pod, of: impl Fn(&ResourceRequirements) -> Amounts) -> Amounts {
    let Some(spec) = &pod.spec else {
        return Amounts::new();
    };
    let mut total = of_containers(spec, &of);
    if let Some(pod_level) = &spec.resources {
        total.extend(of(pod_level));
    }
    add(&mut total, &amounts(spec.overhead.as_ref()));
    total
}

fn of_containers(spec: &PodSpec, of: impl Fn(&ResourceRequirements) -> Amounts) -> Amounts {
    let of = |container: &Container| {
        let resources = container.resources.as_ref();
        resources.map(&of).unwrap_or_default()
    };
    let mut running = Amounts::new();
    for container in &spec.containers {
        add(&mut running, &of(container));
    }
    // Init containers run one after the other, beside the sidecars that were started before them.
    let (mut sidecars, mut starting) = (Amounts::new(), Amounts::new());
    for container in init_containers(spec) {
        let mut at_once = of(container);
        if is_sidecar(container) {
            add(&mut sidecars, &at_once);
            at_once = sidecars.clone();
        } else {
            add(&mut at_once, &sidecars);
        }
        greatest(&mut starting, &at_once);
    }
    add(&mut running, &sidecars);
    greatest(&mut running, &starting);
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

fn greatest(total: &mut Amounts, other: &Amounts) {
    for (name, &amount) in other {
        let have = total.entry(name.clone()).or_default();
        *have = (*have).max(amount);
    }
}
