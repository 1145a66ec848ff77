//! What a pod and its containers may use, as their spec says it. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, PodSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use linux::cgroup::{Limits, weight_of_shares};
use quantity::Amount;

/// One processor, in the measure of which weights are made.
const SHARES_PER_CPU: u64 = 1024;

/// A container's own limits. As upstream: nothing of it is swapped out, and its processes are killed together.
pub fn of_container(container: &Container) -> Limits {
    let own = Amounts::of(container.resources.as_ref());
    Limits {
        memory: own.memory_limit,
        cpu: own.cpu_limit,
        weight: Some(weight(own.cpu_request.or(own.cpu_limit))),
        processes: None,
        no_swap: true,
        killed_together: true,
    }
}

/// The pod's: what its spec says of the pod as a whole, else what its containers may use together if every one has a limit.
pub fn of_pod(spec: &PodSpec) -> Limits {
    let pod = Amounts::of(spec.resources.as_ref());
    let overhead = spec.overhead.as_ref();
    let more = |read: fn(Option<&Quantity>) -> Option<u64>, name: &str| {
        read(overhead.and_then(|overhead| overhead.get(name))).unwrap_or(0)
    };
    let (more_cpu, more_memory) = (more(milli, "cpu"), more(whole, "memory"));
    // Without a limit on one of them there is none on all.
    let limit = |of: fn(&Amounts) -> Option<u64>| {
        let all =
            every(spec).all(|container| of(&Amounts::of(container.resources.as_ref())).is_some());
        let amount = |container: &Container| of(&Amounts::of(container.resources.as_ref()));
        of(&pod).or_else(|| all.then(|| together(spec, amount)))
    };
    let request = pod.cpu_request.unwrap_or_else(|| {
        together(spec, |container| {
            let own = Amounts::of(container.resources.as_ref());
            own.cpu_request.or(own.cpu_limit)
        })
    });
    Limits {
        memory: limit(|amounts| amounts.memory_limit)
            .map(|bytes| bytes.saturating_add(more_memory)),
        cpu: limit(|amounts| amounts.cpu_limit).map(|milli| milli.saturating_add(more_cpu)),
        weight: Some(weight(Some(request.saturating_add(more_cpu)))),
        ..Limits::default()
    }
}

/// Of a container, or of the pod as a whole.
struct Amounts {
    cpu_request: Option<u64>,
    cpu_limit: Option<u64>,
    memory_limit: Option<u64>,
}

impl Amounts {
    fn of(resources: Option<&ResourceRequirements>) -> Self {
        type List = Option<BTreeMap<String, Quantity>>;
        let get = |list: fn(&ResourceRequirements) -> &List, name: &str| {
            resources.and_then(|resources| list(resources).as_ref()?.get(name))
        };
        Self {
            cpu_request: milli(get(|resources| &resources.requests, "cpu")),
            cpu_limit: milli(get(|resources| &resources.limits, "cpu")),
            memory_limit: whole(get(|resources| &resources.limits, "memory")),
        }
    }
}

/// What containers use at once: those that stay, or an init container and the sidecars before it, whichever is more.
pub fn together(spec: &PodSpec, of: impl Fn(&Container) -> Option<u64>) -> u64 {
    let amount = |container: &Container| of(container).unwrap_or(0);
    let (mut sidecars, mut most_at_first) = (0_u64, 0_u64);
    for container in spec.init_containers.iter().flatten() {
        let own = amount(container);
        if container.restart_policy.as_deref() == Some("Always") {
            sidecars = sidecars.saturating_add(own);
            most_at_first = most_at_first.max(sidecars);
        } else {
            most_at_first = most_at_first.max(sidecars.saturating_add(own));
        }
    }
    let staying = spec.containers.iter().map(amount);
    staying
        .fold(sidecars, u64::saturating_add)
        .max(most_at_first)
}

