//! The messages, apart from those of [`crate::usage`].

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ContainerStatus, EnvVar, Pod};
use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// The version of this protocol; both sides must speak the same.
pub const VERSION: u32 = 1;

/// The first line of a connection, from the sandbox.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// [`VERSION`] of the sandbox.
    pub version: u32,
    /// What the kubelet handed to the process that it started, so that nobody else can pose as the pod.
    pub token: String,
    /// The pod's uid.
    pub uid: String,
}

/// A pod, with all that only the API server could tell.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Bundle {
    /// The pod, as the API server shows it.
    pub pod: Pod,
    /// By container name (of every kind): what its environment needs.
    pub containers: BTreeMap<String, ContainerInput>,
    /// By volume name: the resolved source, understood by those who prepare volumes.
    pub volumes: BTreeMap<String, serde_json::Value>,
    /// From imagePullSecrets, understood by those who pull images.
    pub pull_credentials: Vec<serde_json::Value>,
    /// What pods learn about their node.
    pub node: NodeFacts,
    /// How the pod's containers stood when an earlier sandbox of this pod was lost; empty for a new pod.
    pub before: Vec<ContainerStatus>,
}

/// What the API server contributes to one container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ContainerInput {
    /// Its variables in order, service variables and envFrom first. Every one has a plain `value`, still with
    /// `$(NAME)` references, except for `fieldRef`s to `status.podIP(s)` and `status.hostIP(s)`, and
    /// for `fileKeyRef`s: only the sandbox knows.
    pub env: Vec<EnvVar>,
    /// Why it can't be started now, such as a missing config map; it is tried again when a new bundle says otherwise.
    pub problem: Option<Problem>,
}

/// Why something can't go on, in upstream's words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// One word, such as `CreateContainerConfigError` or `ErrImagePull`.
    pub reason: String,
    /// The same for people.
    pub message: String,
}

/// What a pod learns about its node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeFacts {
    /// The Node's name.
    pub name: String,
    /// Its addresses, the preferred one first.
    pub host_ips: Vec<String>,
    /// The cluster's name server, once there is one.
    pub cluster_dns: Vec<String>,
    /// The cluster's domain.
    pub cluster_domain: String,
    /// Memory that pods may use on it, in bytes.
    #[serde(default)]
    pub memory_bytes: u64,
}

/// The whole state of a pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PodState {
    /// The pod's namespaces and network are there, which is the condition `PodReadyToStartContainers`.
    pub sandbox_ready: bool,
    /// The pod's addresses.
    pub pod_ips: Vec<String>,
    /// Init containers and native sidecars, in the order of the spec.
    pub init_containers: Vec<ContainerStatus>,
    /// Containers, in the order of the spec.
    pub containers: Vec<ContainerStatus>,
    /// Ephemeral containers.
    pub ephemeral_containers: Vec<ContainerStatus>,
    /// The pod as a whole failed for this reason, such as `DeadlineExceeded`.
    pub failure: Option<Problem>,
    /// Nothing of the pod runs, and nothing will.
    pub finished: bool,
    /// What happened lately, oldest first; a bounded number, so that a kubelet that was away learns most of it.
    pub events: Vec<PodEvent>,
    /// The metadata.generation of the last bundle that was acted upon.
    pub observed_generation: Option<i64>,
}

/// Something worth an Event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodEvent {
    /// Counts up over the sandbox's life; what a kubelet has recorded already it doesn't record again.
    pub serial: u64,
    /// When it happened; no two events of a sandbox have the same time.
    pub at: Timestamp,
    /// A `Warning` rather than `Normal`.
    pub warning: bool,
    /// Upstream's word: `Pulled`, `Created`, `Started`, `Killing`, `BackOff`, `Unhealthy`, …
    pub reason: String,
    /// The same for people.
    pub message: String,
    /// The container it concerns, as upstream's field path: `spec.containers{NAME}`, `spec.initContainers{NAME}`, ….
    pub field_path: Option<String>,
}

/// Ends a pod.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stop {
    /// Seconds between SIGTERM and SIGKILL, from now; a later call can only shorten it.
    pub grace_seconds: i64,
    /// Why, if the pod as a whole has failed by it (eviction, node shutdown).
    pub failure: Option<Problem>,
}

/// A command to run in a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecQuery {
    /// The container.
    pub container: String,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// It is given input; otherwise it reads an end at once.
    pub stdin: bool,
    /// Its output is wanted.
    pub stdout: bool,
    /// Its errors are wanted; with a terminal they are part of the output.
    pub stderr: bool,
    /// It has a terminal.
    pub tty: bool,
}

/// Which of a container's own streams to be connected to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachQuery {
    /// The container.
    pub container: String,
    /// Its input, if it has one.
    pub stdin: bool,
    /// Its output.
    pub stdout: bool,
    /// Its errors, if it has no terminal.
    pub stderr: bool,
}

/// Which part of which log.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LogQuery {
    /// The container.
    pub container: String,
    /// Its run before the current one.
    #[serde(default)]
    pub previous: bool,
    /// Go on until the container ends.
    #[serde(default)]
    pub follow: bool,
    /// Only so many lines from the end.
    #[serde(default)]
    pub tail_lines: Option<u64>,
    /// Only what was written since then, as RFC 3339.
    #[serde(default)]
    pub since: Option<String>,
    /// Put the time before each line.
    #[serde(default)]
    pub timestamps: bool,
    /// At most so many bytes.
    #[serde(default)]
    pub limit_bytes: Option<u64>,
    /// `Stdout`, `Stderr`, or `All`.
    #[serde(default)]
    pub stream: Option<String>,
}
