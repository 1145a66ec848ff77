//! `GET /metrics`: the kubelet itself, and its pods, containers and volumes.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{ContainerState, Pod};

use super::exposition::Exposition;
use crate::PodPhase;
use crate::stats::summary::{FsStats, VolumeStats};
use crate::stats::{MachineInfo, MeasuredSummary};

/// The kubelet's process.
pub(super) struct KubeletProcess {
    pub cpu_seconds: f64,
    pub resident: f64,
    pub virtual_memory: f64,
    pub open_files: f64,
    pub max_files: f64,
    pub started: Option<f64>,
}

pub(super) fn render(
    measured: &MeasuredSummary,
    pods: &[Arc<Pod>],
    machine: &MachineInfo,
    process: Option<&KubeletProcess>,
) -> String {
    let mut metrics = Exposition::default();
    let help = "[ALPHA] The node's name. The count is always 1.";
    metrics
        .gauge("kubelet_node_name", help)
        .value(&[("node", &machine.node)], 1.0);
    let help = "[ALPHA] A metric with a constant '1' value labeled by the version of the kubelet.";
    metrics
        .gauge("kubernetes_build_info", help)
        .value(&[("git_version", &machine.kubelet_version)], 1.0);
    let is_running = |pod: &&Arc<Pod>| PodPhase::of(pod.status.as_ref()) == PodPhase::Running;
    let running = pods.iter().filter(is_running).count();
    metrics
        .gauge(
            "kubelet_running_pods",
            "[ALPHA] Number of pods that have a running pod sandbox",
        )
        .value(&[], running as f64);
    for (state, count) in containers_by_state(pods) {
        metrics
            .gauge(
                "kubelet_running_containers",
                "[ALPHA] Number of containers currently running",
            )
            .value(&[("container_state", state)], f64::from(count));
    }
    let help = "[ALPHA] The number of pods the kubelet is being instructed to run.";
    metrics
        .gauge("kubelet_desired_pods", help)
        .value(&[], pods.len() as f64);
    for pod in &measured.summary.pods {
        for volume in &pod.volume_stats {
            add_claim(&mut metrics, volume);
        }
    }
    if let Some(process) = process {
        add_process(&mut metrics, process);
    }
    metrics.render()
}

fn containers_by_state(pods: &[Arc<Pod>]) -> [(&'static str, u32); 3] {
    let mut counts = [("created", 0), ("exited", 0), ("running", 0)];
    let statuses = pods.iter().filter_map(|pod| pod.status.as_ref());
    let containers = statuses.flat_map(|status| {
        let main = status.container_statuses.iter().flatten();
        main.chain(status.init_container_statuses.iter().flatten())
            .chain(status.ephemeral_container_statuses.iter().flatten())
    });
    for state in containers.filter_map(|container| container.state.as_ref()) {
        let index = match state {
            ContainerState {
                running: Some(_), ..
            } => 2,
            ContainerState {
                terminated: Some(_),
                ..
            } => 1,
            _ => 0,
        };
        counts[index].1 += 1;
    }
    counts
}

fn add_claim(metrics: &mut Exposition, volume: &VolumeStats) {
    let Some(claim) = &volume.pvc_ref else { return };
    let labels = [
        ("namespace", claim.namespace.as_str()),
        ("persistentvolumeclaim", claim.name.as_str()),
    ];
    let FsStats {
        available_bytes,
        capacity_bytes,
        used_bytes,
        inodes_free,
        inodes,
        inodes_used,
        ..
    } = volume.fs;
    let gauges = [
        (
            "kubelet_volume_stats_available_bytes",
            "[ALPHA] Number of available bytes in the volume",
            available_bytes,
        ),
        (
            "kubelet_volume_stats_capacity_bytes",
            "[ALPHA] Capacity in bytes of the volume",
            capacity_bytes,
        ),
        (
            "kubelet_volume_stats_used_bytes",
            "[ALPHA] Number of used bytes in the volume",
            used_bytes,
        ),
        (
            "kubelet_volume_stats_inodes_free",
            "[ALPHA] Number of free inodes in the volume",
            inodes_free,
        ),
        (
            "kubelet_volume_stats_inodes",
            "[ALPHA] Maximum number of inodes in the volume",
            inodes,
        ),
        (
            "kubelet_volume_stats_inodes_used",
            "[ALPHA] Number of used inodes in the volume",
            inodes_used,
        ),
    ];
    for (name, help, value) in gauges {
        metrics.gauge(name, help).value(&labels, value as f64);
    }
}

fn add_process(metrics: &mut Exposition, process: &KubeletProcess) {
    let help = "Total user and system CPU time spent in seconds.";
    metrics
        .counter("process_cpu_seconds_total", help)
        .value(&[], process.cpu_seconds);
    let gauges = [
        (
            "process_resident_memory_bytes",
            "Resident memory size in bytes.",
            process.resident,
        ),
        (
            "process_virtual_memory_bytes",
            "Virtual memory size in bytes.",
            process.virtual_memory,
        ),
        (
            "process_open_fds",
            "Number of open file descriptors.",
            process.open_files,
        ),
        (
            "process_max_fds",
            "Maximum number of open file descriptors.",
            process.max_files,
        ),
    ];
    for (name, help, value) in gauges {
        metrics.gauge(name, help).value(&[], value);
    }
    if let Some(started) = process.started {
        let help = "Start time of the process since unix epoch in seconds.";
        metrics
            .gauge("process_start_time_seconds", help)
            .value(&[], started);
    }
}

impl KubeletProcess {
    /// Reads the stats of this process.
    pub(super) fn read() -> Option<Self> {
        let pid = i32::try_from(std::process::id()).ok()?;
        let sample = linux::usage::ProcessSample::of(pid)?;
        let files = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let ticks = rustix::param::clock_ticks_per_second().max(1);
        let boot = linux::usage::boot_time();
        Some(Self {
            cpu_seconds: sample.cpu.as_secs_f64(),
            resident: sample.resident as f64,
            virtual_memory: sample.virtual_bytes as f64,
            open_files: files as f64,
            max_files: limit.unwrap_or(u64::MAX) as f64,
            started: boot.map(|boot| boot as f64 + sample.started as f64 / ticks as f64),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::stats::tests::example;

    #[test]
    fn metrics_cover_pods_and_own_process() {
        let pod = serde_json::from_value(json!({
            "metadata": {"name": "web"},
            "status": {"phase": "Running", "containerStatuses": [
                {"name": "a", "image": "", "imageID": "", "ready": true, "restartCount": 0, "state": {"running": {}}},
                {"name": "b", "image": "", "imageID": "", "ready": true, "restartCount": 0, "state": {"terminated": {"exitCode": 1}}},
            ]},
        }));
        let process = KubeletProcess {
            cpu_seconds: 1.5,
            resident: 4096.0,
            virtual_memory: 8192.0,
            open_files: 10.0,
            max_files: 1024.0,
            started: Some(1e9),
        };
        let measured = MeasuredSummary {
            summary: example(),
            incomplete: false,
        };
        let machine = MachineInfo {
            node: "node1".to_owned(),
            kubelet_version: "v1.37.1+coracle-0.1.0".to_owned(),
            ..MachineInfo::default()
        };
        let pods = [Arc::new(pod.unwrap())];
        insta::assert_snapshot!(render(&measured, &pods, &machine, Some(&process)));
        assert!(KubeletProcess::read().unwrap().resident > 0.0);
    }
}
