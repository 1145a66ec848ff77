//! Whom the kernel kills first when the machine has no memory left, as upstream's kubelet wants it.
//!
//! The kernel's own score of a process is the share of memory that it uses, in thousandths. What is added here makes
//! those who asked for nothing go first, then those who use more than they asked for. A user can raise the number of his
//! own processes but not lower it, so that for Guaranteed pods nothing is added.

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, ResourceRequirements};

const BEST_EFFORT: i64 = 1000;
const GUARANTEED: i64 = -997;
/// The pods without which a node is none.
const NODE_CRITICAL: &str = "system-node-critical";

/// The number for a container, on a node with so many bytes of memory.
pub(super) fn adjustment(pod: &Pod, container: &Container, capacity: u64) -> i32 {
    let spec = pod.spec.as_ref();
    let status = pod.status.as_ref();
    let class = status.and_then(|status| status.qos_class.as_deref());
    let critical =
        spec.is_some_and(|spec| spec.priority_class_name.as_deref() == Some(NODE_CRITICAL));
    let number = match (class, spec) {
        _ if critical => GUARANTEED,
        (Some("Guaranteed"), _) => GUARANTEED,
        (Some("Burstable"), Some(spec)) => burstable(spec, container, capacity),
        _ => BEST_EFFORT,
    };
    i32::try_from(number).unwrap_or(0)
}

/// The more of the machine a container asks for, the less it is to blame for using it.
fn burstable(spec: &PodSpec, container: &Container, capacity: u64) -> i64 {
    let mut request = memory(container.resources.as_ref());
    let sidecar = container.restart_policy.as_deref() == Some("Always")
        && init(spec).any(|other| other.name == container.name);
    if sidecar {
        // One that serves the others must not go before them.
        let regular = spec.containers.iter();
        let least = regular.map(|other| memory(other.resources.as_ref())).min();
        request = request.max(least.unwrap_or(0));
    }
    request = request.saturating_add(unclaimed(spec));
    let share = u128::from(request) * 1000 / u128::from(capacity.max(1));
    let share = i64::try_from(share).unwrap_or(i64::MAX);
    // Always after those who asked for nothing, and before those who use what they asked for.
    (BEST_EFFORT.saturating_sub(share)).clamp(BEST_EFFORT + GUARANTEED, BEST_EFFORT - 1)
}

/// The share of each container in what the pod as a whole asks for and none of its containers does.
fn unclaimed(spec: &PodSpec) -> u64 {
    let of_pod = memory(spec.resources.as_ref());
    let request = |container: &Container| memory(container.resources.as_ref());
    let is_sidecar = |container: &Container| container.restart_policy.as_deref() == Some("Always");
    let (mut sidecars, mut starting) = (0_u64, 0_u64);
    for container in init(spec) {
        if is_sidecar(container) {
            sidecars = sidecars.saturating_add(request(container));
            starting = starting.max(sidecars);
        } else {
            starting = starting.max(sidecars.saturating_add(request(container)));
        }
    }
    let requests = spec.containers.iter().map(request);
    let claimed = starting.max(requests.fold(sidecars, u64::saturating_add));
    let count = (spec.containers.len() + init(spec).count()).max(1);
    of_pod.saturating_sub(claimed) / count as u64
}

fn init(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    spec.init_containers.iter().flatten()
}

fn memory(resources: Option<&ResourceRequirements>) -> u64 {
    let requests = resources.and_then(|resources| resources.requests.as_ref());
    let memory = requests.and_then(|requests| requests.get("memory"));
    memory.and_then(quantity::bytes).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const GIB: u64 = 1 << 30;

    fn of(class: &str, spec: Value, name: &str) -> i32 {
        let pod = json!({ "metadata": {}, "spec": spec, "status": { "qosClass": class } });
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let spec = pod.spec.as_ref().unwrap();
        let mut all = init(spec).chain(&spec.containers);
        let container = all.find(|container| container.name == name).unwrap();
        adjustment(&pod, container, 10 * GIB)
    }

    fn asking(name: &str, memory: &str) -> Value {
        json!({ "name": name, "resources": { "requests": { "memory": memory } } })
    }

    #[test]
    fn who_asks_for_more_goes_later() {
        let one = |class: &str, memory: &str| {
            of(class, json!({ "containers": [asking("a", memory)] }), "a")
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
    fn the_most_that_can_be_asked_for_is_not_too_much() {
        let spec = json!({
            "initContainers": [asking("i", "8Ei"), asking("j", "8Ei")],
            "containers": [asking("a", "8Ei"), asking("b", "8Ei"), asking("c", "8Ei")],
            "resources": { "requests": { "memory": "8Ei" } },
        });
        assert_eq!(of("Burstable", spec, "a"), 3);
    }

    #[test]
    fn sidecars_stay_as_long_as_those_they_serve() {
        let mut sidecar = asking("s", "1Gi");
        sidecar["restartPolicy"] = json!("Always");
        let spec = json!({
            "initContainers": [sidecar, asking("i", "1Gi")],
            "containers": [asking("a", "3Gi"), asking("b", "2Gi")],
        });
        assert_eq!(of("Burstable", spec.clone(), "s"), 800);
        assert_eq!(of("Burstable", spec.clone(), "i"), 900);
        assert_eq!(of("Burstable", spec, "a"), 700);
    }

    #[test]
    fn what_a_pod_asks_for_as_a_whole_is_everybodys() {
        let spec = json!({
            "containers": [asking("a", "1Gi"), { "name": "b" }],
            "resources": { "requests": { "memory": "5Gi" } },
        });
        assert_eq!(of("Burstable", spec.clone(), "a"), 700);
        assert_eq!(of("Burstable", spec, "b"), 800);
    }

    #[test]
    fn those_without_which_a_node_is_none_stay_longest() {
        let spec =
            json!({ "priorityClassName": "system-node-critical", "containers": [{ "name": "a" }] });
        assert_eq!(of("BestEffort", spec, "a"), -997);
    }
}
