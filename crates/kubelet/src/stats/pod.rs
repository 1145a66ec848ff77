//! Converts a sandbox's usage report to upstream's pod statistics.

use k8s_openapi::api::core::v1::{Container, Pod, Volume};
use k8s_openapi::jiff::Timestamp;
use kubelet_api::stats::summary::{
    ContainerStats, CpuStats, FsStats, InterfaceStats, IoStats, MemoryStats, NetworkStats,
    PodReference, PodStats, ProbeStats, ProcessStats, PvcReference, ThrottlingStats, UsageStats,
    VolumeStats,
};
use pod_protocol::usage::{
    ContainerUsage, DiskUsage, InterfaceUsage, MemoryUsage, PodUsage, ProbeCount,
};

use super::cpu_rates::RatesRound;
use crate::pods::is_on_disk;

/// The pod's network interface.
const POD_INTERFACE: &str = "eth0";

pub(super) fn pod_stats(pod: &Pod, usage: &PodUsage, rates: &mut RatesRound<'_>) -> PodStats {
    let meta = &pod.metadata;
    let uid = meta.uid.clone().unwrap_or_default();
    let status = pod.status.as_ref();
    let started = status.and_then(|status| status.start_time.as_ref());
    let started = started.map_or(usage.at, |time| time.0);
    let containers = usage
        .containers
        .iter()
        .map(|container| container_stats(pod, container, usage.at, rates))
        .collect();
    PodStats {
        usage: usage_stats(
            &uid,
            usage.cpu_ns,
            memory_stats(&usage.memory, None, usage.at),
            started,
            rates,
        ),
        containers,
        network: network_stats(&usage.interfaces, usage.at),
        volume_stats: volume_stats(pod, usage),
        ephemeral_storage: ephemeral_storage(pod, usage),
        process_stats: Some(ProcessStats {
            process_count: usage.processes,
        }),
        probes: usage.probes.iter().map(probe_stats).collect(),
        pod_ref: PodReference {
            name: meta.name.clone().unwrap_or_default(),
            namespace: meta.namespace.clone().unwrap_or_default(),
            uid,
        },
    }
}

fn probe_stats(count: &ProbeCount) -> ProbeStats {
    ProbeStats {
        container: count.container.clone(),
        kind: count.kind.clone(),
        result: count.result.clone(),
        count: count.count,
    }
}

fn container_stats(
    pod: &Pod,
    usage: &ContainerUsage,
    at: Timestamp,
    rates: &mut RatesRound<'_>,
) -> ContainerStats {
    let limit = find_container(pod, &usage.name).and_then(memory_limit);
    ContainerStats {
        name: usage.name.clone(),
        usage: usage_stats(
            &usage.id,
            usage.cpu_ns,
            memory_stats(&usage.memory, limit, at),
            usage.started,
            rates,
        ),
        rootfs: usage.root.map(|disk| fs_stats(&disk, at)),
        logs: usage.logs.map(|disk| fs_stats(&disk, at)),
        processes: usage.processes,
        throttling: usage.throttling.map(|counted| ThrottlingStats {
            periods: counted.periods,
            throttled_periods: counted.throttled_periods,
            throttled_ns: counted.throttled_ns,
        }),
        io: IoStats {
            reads: usage.io.reads,
            read_bytes: usage.io.read_bytes,
            writes: usage.io.writes,
            written_bytes: usage.io.written_bytes,
        },
    }
}

/// CPU and memory statistics of a container, pod or node. `name` identifies it in `rates`; `cpu_ns` is its CPU time since `started`.
pub(super) fn usage_stats(
    name: &str,
    cpu_ns: u64,
    memory: MemoryStats,
    started: Timestamp,
    rates: &mut RatesRound<'_>,
) -> UsageStats {
    UsageStats {
        start_time: started,
        cpu: Some(CpuStats {
            time: memory.time,
            usage_nano_cores: rates.record(name, memory.time, cpu_ns, started),
            usage_core_nano_seconds: cpu_ns,
        }),
        memory: Some(memory),
    }
}

pub(super) fn memory_stats(usage: &MemoryUsage, limit: Option<u64>, at: Timestamp) -> MemoryStats {
    MemoryStats {
        time: at,
        available_bytes: limit.map(|limit| limit.saturating_sub(usage.working_set)),
        usage_bytes: usage.usage,
        working_set_bytes: usage.working_set,
        rss_bytes: usage.rss,
        page_faults: usage.page_faults,
        major_page_faults: usage.major_page_faults,
        swap_bytes: usage.swap,
    }
}

fn fs_stats(disk: &DiskUsage, at: Timestamp) -> FsStats {
    FsStats {
        time: at,
        available_bytes: disk.file_system.available,
        capacity_bytes: disk.file_system.capacity,
        used_bytes: disk.used,
        inodes_free: disk.file_system.inodes_free,
        inodes: disk.file_system.inodes,
        inodes_used: disk.inodes,
    }
}

fn network_stats(interfaces: &[InterfaceUsage], at: Timestamp) -> Option<NetworkStats> {
    let all: Vec<InterfaceStats> = interfaces
        .iter()
        .map(|interface| InterfaceStats {
            name: interface.name.clone(),
            rx_bytes: interface.received.bytes,
            rx_errors: interface.received.errors,
            tx_bytes: interface.sent.bytes,
            tx_errors: interface.sent.errors,
            rx_packets: (interface.received.packets, interface.received.dropped),
            tx_packets: (interface.sent.packets, interface.sent.dropped),
        })
        .collect();
    let default = all.iter().find(|interface| interface.name == POD_INTERFACE);
    Some(NetworkStats {
        time: at,
        default: default?.clone(),
        interfaces: all,
    })
}

