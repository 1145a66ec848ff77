//! Selects the pod to evict, and its eviction message.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, Pod};
use pod_protocol::usage::{ContainerUsage, DiskUsage, MAX_COUNTED_FILES, PodUsage};
use pod_protocol::{FailureCause, PodFailure};
use quantity::Amount;

use crate::node::pressure::{EvictionResource, Shortage};
use crate::pods::admission::requested;
use crate::pods::spec::{init_containers, is_being_deleted, is_critical, is_on_disk, phase};

/// A pod that exceeds its request by less than this is not the cause of a shortage.
const MIN_EXCESS: u64 = 16 << 20;
/// The excess, at least, of a pod with more files than its sandbox counts: the others may be of any size.
const UNCOUNTED_EXCESS: u64 = 1 << 30;

/// A pod and its usage.
#[derive(Debug)]
pub(super) struct EvictionCandidate {
    pub pod: Arc<Pod>,
    pub usage: PodUsage,
}

/// The pod to evict: of those with the lowest priority, the one that exceeds its request most.
pub(super) fn choose<'a>(
    candidates: &'a [EvictionCandidate],
    shortage: &Shortage,
) -> Option<(&'a EvictionCandidate, PodFailure)> {
    let chosen = candidates
        .iter()
        .filter(|candidate| may_be_evicted(&candidate.pod))
        .map(|candidate| (excess(candidate, shortage.resource), candidate))
        .filter(|(excess, _)| *excess >= MIN_EXCESS)
        .min_by_key(|(excess, candidate)| {
            let spec = candidate.pod.spec.as_ref();
            let priority = spec.and_then(|spec| spec.priority).unwrap_or(0);
            (priority, std::cmp::Reverse(*excess))
        });
    chosen.map(|(_, candidate)| {
        let message = message(candidate, shortage);
        (
            candidate,
            PodFailure::new(FailureCause::NodePressure, message),
        )
    })
}

fn may_be_evicted(pod: &Pod) -> bool {
    !(is_critical(pod) || phase(pod).is_terminal() || is_being_deleted(pod))
}

/// The amount by which a pod exceeds its request.
fn excess(candidate: &EvictionCandidate, resource: EvictionResource) -> u64 {
    let EvictionCandidate { pod, usage } = candidate;
    let requested = requested(pod, resource_name(resource));
    match resource {
        EvictionResource::Memory => usage.memory.working_set.saturating_sub(requested),
        EvictionResource::Disk => {
            let used: u64 = ephemeral_disks(candidate).map(|disk| disk.used).sum();
            let is_uncounted = ephemeral_disks(candidate).any(|d| d.inodes >= MAX_COUNTED_FILES);
            let min_excess = if is_uncounted { UNCOUNTED_EXCESS } else { 0 };
            used.saturating_sub(requested).max(min_excess)
        }
    }
}

/// The directories of a pod that count as ephemeral storage.
fn ephemeral_disks(candidate: &EvictionCandidate) -> impl Iterator<Item = DiskUsage> {
    let EvictionCandidate { pod, usage } = candidate;
    let containers = usage.containers.iter().flat_map(container_disks);
    let volumes = usage.volumes.iter();
    let volumes = volumes
        .filter(|volume| is_on_disk(pod, &volume.name))
        .map(|volume| volume.disk);
    containers.chain(volumes).chain(usage.etc)
}

fn container_disks(container: &ContainerUsage) -> impl Iterator<Item = DiskUsage> {
    [container.root, container.logs].into_iter().flatten()
}

fn used_by(container: &ContainerUsage, resource: EvictionResource) -> u64 {
    match resource {
        EvictionResource::Memory => container.memory.working_set,
        EvictionResource::Disk => container_disks(container).map(|disk| disk.used).sum(),
    }
}

fn resource_name(resource: EvictionResource) -> &'static str {
    match resource {
        EvictionResource::Memory => "memory",
        EvictionResource::Disk => "ephemeral-storage",
    }
}

fn message(candidate: &EvictionCandidate, shortage: &Shortage) -> String {
    let resource = resource_name(shortage.resource);
    let mut text = format!(
        "The node was low on resource: {resource}. Threshold quantity: {}, available: {}. ",
        quantity::binary(shortage.threshold).0,
        rounded(shortage.available),
    );
    let Some(spec) = &candidate.pod.spec else {
        return text;
    };
    for usage in &candidate.usage.containers {
        let mut all = spec.containers.iter().chain(init_containers(spec));
        let Some(container) = all.find(|container| container.name == usage.name) else {
            continue;
        };
        let (request, quantity) = request(container, resource);
        let used = used_by(usage, shortage.resource);
        if used > request {
            text.push_str(&format!(
                "Container {} was using {}, request is {quantity}, has larger consumption of {resource}. ",
                usage.name,
                rounded(used),
            ));
        }
    }
    text
}

/// Rounds down to whole kibibytes, to get a short quantity.
fn rounded(bytes: u64) -> String {
    quantity::binary(bytes & !1023).0
}

