//! `GET /metrics/cadvisor`: container metrics with cAdvisor's names and labels, which common dashboards use.

use std::collections::HashMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use quantity::Amount;

use super::exposition::{Exposition, seconds, unix_seconds};
use crate::stats::summary::{
    ContainerStats, IoStats, MemoryStats, NetworkStats, PodStats, ThrottlingStats,
};
use crate::stats::{MachineInfo, MeasuredSummary};

/// The CFS period, in microseconds.
const CFS_PERIOD_USEC: f64 = 100_000.0;

pub(super) fn render(
    measured: &MeasuredSummary,
    pods: &[Arc<Pod>],
    machine: &MachineInfo,
) -> String {
    let mut metrics = Exposition::default();
    add_machine(&mut metrics, machine);
    let pods_by_uid: HashMap<&str, &Pod> = pods
        .iter()
        .filter_map(|pod| Some((pod.metadata.uid.as_deref()?, &**pod)))
        .collect();
    for stats in &measured.summary.pods {
        add_pod(&mut metrics, stats);
        let pod = pods_by_uid.get(stats.pod_ref.uid.as_str());
        for container in &stats.containers {
            let (spec, status) =
                pod.map_or((None, None), |pod| find_container(pod, &container.name));
            add_container(&mut metrics, stats, container, spec, status);
        }
    }
    let error = f64::from(u8::from(measured.incomplete));
    let help = "1 if there was an error while getting container metrics, 0 otherwise";
    metrics
        .gauge("container_scrape_error", help)
        .value(&[], error);
    metrics.render()
}

fn add_machine(metrics: &mut Exposition, machine: &MachineInfo) {
    let labels = [
        ("boot_id", machine.boot_id.as_str()),
        ("machine_id", machine.machine_id.as_str()),
        ("system_uuid", machine.system_uuid.as_str()),
    ];
    metrics
        .gauge("machine_cpu_cores", "Number of logical CPU cores.")
        .value(&labels, f64::from(machine.cpus));
    metrics
        .gauge(
            "machine_memory_bytes",
            "Amount of memory installed on the machine.",
        )
        .value(&labels, machine.memory_bytes as f64);
    let labels = [
        ("cadvisorVersion", ""),
        ("kernelVersion", machine.kernel_version.as_str()),
        ("osVersion", machine.os_version.as_str()),
    ];
    let help = "A metric with a constant '1' value labeled by kernel version, OS version and cadvisor version.";
    metrics
        .gauge("cadvisor_version_info", help)
        .value(&labels, 1.0);
}

/// Samples of a whole pod. Their container label is empty.
fn add_pod(metrics: &mut Exposition, pod: &PodStats) {
    let id = format!("/pod{}", pod.pod_ref.uid);
    let labels = labels(pod, "", &id, "", "");
    if let Some(cpu) = &pod.usage.cpu {
        let total = [("cpu", "total")];
        add_cpu_seconds(
            metrics,
            &with_labels(&total, &labels),
            cpu.usage_core_nano_seconds,
        );
    }
    if let Some(memory) = &pod.usage.memory {
        add_memory(metrics, &labels, memory);
    }
    if let Some(processes) = &pod.process_stats {
        add_processes(metrics, &labels, processes.process_count);
    }
    if let Some(network) = &pod.network {
        add_network(metrics, &labels, network);
    }
    add_last_seen(metrics, &labels, pod.usage.cpu.as_ref().map(|cpu| cpu.time));
}

