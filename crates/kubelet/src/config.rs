//! What a node is told about itself by whoever starts it.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::{NodeKey, Way};

/// Everything the kubelet is told; what it can find out alone is in [`SystemFacts`](crate::SystemFacts).
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// The Node's name; the client's certificate must be for `system:node:NAME`.
    pub name: String,
    /// The addresses at which other nodes and the API server reach this machine, the preferred one first.
    pub internal_ips: Vec<IpAddr>,
    /// The machine's host name.
    pub hostname: String,
    /// The port of the kubelet's HTTPS API.
    pub kubelet_port: u16,
    /// What pods may use here.
    pub capacity: Capacity,
    /// Labels beside the well-known ones; NodeRestriction allows `coracle.dev/…` but no unknown `kubernetes.io/…`.
    pub labels: BTreeMap<String, String>,
    /// Annotations of the Node.
    pub annotations: BTreeMap<String, String>,
    /// The version to report, within the version skew that the API server allows, such as `v1.37.1+coracle-0.1.0`.
    pub kubelet_version: String,
    /// A directory on the file system whose filling up is this node's disk pressure.
    pub scratch_dir: PathBuf,
    /// The node's own directory, on a local disk and for this user alone. Survives the agent; sandboxes dial
    /// `kubelet.sock` in it.
    pub node_dir: PathBuf,
    /// Makes the tokens of pods' sandboxes. Survives the agent, so that the next one knows them too.
    pub node_key: NodeKey,
    /// How pods are started that don't say.
    pub way: Way,
    /// The ranges of the node's pods' addresses, at most one per family.
    pub pod_cidrs: Vec<String>,
    /// The cluster's name servers, if it has any.
    pub cluster_dns: Vec<IpAddr>,
    /// The cluster's domain.
    pub cluster_domain: String,
    /// How long a stream of exec, attach or port-forward may be silent.
    pub stream_idle_timeout: Duration,
    /// By what the processes are known whose use of the machine is the node's; without, they are the agent's own kin.
    pub members: Option<Members>,
}

/// By what the processes are known that belong to a node.
#[derive(Clone, Debug)]
pub struct Members {
    /// A variable of their environment, with its value.
    pub variable: String,
    /// The name of the control group that they are in or below, if there is such a group.
    pub group: String,
}

/// What pods may use on a node: the allocation's share of the machine, not the machine.
#[derive(Clone, Debug, Default)]
pub struct Capacity {
    /// CPUs.
    pub cpus: u32,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Local storage for images, logs and scratch volumes, in bytes.
    pub ephemeral_storage_bytes: u64,
    /// The greatest number of pods.
    pub pods: u32,
    /// Extended resources by name, such as `nvidia.com/gpu`.
    pub extended: BTreeMap<String, u64>,
}
