//! Which pod goes, and in which words. Pure.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, Pod};
use pod_protocol::Problem;
use pod_protocol::usage::{ContainerUsage, PodUsage};
use quantity::Amount;

use crate::pods::admission::requested;
use crate::pods::spec::{
    init_containers, is_critical, is_final, is_on_disk, is_to_be_deleted, phase,
};
use crate::pressure::{Resource, Shortage};

/// The beginning of what an evicted pod is told when the node, and not the pod itself, is why.
pub(crate) const NODE_LOW: &str = "The node was low on resource: ";
/// Who takes less than this beyond its request is not why the machine is short.
const MATTERS: u64 = 16 << 20;

/// A pod, and what it uses.
#[derive(Debug)]
pub(super) struct Candidate {
    pub pod: Arc<Pod>,
    pub usage: PodUsage,
}

/// The pod to end: of the lowest priority, the one that goes furthest beyond its request.
pub(super) fn choose<'a>(
    candidates: &'a [Candidate],
    shortage: &Shortage,
) -> Option<(&'a Candidate, Problem)> {
    let chosen = candidates
        .iter()
        .filter(|candidate| may_go(&candidate.pod))
        .map(|candidate| (excess(candidate, shortage.resource), candidate))
        .filter(|(excess, _)| *excess >= MATTERS)
        .min_by_key(|(excess, candidate)| {
            let spec = candidate.pod.spec.as_ref();
            let priority = spec.and_then(|spec| spec.priority).unwrap_or(0);
            (priority, std::cmp::Reverse(*excess))
        });
    chosen.map(|(_, candidate)| {
        let problem = Problem {
            reason: "Evicted".to_owned(),
            message: message(candidate, shortage),
        };
        (candidate, problem)
    })
}

fn may_go(pod: &Pod) -> bool {
    !(is_critical(pod) || is_final(phase(pod)) || is_to_be_deleted(pod))
}

/// What a pod uses beyond its request.
fn excess(candidate: &Candidate, resource: Resource) -> u64 {
    let Candidate { pod, usage } = candidate;
    let used = match resource {
        Resource::Memory => usage.memory.working_set,
        Resource::Disk => {
            let containers = usage.containers.iter().map(|own| used_by(own, resource));
            let volumes = usage
                .volumes
                .iter()
                .filter(|volume| is_on_disk(pod, &volume.name))
                .map(|volume| volume.disk.used);
            let etc = usage.etc.map(|etc| etc.used);
            containers.chain(volumes).chain(etc).sum()
        }
    };
    used.saturating_sub(requested(pod, name(resource)))
}

fn used_by(container: &ContainerUsage, resource: Resource) -> u64 {
    let disk = |part: &Option<pod_protocol::usage::DiskUsage>| part.map_or(0, |part| part.used);
    match resource {
        Resource::Memory => container.memory.working_set,
        Resource::Disk => disk(&container.root) + disk(&container.logs),
    }
}

fn name(resource: Resource) -> &'static str {
    match resource {
        Resource::Memory => "memory",
        Resource::Disk => "ephemeral-storage",
    }
}

fn message(candidate: &Candidate, shortage: &Shortage) -> String {
    let resource = name(shortage.resource);
    let mut text = format!(
        "{NODE_LOW}{resource}. Threshold quantity: {}, available: {}. ",
        quantity::binary(shortage.threshold).0,
        rounded(shortage.available),
    );
    let Some(spec) = &candidate.pod.spec else {
        return text;
    };
    for own in &candidate.usage.containers {
        let mut all = spec.containers.iter().chain(init_containers(spec));
        let Some(container) = all.find(|container| container.name == own.name) else {
            continue;
        };
        let (request, words) = request(container, resource);
        let used = used_by(own, shortage.resource);
        if used > request {
            text.push_str(&format!(
                "Container {} was using {}, request is {words}, has larger consumption of {resource}. ",
                own.name,
                rounded(used),
            ));
        }
    }
    text
}

/// In whole kibibytes, as figures are that nobody needs to the byte.
fn rounded(bytes: u64) -> String {
    quantity::binary(bytes & !1023).0
}

/// What a container asks for, and its own words for it.
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

    fn candidate(name: &str, spec: Value, memory: u64, disk: u64) -> Candidate {
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
        Candidate {
            pod: Arc::new(serde_json::from_value(pod).unwrap()),
            usage: serde_json::from_value(usage).unwrap(),
        }
    }

    fn asking(memory: &str, priority: i32) -> Value {
        let requests = json!({ "requests": { "memory": memory } });
        json!({ "priority": priority, "containers": [{ "name": "a", "resources": requests }] })
    }

    fn chosen(candidates: &[Candidate], resource: Resource) -> (String, String) {
        let shortage = Shortage {
            resource,
            threshold: 100 * MIB,
            available: 50 * MIB + 5,
        };
        match choose(candidates, &shortage) {
            Some((candidate, problem)) => {
                assert_eq!(problem.reason, "Evicted");
                let name = candidate.pod.metadata.name.clone();
                (name.unwrap_or_default(), problem.message)
            }
            None => Default::default(),
        }
    }

    #[test]
    fn of_the_lowest_priority_who_goes_furthest_beyond_its_request() {
        let mut all = vec![
            candidate("modest", asking("1Gi", 0), 900, 0),
            candidate("small", asking("0", 0), 5, 0),
            candidate("large", asking("100Mi", 0), 800, 0),
            candidate("larger", asking("600Mi", 0), 1000, 0),
            candidate("important", asking("0", 1000), 2000, 0),
            candidate("critical", asking("0", 2_000_000_000), 4000, 0),
        ];
        let (name, message) = chosen(&all, Resource::Memory);
        assert_eq!(name, "large");
        assert_eq!(
            message,
            "The node was low on resource: memory. Threshold quantity: 100Mi, available: 50Mi. \
             Container a was using 800Mi, request is 100Mi, has larger consumption of memory. "
        );
        all.remove(2);
        assert_eq!(chosen(&all, Resource::Memory).0, "larger");
        all.remove(2);
        assert_eq!(chosen(&all, Resource::Memory).0, "important");
        all.remove(2);
        // The machine is others' too: who uses what it asked for stays.
        assert_eq!(chosen(&all, Resource::Memory).0, "");
    }

    #[test]
    fn only_what_goes_with_the_pod_counts_as_its_disk() {
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
        assert_eq!(chosen(&all, Resource::Disk).0, "");
        all.push(candidate("writer", volumes("scratch", json!({})), 0, 200));
        let (name, message) = chosen(&all, Resource::Disk);
        assert_eq!(name, "writer");
        assert!(message.starts_with("The node was low on resource: ephemeral-storage. "));
        let mut hosts = candidate("hosts", json!({ "containers": [{ "name": "a" }] }), 0, 0);
        hosts.usage.etc = all[0].usage.volumes.first().map(|volume| volume.disk);
        all.push(hosts);
        assert_eq!(chosen(&all, Resource::Disk).0, "hosts");
    }
}