fn add_container(
    metrics: &mut Exposition,
    pod: &PodStats,
    container: &ContainerStats,
    spec: Option<&Container>,
    status: Option<&ContainerStatus>,
) {
    let name = status.and_then(|status| status.container_id.as_deref());
    let name = name.unwrap_or_default();
    let name = name.split_once("://").map_or(name, |(_, id)| id);
    let id = format!("/pod{}/{name}", pod.pod_ref.uid);
    let image = status.map_or("", |status| status.image.as_str());
    let labels = labels(pod, &container.name, &id, image, name);
    if let Some(cpu) = &container.usage.cpu {
        let total = [("cpu", "total")];
        add_cpu_seconds(
            metrics,
            &with_labels(&total, &labels),
            cpu.usage_core_nano_seconds,
        );
    }
    if let Some(throttling) = &container.throttling {
        add_throttling(metrics, &labels, throttling);
    }
    if let Some(memory) = &container.usage.memory {
        add_memory(metrics, &labels, memory);
    }
    add_processes(metrics, &labels, container.processes);
    if let Some(root) = &container.rootfs {
        let logs = container.logs.map_or(0, |logs| logs.used_bytes);
        let labels = with_labels(&[("device", "")], &labels);
        let help = "Number of bytes that are consumed by the container on this filesystem.";
        metrics
            .gauge("container_fs_usage_bytes", help)
            .value(&labels, (root.used_bytes + logs) as f64);
        let help = "Number of bytes that can be consumed by the container on this filesystem.";
        metrics
            .gauge("container_fs_limit_bytes", help)
            .value(&labels, root.capacity_bytes as f64);
        metrics
            .gauge("container_fs_inodes_total", "Number of Inodes")
            .value(&labels, root.inodes as f64);
        metrics
            .gauge("container_fs_inodes_free", "Number of available Inodes")
            .value(&labels, root.inodes_free as f64);
    }
    add_io(
        metrics,
        &with_labels(&[("device", "")], &labels),
        &container.io,
    );
    let help = "Start time of the container since unix epoch in seconds.";
    metrics
        .gauge("container_start_time_seconds", help)
        .value(&labels, unix_seconds(container.usage.start_time));
    add_last_seen(
        metrics,
        &labels,
        container.usage.cpu.as_ref().map(|cpu| cpu.time),
    );
    add_spec(metrics, &labels, spec);
}

/// Requests and limits of a container, from its spec.
fn add_spec(metrics: &mut Exposition, labels: &[(&str, &str)], spec: Option<&Container>) {
    let resources = spec.and_then(|spec| spec.resources.as_ref());
    let limit = |name: &str| resources?.limits.as_ref()?.get(name).and_then(value);
    let request = |name: &str| resources?.requests.as_ref()?.get(name).and_then(value);
    let memory = limit("memory").unwrap_or(0.0);
    metrics
        .gauge(
            "container_spec_memory_limit_bytes",
            "Memory limit for the container.",
        )
        .value(labels, memory);
    // As in cgroup v1: one CPU is 1024 shares, and the minimum is 2.
    let shares = request("cpu").map_or(2.0, |cpus| (cpus * 1024.0).floor().max(2.0));
    metrics
        .gauge("container_spec_cpu_shares", "CPU share of the container.")
        .value(labels, shares);
    metrics
        .gauge("container_spec_cpu_period", "CPU period of the container.")
        .value(labels, CFS_PERIOD_USEC);
    if let Some(cpus) = limit("cpu") {
        metrics
            .gauge("container_spec_cpu_quota", "CPU quota of the container.")
            .value(labels, (cpus * CFS_PERIOD_USEC).round());
    }
}

fn value(quantity: &Quantity) -> Option<f64> {
    Amount::of(quantity).map(Amount::to_f64)
}

fn add_cpu_seconds(metrics: &mut Exposition, labels: &[(&str, &str)], nanoseconds: u64) {
    let help = "Cumulative cpu time consumed in seconds.";
    metrics
        .counter("container_cpu_usage_seconds_total", help)
        .value(labels, seconds(nanoseconds));
}