/// A container's request, and the quantity as written in its spec.
fn request(container: &Container, resource: &str) -> (u64, String) {
    let resources = container.resources.as_ref();
    let requests = resources.and_then(|resources| resources.requests.as_ref());
    match requests.and_then(|requests| requests.get(resource)) {
        Some(quantity) => {
            let amount = Amount::of(quantity).unwrap_or_default().value();
            (amount.unsigned_abs(), quantity.0.clone())
        }
        None => (0, "0".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const MIB: u64 = 1 << 20;

    fn candidate(name: &str, spec: Value, memory: u64, disk: u64) -> EvictionCandidate {
        let pod =
            json!({ "metadata": { "name": name }, "spec": spec, "status": { "phase": "Running" } });
        let zero = json!({ "usage": 0, "working_set": memory * MIB, "rss": 0, "page_faults": 0, "major_page_faults": 0 });
        let none = json!({ "capacity": 0, "available": 0, "inodes": 0, "inodes_free": 0 });
        let written = json!({ "used": disk * MIB, "inodes": 0, "file_system": none });
        let usage = json!({
            "at": "2026-01-01T00:00:00Z", "cpu_ns": 0, "memory": zero, "processes": 1, "interfaces": [],
            "containers": [{
                "name": "a", "id": "1", "started": "2026-01-01T00:00:00Z", "cpu_ns": 0,
                "memory": zero, "processes": 1, "root": null, "logs": null,
            }],
            "volumes": [{ "name": "scratch", "disk": written }, { "name": "data", "disk": written }],
        });
        EvictionCandidate {
            pod: Arc::new(serde_json::from_value(pod).unwrap()),
            usage: serde_json::from_value(usage).unwrap(),
        }
    }

    fn asking(memory: &str, priority: i32) -> Value {
        let requests = json!({ "requests": { "memory": memory } });
        json!({ "priority": priority, "containers": [{ "name": "a", "resources": requests }] })
    }

    fn chosen(candidates: &[EvictionCandidate], resource: EvictionResource) -> (String, String) {
        let shortage = Shortage {
            resource,
            threshold: 100 * MIB,
            available: 50 * MIB + 5,
        };
        match choose(candidates, &shortage) {
            Some((candidate, failure)) => {
                assert_eq!(failure.cause, FailureCause::NodePressure);
                let name = candidate.pod.metadata.name.clone();
                (name.unwrap_or_default(), failure.message)
            }
            None => Default::default(),
        }
    }

    #[test]
    fn lowest_priority_with_largest_excess_is_evicted() {
        let mut all = vec![
            candidate("modest", asking("1Gi", 0), 900, 0),
            candidate("small", asking("0", 0), 5, 0),
            candidate("large", asking("100Mi", 0), 800, 0),
            candidate("larger", asking("600Mi", 0), 1000, 0),
            candidate("important", asking("0", 1000), 2000, 0),
            candidate("critical", asking("0", 2_000_000_000), 4000, 0),
        ];
        let (name, message) = chosen(&all, EvictionResource::Memory);
        assert_eq!(name, "large");
        assert_eq!(
            message,
            "The node was low on resource: memory. Threshold quantity: 100Mi, available: 50Mi. \
             Container a was using 800Mi, request is 100Mi, has larger consumption of memory. "
        );
        all.remove(2);
        assert_eq!(chosen(&all, EvictionResource::Memory).0, "larger");
        all.remove(2);
        assert_eq!(chosen(&all, EvictionResource::Memory).0, "important");
        all.remove(2);
        // Pods within their requests are never evicted.
        assert_eq!(chosen(&all, EvictionResource::Memory).0, "");
    }

    #[test]
    fn only_ephemeral_storage_counts_as_disk_usage() {
        let volumes = |name: &str, source: Value| {
            let volume = json!({ "name": name, "emptyDir": source });
            json!({ "containers": [{ "name": "a" }], "volumes": [volume] })
        };
        let mut all = vec![
            candidate(
                "memory",
                volumes("scratch", json!({ "medium": "Memory" })),
                0,
                500,
            ),
            candidate("other", json!({ "containers": [{ "name": "a" }] }), 0, 500),
        ];
        assert_eq!(chosen(&all, EvictionResource::Disk).0, "");
        all.push(candidate("writer", volumes("scratch", json!({})), 0, 200));
        let (name, message) = chosen(&all, EvictionResource::Disk);
        assert_eq!(name, "writer");
        assert!(message.starts_with("The node was low on resource: ephemeral-storage. "));
        let mut hosts = candidate("hosts", json!({ "containers": [{ "name": "a" }] }), 0, 0);
        hosts.usage.etc = all[0].usage.volumes.first().map(|volume| volume.disk);
        all.push(hosts);
        assert_eq!(chosen(&all, EvictionResource::Disk).0, "hosts");
    }

    #[test]
    fn pod_with_uncounted_files_ranks_as_large() {
        let spec = |request: &str| {
            json!({
                "containers": [{ "name": "a", "resources": { "requests": { "ephemeral-storage": request } } }],
                "volumes": [{ "name": "scratch", "emptyDir": {} }],
            })
        };
        let mut many = candidate("many-files", spec("10Gi"), 0, 1);
        let mut all = vec![candidate("writer", spec("0"), 0, 200)];
        many.usage.volumes[0].disk.inodes = MAX_COUNTED_FILES;
        all.push(many);
        assert_eq!(chosen(&all, EvictionResource::Disk).0, "many-files");
        all.push(candidate("largest", spec("0"), 0, 2000));
        assert_eq!(chosen(&all, EvictionResource::Disk).0, "largest");
        all.truncate(2);
        all[1].usage.volumes[0].disk.inodes = MAX_COUNTED_FILES - 1;
        assert_eq!(chosen(&all, EvictionResource::Disk).0, "writer");
        // Files in volumes that are not ephemeral storage do not count.
        all[1].usage.volumes[1].disk.inodes = MAX_COUNTED_FILES;
        assert_eq!(chosen(&all, EvictionResource::Disk).0, "writer");
    }
}