fn volume_stats(pod: &Pod, usage: &PodUsage) -> Vec<VolumeStats> {
    let specs = pod
        .spec
        .iter()
        .flat_map(|spec| spec.volumes.iter().flatten());
    let specs: Vec<&Volume> = specs.collect();
    let namespace = pod.metadata.namespace.clone().unwrap_or_default();
    let owner = pod.metadata.name.clone().unwrap_or_default();
    let claim = |name: &str| {
        let spec = specs.iter().find(|spec| spec.name == name)?;
        let claimed = spec.persistent_volume_claim.as_ref();
        let name = match (claimed, &spec.ephemeral) {
            (Some(source), _) => source.claim_name.clone(),
            (None, Some(_)) => format!("{owner}-{name}"),
            (None, None) => return None,
        };
        Some(PvcReference {
            name,
            namespace: namespace.clone(),
        })
    };
    let volumes = usage.volumes.iter();
    volumes
        .map(|volume| VolumeStats {
            fs: fs_stats(&volume.disk, usage.at),
            name: volume.name.clone(),
            pvc_ref: claim(&volume.name),
        })
        .collect()
}

/// The pod's local storage: root file systems, logs, emptyDirs that are not in memory, and the pod's files of /etc.
fn ephemeral_storage(pod: &Pod, usage: &PodUsage) -> Option<FsStats> {
    let containers = usage.containers.iter();
    let container_disks = containers.flat_map(|container| [container.root, container.logs]);
    let volumes = usage.volumes.iter();
    let volume_disks = volumes
        .filter(|volume| is_on_disk(pod, &volume.name))
        .map(|volume| volume.disk);
    let all = container_disks
        .flatten()
        .chain(volume_disks)
        .chain(usage.etc);
    let sum = all.reduce(|sum, disk| DiskUsage {
        used: sum.used + disk.used,
        inodes: sum.inodes + disk.inodes,
        file_system: sum.file_system,
    });
    sum.map(|sum| fs_stats(&sum, usage.at))
}

fn find_container<'a>(pod: &'a Pod, name: &str) -> Option<&'a Container> {
    let spec = pod.spec.as_ref()?;
    let init = spec.init_containers.iter().flatten();
    spec.containers
        .iter()
        .chain(init)
        .find(|spec| spec.name == name)
}

fn memory_limit(container: &Container) -> Option<u64> {
    let limits = container.resources.as_ref()?.limits.as_ref()?;
    quantity::bytes(limits.get("memory")?)
}

#[cfg(test)]
mod tests {
    use pod_protocol::usage::{FileSystem, HostResources, IoUsage, TrafficUsage, VolumeUsage};
    use serde_json::json;

    use super::super::cpu_rates::CpuRates;
    use super::*;

    #[test]
    fn pod_stats_of_usage() {
        let spec = serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "default", "uid": "u1"},
            "spec": {
                "containers": [{"name": "main", "resources": {"limits": {"memory": "1Mi"}}}],
                "volumes": [
                    {"name": "scratch", "emptyDir": {}},
                    {"name": "data", "persistentVolumeClaim": {"claimName": "claim"}},
                ],
            },
            "status": {"startTime": "2026-11-15T09:59:00Z"},
        }));
        let spec: Pod = spec.unwrap();
        let at: Timestamp = "2026-11-15T10:00:00Z".parse().unwrap();
        let disk = |used| DiskUsage {
            used,
            inodes: 2,
            file_system: FileSystem {
                capacity: 1000,
                available: 500,
                inodes: 100,
                inodes_free: 50,
            },
        };
        let memory = MemoryUsage {
            usage: 8192,
            working_set: 4096,
            rss: 2048,
            page_faults: 7,
            major_page_faults: 1,
            swap: None,
        };
        let traffic = |bytes| TrafficUsage {
            bytes,
            packets: 2,
            errors: 0,
            dropped: 1,
        };
        let usage = PodUsage {
            at,
            containers: vec![ContainerUsage {
                name: "main".to_owned(),
                id: "abc".to_owned(),
                started: "2026-11-15T09:59:50Z".parse().unwrap(),
                cpu_ns: 5_000_000_000,
                throttling: None,
                io: IoUsage::default(),
                memory,
                processes: 3,
                root: Some(disk(100)),
                logs: Some(disk(10)),
            }],
            cpu_ns: 6_000_000_000,
            memory,
            processes: 4,
            interfaces: vec![InterfaceUsage {
                name: "eth0".to_owned(),
                received: traffic(11),
                sent: traffic(22),
            }],
            volumes: vec![
                VolumeUsage {
                    name: "scratch".to_owned(),
                    disk: disk(1),
                },
                VolumeUsage {
                    name: "data".to_owned(),
                    disk: disk(999),
                },
            ],
            etc: Some(disk(2)),
            probes: Vec::new(),
            host: HostResources::default(),
        };
        let rates = CpuRates::default();
        insta::assert_json_snapshot!(pod_stats(&spec, &usage, &mut rates.begin_round()));
    }
}