fn add_throttling(metrics: &mut Exposition, labels: &[(&str, &str)], throttling: &ThrottlingStats) {
    let help = "Number of elapsed enforcement period intervals.";
    metrics
        .counter("container_cpu_cfs_periods_total", help)
        .value(labels, throttling.periods as f64);
    let help = "Number of throttled period intervals.";
    metrics
        .counter("container_cpu_cfs_throttled_periods_total", help)
        .value(labels, throttling.throttled_periods as f64);
    let help = "Total time duration the container has been throttled.";
    metrics
        .counter("container_cpu_cfs_throttled_seconds_total", help)
        .value(labels, seconds(throttling.throttled_ns));
}

/// Samples of all disks together, with an empty `device` label, as for disk usage.
fn add_io(metrics: &mut Exposition, labels: &[(&str, &str)], io: &IoStats) {
    let counters = [
        (
            "container_fs_reads_total",
            "Cumulative count of reads completed",
            io.reads,
        ),
        (
            "container_fs_reads_bytes_total",
            "Cumulative count of bytes read",
            io.read_bytes,
        ),
        (
            "container_fs_writes_total",
            "Cumulative count of writes completed",
            io.writes,
        ),
        (
            "container_fs_writes_bytes_total",
            "Cumulative count of bytes written",
            io.written_bytes,
        ),
    ];
    for (name, help, count) in counters {
        if let Some(count) = count {
            metrics.counter(name, help).value(labels, count as f64);
        }
    }
}

fn add_memory(metrics: &mut Exposition, labels: &[(&str, &str)], memory: &MemoryStats) {
    let help =
        "Current memory usage in bytes, including all memory regardless of when it was accessed";
    metrics
        .gauge("container_memory_usage_bytes", help)
        .value(labels, memory.usage_bytes as f64);
    metrics
        .gauge(
            "container_memory_working_set_bytes",
            "Current working set in bytes.",
        )
        .value(labels, memory.working_set_bytes as f64);
    metrics
        .gauge("container_memory_rss", "Size of RSS in bytes.")
        .value(labels, memory.rss_bytes as f64);
    let cache = memory.usage_bytes.saturating_sub(memory.rss_bytes);
    metrics
        .gauge(
            "container_memory_cache",
            "Number of bytes of page cache memory.",
        )
        .value(labels, cache as f64);
    if let Some(swap) = memory.swap_bytes {
        metrics
            .gauge("container_memory_swap", "Container swap usage in bytes.")
            .value(labels, swap as f64);
    }
    let help = "Cumulative count of memory allocation failures.";
    let faults = [
        ("pgfault", memory.page_faults),
        ("pgmajfault", memory.major_page_faults),
    ];
    for (kind, count) in faults {
        let extra = [("failure_type", kind), ("scope", "container")];
        metrics
            .counter("container_memory_failures_total", help)
            .value(&with_labels(&extra, labels), count as f64);
    }
}

fn add_processes(metrics: &mut Exposition, labels: &[(&str, &str)], count: u64) {
    let help = "Number of processes running inside the container.";
    metrics
        .gauge("container_processes", help)
        .value(labels, count as f64);
}

fn add_network(metrics: &mut Exposition, labels: &[(&str, &str)], network: &NetworkStats) {
    for interface in &network.interfaces {
        let labels = with_labels(&[("interface", interface.name.as_str())], labels);
        let ((received, dropped_rx), (sent, dropped_tx)) =
            (interface.rx_packets, interface.tx_packets);
        let counters = [
            (
                "container_network_receive_bytes_total",
                "Cumulative count of bytes received",
                interface.rx_bytes,
            ),
            (
                "container_network_receive_errors_total",
                "Cumulative count of errors encountered while receiving",
                interface.rx_errors,
            ),
            (
                "container_network_receive_packets_total",
                "Cumulative count of packets received",
                received,
            ),
            (
                "container_network_receive_packets_dropped_total",
                "Cumulative count of packets dropped while receiving",
                dropped_rx,
            ),
            (
                "container_network_transmit_bytes_total",
                "Cumulative count of bytes transmitted",
                interface.tx_bytes,
            ),
            (
                "container_network_transmit_errors_total",
                "Cumulative count of errors encountered while transmitting",
                interface.tx_errors,
            ),
            (
                "container_network_transmit_packets_total",
                "Cumulative count of packets transmitted",
                sent,
            ),
            (
                "container_network_transmit_packets_dropped_total",
                "Cumulative count of packets dropped while transmitting",
                dropped_tx,
            ),
        ];
        for (name, help, count) in counters {
            metrics.counter(name, help).value(&labels, count as f64);
        }
    }
}

