//! Resource usage of a pod, as its sandbox measures it.

use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// A sandbox stops counting the files of a directory at this number, because walking more would take minutes, and reports what it
/// has counted so far.
pub const MAX_COUNTED_FILES: u64 = 500_000;

/// Resource usage of a pod.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PodUsage {
    /// When it was measured.
    pub at: Timestamp,
    /// The running containers.
    pub containers: Vec<ContainerUsage>,
    /// CPU time of all processes of the pod, including those that have exited.
    pub cpu_ns: u64,
    /// Memory of the whole pod.
    pub memory: MemoryUsage,
    /// Number of processes of the pod.
    pub processes: u64,
    /// Interfaces in the pod's network namespace; empty for host network pods.
    pub interfaces: Vec<InterfaceUsage>,
    /// Volumes whose usage can be measured.
    pub volumes: Vec<VolumeUsage>,
    /// The files below /etc that its containers share.
    #[serde(default)]
    pub etc: Option<DiskUsage>,
    /// Results of its containers' probes.
    #[serde(default)]
    pub probes: Vec<ProbeCount>,
    /// The machine on which the sandbox runs.
    #[serde(default)]
    pub host: HostResources,
}

/// Free resources of a machine. A value is `None` if it cannot be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostResources {
    /// Available memory, in bytes.
    pub available_memory: Option<u64>,
    /// The file system with the files of pods.
    pub scratch: Option<FileSystem>,
    /// The number of tasks (processes and threads), and their maximum.
    pub tasks: Option<(u64, u64)>,
}

/// The number of probes of one type with one result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeCount {
    /// The container.
    pub container: String,
    /// `Startup`, `Liveness` or `Readiness`, as in upstream's metrics.
    pub kind: String,
    /// `successful`, `failed`, `warning` or `unknown`, as in upstream's metrics.
    pub result: String,
    /// The number.
    pub count: u64,
}

/// Resource usage of a container.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ContainerUsage {
    /// Its name.
    pub name: String,
    /// Its id, without the prefix `coracle://`.
    pub id: String,
    /// When it was started.
    pub started: Timestamp,
    /// CPU time since then.
    pub cpu_ns: u64,
    /// CPU throttling; `None` without a cgroup that counts it.
    #[serde(default)]
    pub throttling: Option<ThrottlingUsage>,
    /// Disk IO, as far as it is known.
    #[serde(default)]
    pub io: IoUsage,
    /// Memory.
    pub memory: MemoryUsage,
    /// Number of its processes.
    pub processes: u64,
    /// Its writable layer.
    pub root: Option<DiskUsage>,
    /// Its logs, including those of earlier runs.
    pub logs: Option<DiskUsage>,
}

/// CPU throttling by CFS quota.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThrottlingUsage {
    /// Periods in which it was runnable.
    pub periods: u64,
    /// Periods in which it was throttled.
    pub throttled_periods: u64,
    /// Total throttled time, in nanoseconds.
    pub throttled_ns: u64,
}

/// Disk IO. Without a cgroup that counts it, only bytes are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IoUsage {
    /// Read operations.
    pub reads: Option<u64>,
    /// Bytes read.
    pub read_bytes: Option<u64>,
    /// Write operations.
    pub writes: Option<u64>,
    /// Bytes written.
    pub written_bytes: Option<u64>,
}

/// Memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryUsage {
    /// In total; with a cgroup, including page cache.
    pub usage: u64,
    /// Without page cache that can be reclaimed at once.
    pub working_set: u64,
    /// Anonymous memory.
    pub rss: u64,
    /// Total page faults.
    pub page_faults: u64,
    /// Total page faults that needed a read from disk.
    pub major_page_faults: u64,
    /// Swapped out, if known; not included in the other figures.
    #[serde(default)]
    pub swap: Option<u64>,
}

/// Disk usage of a directory, and its file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskUsage {
    /// Bytes used.
    pub used: u64,
    /// Files and directories.
    pub inodes: u64,
    /// The file system.
    pub file_system: FileSystem,
}

/// Capacity of a file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSystem {
    /// Bytes in total.
    pub capacity: u64,
    /// Bytes available.
    pub available: u64,
    /// Inodes in total.
    pub inodes: u64,
    /// Free inodes.
    pub inodes_free: u64,
}

/// Resource usage of a volume.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VolumeUsage {
    /// Its name in the pod.
    pub name: String,
    /// Its disk usage.
    pub disk: DiskUsage,
}

/// Counters of an interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfaceUsage {
    /// Its name in the pod.
    pub name: String,
    /// Received traffic.
    pub received: TrafficUsage,
    /// Sent traffic.
    pub sent: TrafficUsage,
}

/// Counters of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrafficUsage {
    /// Bytes.
    pub bytes: u64,
    /// Packets.
    pub packets: u64,
    /// Packets with errors.
    pub errors: u64,
    /// Packets dropped.
    pub dropped: u64,
}
