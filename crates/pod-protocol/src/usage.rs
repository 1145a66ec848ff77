//! Resource usage of a pod, as its sandbox measures it.

use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// What a pod uses, and has used.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PodUsage {
    /// When this was found out.
    pub at: Timestamp,
    /// Containers that run.
    pub containers: Vec<ContainerUsage>,
    /// All of the pod's processes together, also those that have ended.
    pub cpu_ns: u64,
    /// All of the pod's memory.
    pub memory: MemoryUsage,
    /// How many processes the pod has.
    pub processes: u64,
    /// The interfaces of the pod's own network; none if that is the host's.
    pub interfaces: Vec<InterfaceUsage>,
    /// Volumes of which it can be told.
    pub volumes: Vec<VolumeUsage>,
    /// The files below /etc that its containers share.
    #[serde(default)]
    pub etc: Option<DiskUsage>,
    /// How often its containers were asked how they are, and what they answered.
    #[serde(default)]
    pub probes: Vec<ProbeCount>,
}

/// How often probes of one kind had one result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeCount {
    /// The container.
    pub container: String,
    /// In upstream's words: `Startup`, `Liveness` or `Readiness`.
    pub kind: String,
    /// In upstream's words: `successful`, `failed`, `warning` or `unknown`.
    pub result: String,
    /// How often.
    pub count: u64,
}

/// What one container uses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ContainerUsage {
    /// Its name.
    pub name: String,
    /// Its id, as its status shows it after `coracle://`.
    pub id: String,
    /// When it was started.
    pub started: Timestamp,
    /// Processors, since then.
    pub cpu_ns: u64,
    /// How its limit of processors held it back; `None` where there is no control group that counts it.
    #[serde(default)]
    pub throttling: Option<ThrottlingUsage>,
    /// What it had read from disks and written to them, as far as that is known.
    #[serde(default)]
    pub io: IoUsage,
    /// Memory.
    pub memory: MemoryUsage,
    /// How many processes it has.
    pub processes: u64,
    /// What it changed in its image.
    pub root: Option<DiskUsage>,
    /// Its logs, those of earlier runs too.
    pub logs: Option<DiskUsage>,
}

/// How a limit of processors held a container back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThrottlingUsage {
    /// Periods in which it wanted to run.
    pub periods: u64,
    /// Of these, those in which it was held back.
    pub throttled_periods: u64,
    /// For how long, in nanoseconds.
    pub throttled_ns: u64,
}

/// What came from disks and went to them. Without a control group that counts it, only bytes are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IoUsage {
    /// How often was read.
    pub reads: Option<u64>,
    /// Bytes that were read.
    pub read_bytes: Option<u64>,
    /// How often was written.
    pub writes: Option<u64>,
    /// Bytes that were written.
    pub written_bytes: Option<u64>,
}

/// Memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryUsage {
    /// All; with a control group, also files that it has read.
    pub usage: u64,
    /// What can't be taken away at once.
    pub working_set: u64,
    /// What belongs to processes alone.
    pub rss: u64,
    /// Page faults, ever.
    pub page_faults: u64,
    /// Those that had to read.
    pub major_page_faults: u64,
    /// What was put out to swap, if that is known; no part of the others.
    #[serde(default)]
    pub swap: Option<u64>,
}

/// What a directory takes, and what its file system has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskUsage {
    /// Bytes that it takes.
    pub used: u64,
    /// Files and directories.
    pub inodes: u64,
    /// The file system.
    pub file_system: FileSystem,
}

/// A file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSystem {
    /// Bytes, all.
    pub capacity: u64,
    /// Bytes that may still be written.
    pub available: u64,
    /// Files that there can be.
    pub inodes: u64,
    /// Of these, free.
    pub inodes_free: u64,
}

/// A volume.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VolumeUsage {
    /// Its name in the pod.
    pub name: String,
    /// What it takes.
    pub disk: DiskUsage,
}

/// Counters of an interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfaceUsage {
    /// Its name in the pod.
    pub name: String,
    /// What came in.
    pub received: TrafficUsage,
    /// What went out.
    pub sent: TrafficUsage,
}

/// Counters of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrafficUsage {
    /// Bytes.
    pub bytes: u64,
    /// Packets.
    pub packets: u64,
    /// Packets that were wrong.
    pub errors: u64,
    /// Packets that there was no room for.
    pub dropped: u64,
}