fn add_last_seen(metrics: &mut Exposition, labels: &[(&str, &str)], time: Option<jiff::Timestamp>) {
    if let Some(time) = time {
        let help = "Last time a container was seen by the exporter";
        metrics
            .gauge("container_last_seen", help)
            .value(labels, unix_seconds(time).floor());
    }
}

fn labels<'a>(
    pod: &'a PodStats,
    container: &'a str,
    id: &'a str,
    image: &'a str,
    name: &'a str,
) -> Vec<(&'a str, &'a str)> {
    vec![
        ("container", container),
        ("id", id),
        ("image", image),
        ("name", name),
        ("namespace", &pod.pod_ref.namespace),
        ("pod", &pod.pod_ref.name),
    ]
}

fn with_labels<'a>(
    extra: &[(&'a str, &'a str)],
    labels: &[(&'a str, &'a str)],
) -> Vec<(&'a str, &'a str)> {
    let mut all = [labels, extra].concat();
    all.sort_unstable();
    all
}

/// The spec and the status of a container of any kind.
fn find_container<'a>(
    pod: &'a Pod,
    name: &str,
) -> (Option<&'a Container>, Option<&'a ContainerStatus>) {
    let specs = pod.spec.iter().flat_map(|spec| {
        let init = spec.init_containers.iter().flatten();
        spec.containers.iter().chain(init)
    });
    let statuses = pod.status.iter().flat_map(|status| {
        let main = status.container_statuses.iter().flatten();
        main.chain(status.init_container_statuses.iter().flatten())
            .chain(status.ephemeral_container_statuses.iter().flatten())
    });
    (
        specs.into_iter().find(|spec| spec.name == name),
        statuses.into_iter().find(|status| status.name == name),
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::stats::tests::example;

    #[test]
    fn names_and_labels_match_cadvisor() {
        let pod = serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "default", "uid": "u1"},
            "spec": {"containers": [{"name": "main", "image": "i", "resources": {
                "requests": {"cpu": "500m"}, "limits": {"cpu": "1500m", "memory": "64Mi"},
            }}]},
            "status": {"containerStatuses": [{"name": "main", "image": "docker.io/library/i:1",
                "imageID": "", "ready": true, "restartCount": 0, "containerID": "coracle://abc"}]},
        }));
        let machine = MachineInfo {
            node: "node1".to_owned(),
            cpus: 2,
            memory_bytes: 1 << 30,
            machine_id: "m".to_owned(),
            system_uuid: "s".to_owned(),
            boot_id: "b".to_owned(),
            kubelet_version: "v1".to_owned(),
            kernel_version: "5.14".to_owned(),
            os_version: "Rocky".to_owned(),
        };
        let mut measured = MeasuredSummary {
            summary: example(),
            incomplete: false,
        };
        let container = &mut measured.summary.pods[0].containers[0];
        container.throttling = Some(ThrottlingStats {
            periods: 9,
            throttled_periods: 3,
            throttled_ns: 70,
        });
        container.io = IoStats {
            reads: Some(4),
            read_bytes: Some(16_384),
            writes: None,
            written_bytes: Some(8192),
        };
        if let Some(memory) = &mut container.usage.memory {
            memory.swap_bytes = Some(512);
        }
        insta::assert_snapshot!(render(&measured, &[Arc::new(pod.unwrap())], &machine));
    }
}
