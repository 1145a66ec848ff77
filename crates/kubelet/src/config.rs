//! The configuration of a kubelet.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use volumes::NodePath;

use crate::{LauncherKind, NodeKey};

/// The configuration of a kubelet. Facts that it reads from the machine are in [`SystemInfo`](crate::SystemInfo).
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// The Node's name. The client's certificate must be for `system:node:NAME`.
    pub name: String,
    /// Addresses by which other nodes and the API server reach this machine, the preferred one first.
    pub internal_ips: Vec<IpAddr>,
    /// The machine's host name.
    pub hostname: String,
    /// The port of the kubelet's HTTPS API.
    pub kubelet_port: u16,
    /// Resources for pods.
    pub capacity: NodeCapacity,
    /// Labels besides the well-known ones. NodeRestriction allows `coracle.dev/…`, but no unknown `kubernetes.io/…`.
    pub labels: BTreeMap<String, String>,
    /// Annotations of the Node.
    pub annotations: BTreeMap<String, String>,
    /// The version to report, within the version skew that the API server allows, such as `v1.37.1+coracle-0.1.0`.
    pub kubelet_version: String,
    /// The directories of pods on this machine. `None` if sandboxes run on other machines: then the kubelet's own machine is neither
    /// measured nor checked for pressure.
    pub host_dirs: Option<HostDirs>,
    /// The key for sandbox credentials. It outlives the agent, so that the next agent accepts the same credentials.
    pub node_key: NodeKey,
    /// The launcher of pods without an annotation.
    pub launcher: LauncherKind,
    /// Address ranges of the node's pods, at most one per family.
    pub pod_cidrs: Vec<String>,
    /// The cluster's name servers, if it has any.
    pub cluster_dns: Vec<IpAddr>,
    /// The cluster's domain.
    pub cluster_domain: String,
    /// Idle time-out of exec, attach and port-forward streams.
    pub stream_idle_timeout: Duration,
    /// Selects the processes that count as the node's in its statistics. With `None` only the agent's guard, the agent and
    /// their descendants count.
    pub processes: Option<NodeProcesses>,
    /// Paths of hostPath volumes that lead to other directories.
    pub node_paths: Vec<NodePath>,
}

/// The directories for pods on the kubelet's machine.
#[derive(Clone, Debug)]
pub struct HostDirs {
    /// A directory on the file system for pods, which is measured, and checked for disk pressure.
    pub scratch: PathBuf,
    /// The directory of `local` persistent volumes, which the Node announces to the provisioner.
    pub local_volumes: PathBuf,
}

impl NodeConfig {
    pub(crate) fn scratch_dir(&self) -> Option<&Path> {
        self.host_dirs.as_ref().map(|dirs| dirs.scratch.as_path())
    }
}

/// Selects the processes that belong to a node.
#[derive(Clone, Debug)]
pub struct NodeProcesses {
    /// An environment variable that they have, as `NAME=value`.
    pub environment: String,
    /// The name of the control group that contains them, if it exists.
    pub cgroup: String,
}

/// The resources of a node: the allocation's share of the machine.
#[derive(Clone, Debug, Default)]
pub struct NodeCapacity {
    /// CPUs.
    pub cpus: u32,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Local storage in bytes, for images, logs and emptyDir volumes.
    pub ephemeral_storage_bytes: u64,
    /// Maximum number of pods.
    pub pods: u32,
    /// Extended resources by name, such as `nvidia.com/gpu`.
    pub extended: BTreeMap<String, u64>,
}
