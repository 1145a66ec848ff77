//! The cgroup limits of a pod and its containers, from their spec. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, PodSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use linux::cgroup::{CgroupLimits, cpu_weight_from_shares};
use pod_protocol::restart::is_sidecar;
use quantity::Amount;

/// `cpu.shares` of one CPU, from which `cpu.weight` is derived.
const SHARES_PER_CPU: u64 = 1024;

/// The limits of a container. As upstream: no swap, and the OOM killer kills all of its processes.
pub fn container_limits(container: &Container) -> CgroupLimits {
    let own = Resources::of(container.resources.as_ref());
    CgroupLimits {
        memory: own.memory_limit,
        cpu: own.cpu_limit,
        weight: Some(weight(own.cpu_request.or(own.cpu_limit))),
        processes: None,
        no_swap: true,
        oom_group: true,
    }
}

/// The limits of a pod: its pod-level resources, else the sum over its containers if all of them have a limit.
pub fn pod_limits(spec: &PodSpec) -> CgroupLimits {
    let pod = Resources::of(spec.resources.as_ref());
    let overhead = spec.overhead.as_ref();
    let overhead_of = |read: fn(Option<&Quantity>) -> Option<u64>, name: &str| {
        read(overhead.and_then(|overhead| overhead.get(name))).unwrap_or(0)
    };
    let overhead_cpu = overhead_of(milli, "cpu");
    let overhead_memory = overhead_of(units, "memory");
    let limit = |select: fn(&Resources) -> Option<u64>| {
        let amount = |container: &Container| select(&Resources::of(container.resources.as_ref()));
        let all_limited = all_containers(spec).all(|container| amount(container).is_some());
        select(&pod).or_else(|| all_limited.then(|| effective_amount(spec, amount)))
    };
    let request = pod.cpu_request.unwrap_or_else(|| {
        effective_amount(spec, |container| {
            let own = Resources::of(container.resources.as_ref());
            own.cpu_request.or(own.cpu_limit)
        })
    });
    CgroupLimits {
        memory: limit(|resources| resources.memory_limit)
            .map(|bytes| bytes.saturating_add(overhead_memory)),
        cpu: limit(|resources| resources.cpu_limit).map(|milli| milli.saturating_add(overhead_cpu)),
        weight: Some(weight(Some(request.saturating_add(overhead_cpu)))),
        ..CgroupLimits::default()
    }
}

/// Resources of a container, or of the pod: CPU in millicores, memory in bytes.
struct Resources {
    cpu_request: Option<u64>,
    cpu_limit: Option<u64>,
    memory_limit: Option<u64>,
}

impl Resources {
    fn of(resources: Option<&ResourceRequirements>) -> Self {
        type List = Option<BTreeMap<String, Quantity>>;
        let get = |list: fn(&ResourceRequirements) -> &List, name: &str| {
            resources.and_then(|resources| list(resources).as_ref()?.get(name))
        };
        Self {
            cpu_request: milli(get(|resources| &resources.requests, "cpu")),
            cpu_limit: milli(get(|resources| &resources.limits, "cpu")),
            memory_limit: units(get(|resources| &resources.limits, "memory")),
        }
    }
}

/// The effective amount of a resource, as upstream's scheduler computes it: the sum over containers and sidecars, or over an init
/// container and the sidecars before it, whichever is largest.
pub fn effective_amount(spec: &PodSpec, amount: impl Fn(&Container) -> Option<u64>) -> u64 {
    let amount = |container: &Container| amount(container).unwrap_or(0);
    let (mut sidecars, mut max_init) = (0_u64, 0_u64);
    for container in spec.init_containers.iter().flatten() {
        let own = amount(container);
        if is_sidecar(container) {
            sidecars = sidecars.saturating_add(own);
            max_init = max_init.max(sidecars);
        } else {
            max_init = max_init.max(sidecars.saturating_add(own));
        }
    }
    let regular = spec.containers.iter().map(amount);
    regular.fold(sidecars, u64::saturating_add).max(max_init)
}

