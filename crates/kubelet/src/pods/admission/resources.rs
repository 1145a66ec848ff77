//! Whether what a pod asks for is free.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use sandbox::protocol::Problem;

use super::{Space, problem};
use crate::pods::spec::{init_containers, is_sidecar};
use volumes::quantity::Amount;

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

/// What a pod asks for in all: the most that it needs at any one time.
fn requests(pod: &Pod) -> Amounts {
    let Some(spec) = &pod.spec else {
        return Amounts::new();
    };
    let mut total = of_containers(spec);
    let pod_level = spec.resources.as_ref().and_then(|r| r.requests.as_ref());
    for (name, quantity) in pod_level.into_iter().flatten() {
        total.insert(name.clone(), amount(name, quantity));
    }
    add(&mut total, &amounts(spec.overhead.as_ref()));
    total
}

fn of_containers(spec: &PodSpec) -> Amounts {
    let of = |container: &Container| {
        let resources = container.resources.as_ref();
        amounts(resources.and_then(|resources| resources.requests.as_ref()))
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