fn every(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    spec.init_containers
        .iter()
        .flatten()
        .chain(&spec.containers)
}

/// Whole units, such as bytes. Nothing, zero and what is no quantity are no limit.
fn whole(quantity: Option<&Quantity>) -> Option<u64> {
    positive(Amount::of(quantity?)?.value())
}

/// Thousandths, likewise.
fn milli(quantity: Option<&Quantity>) -> Option<u64> {
    positive(Amount::of(quantity?)?.milli_value())
}

fn positive(number: i64) -> Option<u64> {
    u64::try_from(number).ok().filter(|&number| number > 0)
}

/// The weight of a request in thousandths of a processor.
fn weight(request: Option<u64>) -> u64 {
    weight_of_shares(request.unwrap_or(0).saturating_mul(SHARES_PER_CPU) / 1000)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn spec(value: serde_json::Value) -> PodSpec {
        serde_json::from_value(value).unwrap()
    }

    fn limits(cpu: &str, memory: &str) -> serde_json::Value {
        json!({"limits": {"cpu": cpu, "memory": memory}})
    }

    #[test]
    fn what_is_no_limit() {
        let of = |text: &str| {
            let quantity = Quantity(text.to_owned());
            (milli(Some(&quantity)), whole(Some(&quantity)))
        };
        assert_eq!(of("250m"), (Some(250), Some(1)));
        assert_eq!(of("64Mi"), (Some((64 << 20) * 1000), Some(64 << 20)));
        for none in ["0", "", "-1", "x", "1.2.3"] {
            assert_eq!(of(none), (None, None), "{none}");
        }
        assert_eq!(milli(None), None);
    }

    #[test]
    fn of_one_container() {
        let of = |resources| {
            let one = spec(json!({"containers": [{"name": "a", "resources": resources}]}));
            let limits = of_container(&one.containers[0]);
            (limits.memory, limits.cpu, limits.weight)
        };
        assert_eq!(of(json!({})), (None, None, Some(1)));
        assert_eq!(
            of(limits("500m", "64Mi")),
            (Some(64 << 20), Some(500), Some(59))
        );
        let both = json!({"limits": {"cpu": "2"}, "requests": {"cpu": "1"}});
        assert_eq!(of(both), (None, Some(2000), Some(100)));
    }

    #[test]
    fn a_pod_is_limited_if_all_of_it_is() {
        let of = |second: serde_json::Value| {
            let pod = spec(json!({"containers": [
                {"name": "a", "resources": limits("500m", "64Mi")}, {"name": "b", "resources": second}]}));
            let limits = of_pod(&pod);
            (limits.memory, limits.cpu)
        };
        assert_eq!(of(json!({})), (None, None));
        assert_eq!(of(limits("1", "1Mi")), (Some(65 << 20), Some(1500)));
        assert_eq!(
            of(json!({"limits": {"memory": "1Mi"}})),
            (Some(65 << 20), None)
        );
    }

    #[test]
    fn init_containers_need_their_share_before_the_others() {
        let pod = spec(json!({
            "initContainers": [
                {"name": "side", "restartPolicy": "Always", "resources": limits("100m", "10Mi")},
                {"name": "first", "resources": limits("3", "20Mi")}],
            "containers": [{"name": "a", "resources": limits("1", "40Mi")}]}));
        let limits = of_pod(&pod);
        assert_eq!((limits.cpu, limits.memory), (Some(3100), Some(50 << 20)));
    }

    #[test]
    fn the_pods_own_words_count_first() {
        let pod = spec(json!({
            "resources": {"limits": {"memory": "100Mi"}, "requests": {"cpu": "1"}},
            "overhead": {"memory": "1Mi", "cpu": "1"},
            "containers": [{"name": "a"}]}));
        let limits = of_pod(&pod);
        assert_eq!((limits.cpu, limits.memory), (None, Some(101 << 20)));
        assert_eq!(limits.weight, Some(174));
    }
}