fn all_containers(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    spec.init_containers
        .iter()
        .flatten()
        .chain(&spec.containers)
}

/// A quantity in units, such as bytes. A missing, zero or invalid quantity is no limit.
fn units(quantity: Option<&Quantity>) -> Option<u64> {
    positive(Amount::of(quantity?)?.value())
}

/// As [`units`], in thousandths.
fn milli(quantity: Option<&Quantity>) -> Option<u64> {
    positive(Amount::of(quantity?)?.milli_value())
}

fn positive(number: i64) -> Option<u64> {
    u64::try_from(number).ok().filter(|&number| number > 0)
}

/// `cpu.weight` of a request in millicores.
fn weight(request: Option<u64>) -> u64 {
    cpu_weight_from_shares(request.unwrap_or(0).saturating_mul(SHARES_PER_CPU) / 1000)
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
    fn zero_and_invalid_quantities_are_no_limit() {
        let parse = |text: &str| {
            let quantity = Quantity(text.to_owned());
            (milli(Some(&quantity)), units(Some(&quantity)))
        };
        assert_eq!(parse("250m"), (Some(250), Some(1)));
        assert_eq!(parse("64Mi"), (Some((64 << 20) * 1000), Some(64 << 20)));
        for none in ["0", "", "-1", "x", "1.2.3"] {
            assert_eq!(parse(none), (None, None), "{none}");
        }
        assert_eq!(milli(None), None);
    }

    #[test]
    fn container_limits_follow_resources() {
        let limits_of = |resources| {
            let pod = spec(json!({"containers": [{"name": "a", "resources": resources}]}));
            let limits = container_limits(&pod.containers[0]);
            (limits.memory, limits.cpu, limits.weight)
        };
        assert_eq!(limits_of(json!({})), (None, None, Some(1)));
        assert_eq!(
            limits_of(limits("500m", "64Mi")),
            (Some(64 << 20), Some(500), Some(59))
        );
        let both = json!({"limits": {"cpu": "2"}, "requests": {"cpu": "1"}});
        assert_eq!(limits_of(both), (None, Some(2000), Some(100)));
    }

    #[test]
    fn pod_is_limited_if_all_containers_are() {
        let limits_with = |second: serde_json::Value| {
            let pod = spec(json!({"containers": [
                {"name": "a", "resources": limits("500m", "64Mi")}, {"name": "b", "resources": second}]}));
            let limits = pod_limits(&pod);
            (limits.memory, limits.cpu)
        };
        assert_eq!(limits_with(json!({})), (None, None));
        assert_eq!(
            limits_with(limits("1", "1Mi")),
            (Some(65 << 20), Some(1500))
        );
        assert_eq!(
            limits_with(json!({"limits": {"memory": "1Mi"}})),
            (Some(65 << 20), None)
        );
    }

    #[test]
    fn pod_limit_covers_init_containers() {
        let pod = spec(json!({
            "initContainers": [
                {"name": "side", "restartPolicy": "Always", "resources": limits("100m", "10Mi")},
                {"name": "first", "resources": limits("3", "20Mi")}],
            "containers": [{"name": "a", "resources": limits("1", "40Mi")}]}));
        let limits = pod_limits(&pod);
        assert_eq!((limits.cpu, limits.memory), (Some(3100), Some(50 << 20)));
    }

    #[test]
    fn pod_level_resources_override_containers() {
        let pod = spec(json!({
            "resources": {"limits": {"memory": "100Mi"}, "requests": {"cpu": "1"}},
            "overhead": {"memory": "1Mi", "cpu": "1"},
            "containers": [{"name": "a"}]}));
        let limits = pod_limits(&pod);
        assert_eq!((limits.cpu, limits.memory), (None, Some(101 << 20)));
        assert_eq!(limits.weight, Some(174));
    }
}
