//! Upstream's `Summary` of a node and its pods (`stats.kubelet.k8s.io/v1alpha1`).
//!
//! Times have fractions of seconds, which upstream's parsers accept, so that rates over short times are accurate. Fields that are not
//! serialised do not exist in upstream's type; `/metrics/cadvisor` and `/metrics/probes` use them.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// Upstream's `Summary`: a node and its pods.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StatsSummary {
    /// The node.
    pub node: NodeStats,
    /// Its pods.
    pub pods: Vec<PodStats>,
}

/// The node: the job's share of the machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStats {
    /// Its name.
    pub node_name: String,
    /// Not containers of pods: `kubelet`, and `pods`, the sum of all pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub system_containers: Vec<ContainerStats>,
    /// CPU and memory usage.
    #[serde(flatten)]
    pub usage: UsageStats,
    /// The host's network interfaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkStats>,
    /// The file system of the local scratch directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fs: Option<FsStats>,
    /// The file systems of images and containers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime: Option<RuntimeStats>,
    /// Process limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rlimit: Option<RlimitStats>,
}

/// CPU and memory usage of a node, pod or container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UsageStats {
    /// Start of the measurement.
    pub start_time: Timestamp,
    /// CPU usage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuStats>,
    /// Memory usage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryStats>,
}

/// File systems of the container runtime.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RuntimeStats {
    /// The file system of unpacked images.
    pub image_fs: FsStats,
    /// The file system of writable container layers.
    pub container_fs: FsStats,
}

/// Processes of the machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RlimitStats {
    /// Time of the measurement.
    pub time: Timestamp,
    /// Maximum number of processes.
    pub maxpid: i64,
    /// Current number of processes.
    pub curproc: i64,
}

/// Stats of a pod.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodStats {
    /// The pod.
    pub pod_ref: PodReference,
    /// CPU and memory usage.
    #[serde(flatten)]
    pub usage: UsageStats,
    /// Its running containers.
    pub containers: Vec<ContainerStats>,
    /// Its network, unless it uses the host's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkStats>,
    /// Its volumes.
    #[serde(default, rename = "volume", skip_serializing_if = "Vec::is_empty")]
    pub volume_stats: Vec<VolumeStats>,
    /// Its usage of local disk.
    #[serde(
        default,
        rename = "ephemeral-storage",
        skip_serializing_if = "Option::is_none"
    )]
    pub ephemeral_storage: Option<FsStats>,
    /// Its processes.
    #[serde(
        default,
        rename = "process_stats",
        skip_serializing_if = "Option::is_none"
    )]
    pub process_stats: Option<ProcessStats>,
    /// Results of its containers' probes, for `/metrics/probes`.
    #[serde(skip)]
    pub probes: Vec<ProbeStats>,
}

/// The number of results of one kind of probe, with the label values of upstream's metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeStats {
    /// The container.
    pub container: String,
    /// `Startup`, `Liveness` or `Readiness`.
    pub kind: String,
    /// `successful`, `failed`, `warning` or `unknown`.
    pub result: String,
    /// The number of such results.
    pub count: u64,
}

/// Processes of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessStats {
    /// The number of processes.
    pub process_count: u64,
}

/// A reference to a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodReference {
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Its uid.
    pub uid: String,
}

/// Stats of a container.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerStats {
    /// Its name.
    pub name: String,
    /// CPU and memory usage.
    #[serde(flatten)]
    pub usage: UsageStats,
    /// Its writable layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rootfs: Option<FsStats>,
    /// Its logs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logs: Option<FsStats>,
    /// The number of its processes.
    #[serde(skip)]
    pub processes: u64,
    /// CPU throttling, if known.
    #[serde(skip)]
    pub throttling: Option<ThrottlingStats>,
    /// Disk I/O, as far as known.
    #[serde(skip)]
    pub io: IoStats,
}

/// CPU throttling of a container by its limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThrottlingStats {
    /// Enforcement periods in which it was runnable.
    pub periods: u64,
    /// Periods in which it was throttled.
    pub throttled_periods: u64,
    /// Total throttled time, in nanoseconds.
    pub throttled_ns: u64,
}

/// Disk I/O; `None` if unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoStats {
    /// Number of reads.
    pub reads: Option<u64>,
    /// Bytes read.
    pub read_bytes: Option<u64>,
    /// Number of writes.
    pub writes: Option<u64>,
    /// Bytes written.
    pub written_bytes: Option<u64>,
}

/// CPU usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CpuStats {
    /// Time of the measurement.
    pub time: Timestamp,
    /// Recent usage, in billionths of a core.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage_nano_cores: Option<u64>,
    /// Cumulative CPU time, in nanoseconds.
    pub usage_core_nano_seconds: u64,
}

/// Memory usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MemoryStats {
    /// Time of the measurement.
    pub time: Timestamp,
    /// Limit minus working set, if there is a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub available_bytes: Option<u64>,
    /// Total usage, including page cache.
    pub usage_bytes: u64,
    /// Memory that the kernel cannot reclaim easily.
    pub working_set_bytes: u64,
    /// Anonymous memory.
    pub rss_bytes: u64,
    /// Cumulative page faults.
    pub page_faults: u64,
    /// Cumulative major page faults.
    pub major_page_faults: u64,
    /// Swapped memory, if known.
    #[serde(skip)]
    pub swap_bytes: Option<u64>,
}

/// Network usage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NetworkStats {
    /// Time of the measurement.
    pub time: Timestamp,
    /// The default interface.
    #[serde(flatten)]
    pub default: InterfaceStats,
    /// All interfaces.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub interfaces: Vec<InterfaceStats>,
}

/// Cumulative counters of an interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InterfaceStats {
    /// Its name.
    pub name: String,
    /// Received bytes.
    pub rx_bytes: u64,
    /// Receive errors.
    pub rx_errors: u64,
    /// Transmitted bytes.
    pub tx_bytes: u64,
    /// Transmit errors.
    pub tx_errors: u64,
    /// Received packets, and dropped ones.
    #[serde(skip)]
    pub rx_packets: (u64, u64),
    /// Transmitted packets, and dropped ones.
    #[serde(skip)]
    pub tx_packets: (u64, u64),
}

/// Stats of a volume.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeStats {
    /// Its disk usage.
    #[serde(flatten)]
    pub fs: FsStats,
    /// Its name in the pod.
    pub name: String,
    /// Its PersistentVolumeClaim, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pvc_ref: Option<PvcReference>,
}

/// A reference to a PersistentVolumeClaim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PvcReference {
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
}

/// Usage of a directory and of its file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsStats {
    /// Time of the measurement.
    pub time: Timestamp,
    /// Free bytes of the file system.
    pub available_bytes: u64,
    /// Size of the file system.
    pub capacity_bytes: u64,
    /// Bytes used by the directory.
    pub used_bytes: u64,
    /// Free inodes of the file system.
    pub inodes_free: u64,
    /// Inodes of the file system.
    pub inodes: u64,
    /// Inodes used by the directory.
    pub inodes_used: u64,
}

impl StatsSummary {
    /// Removes all stats except CPU and memory.
    pub fn only_cpu_and_memory(mut self) -> Self {
        let node = &mut self.node;
        (node.network, node.fs, node.runtime, node.rlimit) = (None, None, None, None);
        for pod in &mut self.pods {
            pod.network = None;
            pod.volume_stats.clear();
            (pod.ephemeral_storage, pod.process_stats) = (None, None);
            for container in &mut pod.containers {
                (container.rootfs, container.logs) = (None, None);
            }
        }
        self
    }
}
