//! `oom_score_adj` of a container, as upstream's kubelet sets it.
//!
//! The kernel's OOM score of a process is its share of memory in thousandths. The adjustment makes BestEffort pods die first, then
//! Burstable pods that exceed their requests. An ordinary user cannot set a negative value, so Guaranteed pods keep the inherited one.

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, ResourceRequirements};
use pod_protocol::QosClass;
use pod_protocol::restart::is_sidecar;

use super::limits::effective_amount;

const BEST_EFFORT_ADJ: i64 = 1000;
const GUARANTEED_ADJ: i64 = -997;
const NODE_CRITICAL: &str = "system-node-critical";

/// `oom_score_adj` of a container, on a node with `capacity` bytes of memory.
pub(super) fn oom_score_adj(pod: &Pod, container: &Container, capacity: u64) -> i32 {
    let spec = pod.spec.as_ref();
    let critical =
        spec.is_some_and(|spec| spec.priority_class_name.as_deref() == Some(NODE_CRITICAL));
    let adj = match (QosClass::of(pod), spec) {
        _ if critical => GUARANTEED_ADJ,
        (Some(QosClass::Guaranteed), _) => GUARANTEED_ADJ,
        (Some(QosClass::Burstable), Some(spec)) => burstable(spec, container, capacity),
        _ => BEST_EFFORT_ADJ,
    };
    i32::try_from(adj).unwrap_or(0)
}

/// The larger the container's memory request, the lower the adjustment.
fn burstable(spec: &PodSpec, container: &Container, capacity: u64) -> i64 {
    let mut request = memory_request(container.resources.as_ref());
    let is_init = init(spec).any(|other| other.name == container.name);
    if is_init && is_sidecar(container) {
        // A sidecar must not die before the containers that it serves.
        let regular = spec.containers.iter();
        let least = regular
            .map(|other| memory_request(other.resources.as_ref()))
            .min();
        request = request.max(least.unwrap_or(0));
    }
    request = request.saturating_add(unassigned_request(spec));
    let share = u128::from(request) * 1000 / u128::from(capacity.max(1));
    let share = i64::try_from(share).unwrap_or(i64::MAX);
    // Between BestEffort and Guaranteed.
    (BEST_EFFORT_ADJ.saturating_sub(share))
        .clamp(BEST_EFFORT_ADJ + GUARANTEED_ADJ, BEST_EFFORT_ADJ - 1)
}

/// Each container's share of the pod-level request that exceeds the containers' requests.
fn unassigned_request(spec: &PodSpec) -> u64 {
    let of_pod = memory_request(spec.resources.as_ref());
    let assigned = effective_amount(spec, |container| {
        Some(memory_request(container.resources.as_ref()))
    });
    let count = (spec.containers.len() + init(spec).count()).max(1);
    of_pod.saturating_sub(assigned) / count as u64
}

fn init(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    spec.init_containers.iter().flatten()
}

fn memory_request(resources: Option<&ResourceRequirements>) -> u64 {
    let requests = resources.and_then(|resources| resources.requests.as_ref());
    let memory = requests.and_then(|requests| requests.get("memory"));
    memory.and_then(quantity::bytes).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const GIB: u64 = 1 << 30;

    fn score_adj(class: &str, spec: Value, name: &str) -> i32 {
        let pod = json!({ "metadata": {}, "spec": spec, "status": { "qosClass": class } });
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let spec = pod.spec.as_ref().unwrap();
        let mut all = init(spec).chain(&spec.containers);
        let container = all.find(|container| container.name == name).unwrap();
        oom_score_adj(&pod, container, 10 * GIB)
    }

    fn requesting(name: &str, memory: &str) -> Value {
        json!({ "name": name, "resources": { "requests": { "memory": memory } } })
    }

    #[test]
    fn larger_request_lowers_adjustment() {
        let one = |class: &str, memory: &str| {
            score_adj(
                class,
                json!({ "containers": [requesting("a", memory)] }),
                "a",
            )
        };
        assert_eq!(one("BestEffort", "0"), 1000);
        assert_eq!(one("Guaranteed", "1Gi"), -997);
        assert_eq!(one("Burstable", "1Gi"), 900);
        assert_eq!(one("Burstable", "5Gi"), 500);
        assert_eq!(one("Burstable", "0"), 999);
        assert_eq!(one("Burstable", "1Ki"), 999);
        assert_eq!(one("Burstable", "10Gi"), 3);
        assert_eq!(one("Burstable", "99Gi"), 3);
    }

    #[test]
    fn huge_requests_do_not_overflow() {
        let spec = json!({
            "initContainers": [requesting("i", "8Ei"), requesting("j", "8Ei")],
            "containers": [requesting("a", "8Ei"), requesting("b", "8Ei"), requesting("c", "8Ei")],
            "resources": { "requests": { "memory": "8Ei" } },
        });
        assert_eq!(score_adj("Burstable", spec, "a"), 3);
    }

    #[test]
    fn sidecar_outlives_smallest_container() {
        let mut sidecar = requesting("s", "1Gi");
        sidecar["restartPolicy"] = json!("Always");
        let spec = json!({
            "initContainers": [sidecar, requesting("i", "1Gi")],
            "containers": [requesting("a", "3Gi"), requesting("b", "2Gi")],
        });
        assert_eq!(score_adj("Burstable", spec.clone(), "s"), 800);
        assert_eq!(score_adj("Burstable", spec.clone(), "i"), 900);
        assert_eq!(score_adj("Burstable", spec, "a"), 700);
    }

    #[test]
    fn pod_level_request_is_shared() {
        let spec = json!({
            "containers": [requesting("a", "1Gi"), { "name": "b" }],
            "resources": { "requests": { "memory": "5Gi" } },
        });
        assert_eq!(score_adj("Burstable", spec.clone(), "a"), 700);
        assert_eq!(score_adj("Burstable", spec, "b"), 800);
    }

    #[test]
    fn node_critical_pod_counts_as_guaranteed() {
        let spec =
            json!({ "priorityClassName": "system-node-critical", "containers": [{ "name": "a" }] });
        assert_eq!(score_adj("BestEffort", spec, "a"), -997);
    }
}
