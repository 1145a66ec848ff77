//! Upstream's summary of a node and its pods (`stats.kubelet.k8s.io/v1alpha1`), in its own words.
//!
//! Times carry fractions of seconds, which upstream's readers take, so that rates over short times are right. What isn't
//! serialised here has no place in upstream's type, but has one in `/metrics/cadvisor`.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// A node and its pods.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StatsSummary {
    /// The node.
    pub node: NodeStats,
    /// Its pods.
    pub pods: Vec<PodStats>,
}

/// The node: what the job has of the machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStats {
    /// Its name.
    pub node_name: String,
    /// Parts of the node that are no pods: `kubelet` and `pods`, the sum of these.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub system_containers: Vec<ContainerStats>,
    /// What it uses.
    #[serde(flatten)]
    pub usage: UsageStats,
    /// The host's network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkStats>,
    /// Local scratch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fs: Option<FsStats>,
    /// Where images are unpacked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime: Option<RuntimeStats>,
    /// Numbers of processes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rlimit: Option<RlimitStats>,
}

/// What is said of nodes, pods and containers alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UsageStats {
    /// Since when it is measured.
    pub start_time: Timestamp,
    /// Processors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuStats>,
    /// Memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryStats>,
}

/// Where images and containers are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RuntimeStats {
    /// The file system of images.
    pub image_fs: FsStats,
    /// The file system of what containers change.
    pub container_fs: FsStats,
}

/// Numbers of processes, of the machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RlimitStats {
    /// When.
    pub time: Timestamp,
    /// The most.
    pub maxpid: i64,
    /// Now.
    pub curproc: i64,
}

/// A pod.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodStats {
    /// Which one.
    pub pod_ref: PodReference,
    /// What it uses.
    #[serde(flatten)]
    pub usage: UsageStats,
    /// Its containers that run.
    pub containers: Vec<ContainerStats>,
    /// Its network, if it is its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkStats>,
    /// Volumes.
    #[serde(default, rename = "volume", skip_serializing_if = "Vec::is_empty")]
    pub volume_stats: Vec<VolumeStats>,
    /// What it has written to local disk.
    #[serde(
        default,
        rename = "ephemeral-storage",
        skip_serializing_if = "Option::is_none"
    )]
    pub ephemeral_storage: Option<FsStats>,
    /// Processes.
    #[serde(
        default,
        rename = "process_stats",
        skip_serializing_if = "Option::is_none"
    )]
    pub process_stats: Option<ProcessStats>,
    /// Its containers' probes, for metrics only.
    #[serde(skip)]
    pub probes: Vec<ProbeStats>,
}

/// How often probes of one kind had one result; the words are those of upstream's metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeStats {
    /// The container.
    pub container: String,
    /// `Startup`, `Liveness` or `Readiness`.
    pub kind: String,
    /// `successful`, `failed`, `warning` or `unknown`.
    pub result: String,
    /// How often.
    pub count: u64,
}

/// Processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessStats {
    /// How many.
    pub process_count: u64,
}

/// Which pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodReference {
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Its uid.
    pub uid: String,
}

/// A container.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerStats {
    /// Its name.
    pub name: String,
    /// What it uses.
    #[serde(flatten)]
    pub usage: UsageStats,
    /// What it changed in its image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rootfs: Option<FsStats>,
    /// Its logs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logs: Option<FsStats>,
    /// How many processes it has.
    #[serde(skip)]
    pub processes: u64,
    /// How its limit of processors held it back, where that is known.
    #[serde(skip)]
    pub throttling: Option<ThrottlingStats>,
    /// Disks, as far as that is known.
    #[serde(skip)]
    pub io: IoStats,
}

/// How a limit of processors held a container back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThrottlingStats {
    /// Periods in which it wanted to run.
    pub periods: u64,
    /// Of these, those in which it was held back.
    pub throttled_periods: u64,
    /// For how long, in nanoseconds.
    pub throttled_ns: u64,
}

/// What came from disks and went to them; what isn't known is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoStats {
    /// How often was read.
    pub reads: Option<u64>,
    /// Bytes that were read.
    pub read_bytes: Option<u64>,
    /// How often was written.
    pub writes: Option<u64>,
    /// Bytes that were written.
    pub written_bytes: Option<u64>,
}

/// Processors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CpuStats {
    /// When.
    pub time: Timestamp,
    /// Billionths of a processor, lately.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage_nano_cores: Option<u64>,
    /// Nanoseconds, ever.
    pub usage_core_nano_seconds: u64,
}

/// Memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MemoryStats {
    /// When.
    pub time: Timestamp,
    /// What is left below its limit, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub available_bytes: Option<u64>,
    /// All.
    pub usage_bytes: u64,
    /// What can't be taken away at once.
    pub working_set_bytes: u64,
    /// What belongs to processes alone.
    pub rss_bytes: u64,
    /// Page faults, ever.
    pub page_faults: u64,
    /// Those that had to read.
    pub major_page_faults: u64,
    /// What was put out to swap, where that is known.
    #[serde(skip)]
    pub swap_bytes: Option<u64>,
}

/// A network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NetworkStats {
    /// When.
    pub time: Timestamp,
    /// The interface that most goes through.
    #[serde(flatten)]
    pub default: InterfaceStats,
    /// All of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub interfaces: Vec<InterfaceStats>,
}

/// Counters of an interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InterfaceStats {
    /// Its name.
    pub name: String,
    /// Bytes that came in.
    pub rx_bytes: u64,
    /// Of these packets, wrong ones.
    pub rx_errors: u64,
    /// Bytes that went out.
    pub tx_bytes: u64,
    /// Of these packets, wrong ones.
    pub tx_errors: u64,
    /// Packets that came in, and those that there was no room for.
    #[serde(skip)]
    pub rx_packets: (u64, u64),
    /// Packets that went out, and those that there was no room for.
    #[serde(skip)]
    pub tx_packets: (u64, u64),
}

/// A volume.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeStats {
    /// What it takes.
    #[serde(flatten)]
    pub fs: FsStats,
    /// Its name in the pod.
    pub name: String,
    /// The claim that it was made for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pvc_ref: Option<PvcReference>,
}

/// Which claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PvcReference {
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
}

/// A directory, and its file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FsStats {
    /// When.
    pub time: Timestamp,
    /// Bytes that may still be written.
    pub available_bytes: u64,
    /// Bytes of the file system.
    pub capacity_bytes: u64,
    /// Bytes that the directory takes.
    pub used_bytes: u64,
    /// Files that may still be made.
    pub inodes_free: u64,
    /// Files that the file system can have.
    pub inodes: u64,
    /// Files of the directory.
    pub inodes_used: u64,
}

impl StatsSummary {
    /// The same with processors and memory alone.
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
