use k8s_openapi::api::core::v1::Pod;
use pod_protocol::usage::{FileSystem, PodUsage};
use serde_json::json;

use super::*;

fn machine(name: &str) -> Machine {
    vec![name.to_owned()]
}

fn host(available_memory: u64, available_disk: u64) -> HostResources {
    HostResources {
        available_memory: Some(available_memory),
        scratch: Some(FileSystem {
            capacity: 1 << 30,
            available: available_disk,
            ..FileSystem::default()
        }),
        tasks: None,
    }
}

const SUFFICIENT: u64 = 1 << 29;

#[test]
fn full_disk_calls_for_eviction_after_some_checks() {
    let mut monitor = ShortageMonitor::default();
    let mut check = |first, second| {
        let machines = [(machine("1"), first), (machine("2"), second)];
        let found = monitor.check(machines).into_iter();
        found
            .map(|(machine, shortage)| (machine.concat(), shortage.resource))
            .collect::<Vec<_>>()
    };
    let (full, sufficient) = (host(SUFFICIENT, 0), host(SUFFICIENT, SUFFICIENT));
    assert_eq!(check(full, sufficient), []);
    assert_eq!(check(full, full), []);
    let (disk, memory) = (EvictionResource::Disk, EvictionResource::Memory);
    assert_eq!(check(full, full), [("1".to_owned(), disk)]);
    // Memory is more urgent, and does not delay the disk's count.
    let both = check(full, host(0, 0));
    assert_eq!(both, [("1".to_owned(), disk), ("2".to_owned(), memory)]);
    // The count starts again after a check that found enough space.
    assert_eq!(check(sufficient, full), [("2".to_owned(), disk)]);
    assert_eq!(check(full, sufficient), []);
}

#[test]
fn pods_are_grouped_by_host_address() {
    let candidate = |name: &str, ip: &str| {
        let status = match ip {
            "" => json!({}),
            ip => json!({ "hostIPs": [{ "ip": ip }] }),
        };
        let pod: Pod =
            serde_json::from_value(json!({ "metadata": { "name": name }, "status": status }))
                .unwrap();
        let memory = json!({ "usage": 0, "working_set": 0, "rss": 0, "page_faults": 0, "major_page_faults": 0 });
        let usage = json!({
            "at": "2026-01-01T00:00:00Z", "cpu_ns": 0, "memory": memory, "processes": 1,
            "interfaces": [], "containers": [], "volumes": [],
        });
        let usage: PodUsage = serde_json::from_value(usage).unwrap();
        EvictionCandidate {
            pod: Arc::new(pod),
            usage,
        }
    };
    let machines = by_machine(vec![
        candidate("a", "10.0.0.1"),
        candidate("b", "10.0.0.2"),
        candidate("c", "10.0.0.1"),
        candidate("new", ""),
    ]);
    assert_eq!(machines.len(), 2);
    assert_eq!(machines[&machine("10.0.0.1")].len(), 2);
    assert_eq!(machines[&machine("10.0.0.2")].len(), 1);
}
