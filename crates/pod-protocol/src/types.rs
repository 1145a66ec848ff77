//! The messages, except for those of [`crate::usage`].

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{ContainerStatus, EnvVar, Pod};
use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::PodFailure;

/// The version of this protocol; both sides must use the same.
pub const PROTOCOL_VERSION: u32 = 4;

/// The first line of a connection, from the sandbox.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SandboxHello {
    /// [`PROTOCOL_VERSION`] of the sandbox.
    pub version: u32,
    /// The pod's uid.
    pub uid: String,
    /// The sandbox, among all sandboxes that the pod ever had.
    pub id: SandboxId,
    /// Authenticates the sandbox.
    pub credential: SandboxCredential,
}

/// Identifies a sandbox to the launcher that has started it. Other components only store and compare it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SandboxId(String);

impl SandboxId {
    /// An id that only its launcher interprets.
    pub fn new(id: impl Into<String>) -> Self {
        Self(id.into())
    }

    /// The launcher's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for SandboxId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// A secret of a sandbox. Its `Debug` output does not contain it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SandboxCredential {
    /// The token that the launcher handed over. It is valid for one connection.
    LaunchToken(String),
    /// The key that the kubelet sent in response to the token, for all later connections.
    Key(String),
}

impl std::fmt::Debug for SandboxCredential {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::LaunchToken(_) => "LaunchToken",
            Self::Key(_) => "Key",
        })
    }
}

/// The kubelet's response to a hello: one line, before its first request.
#[derive(Clone, Default, Serialize, Deserialize)]
pub struct SandboxWelcome {
    /// The sandbox's key, if the hello had a launch token.
    pub key: Option<String>,
}

/// A pod, with everything that only the API server knows already resolved. Contains secrets: its `Debug` output has only the pod's
/// name.
#[derive(Clone, Serialize, Deserialize)]
pub struct Bundle {
    /// The Pod object of the API server.
    pub pod: Pod,
    /// By name, for containers of every type: the resolved environment.
    pub containers: BTreeMap<String, ContainerInput>,
    /// By volume name: the resolved source, in the format of the code that sets volumes up.
    pub volumes: BTreeMap<String, serde_json::Value>,
    /// From imagePullSecrets, in the format of the code that pulls images.
    pub pull_credentials: Vec<serde_json::Value>,
    /// The node's part of the pod's configuration.
    pub node: NodeFacts,
    /// The last container statuses of an earlier sandbox of this pod that was lost; empty for a new pod.
    pub previous_statuses: Vec<ContainerStatus>,
}

impl std::fmt::Debug for Bundle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bundle")
            .field("namespace", &self.pod.metadata.namespace)
            .field("name", &self.pod.metadata.name)
            .finish_non_exhaustive()
    }
}

/// The API server's part of a container's configuration. No `Debug`: variables come from secrets.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ContainerInput {
    /// Its variables in order, service variables and envFrom first. Each has a plain `value`, still with
    /// `$(NAME)` references, except for `fieldRef`s to `status.podIP(s)` and `status.hostIP(s)`, and
    /// for `fileKeyRef`s, which only the sandbox can resolve.
    pub env: Vec<EnvVar>,
    /// Why it cannot be started now, such as a missing config map. The sandbox waits for a bundle without this problem.
    pub problem: Option<Problem>,
}

/// A failure, with upstream's reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// In CamelCase, such as `CreateContainerConfigError` or `ErrImagePull`.
    pub reason: String,
    /// For people.
    pub message: String,
}

impl Problem {
    /// A failure with this reason and message.
    pub fn new(reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
            message: message.into(),
        }
    }
}

/// Facts about the node that a pod needs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeFacts {
    /// The Node's name.
    pub name: String,
    /// The cluster's name server; empty if the cluster has none.
    pub cluster_dns: Vec<String>,
    /// The cluster's domain.
    pub cluster_domain: String,
    /// Memory that is allocatable to pods, in bytes.
    #[serde(default)]
    pub memory_bytes: u64,
}

/// The complete state of a pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PodState {
    /// Facts about the machine on which the sandbox runs.
    #[serde(default)]
    pub host: HostFacts,
    /// The pod's namespaces and network are set up: the condition `PodReadyToStartContainers`.
    pub sandbox_ready: bool,
    /// The pod's addresses.
    pub pod_ips: Vec<String>,
    /// Init containers and native sidecars, in the order of the spec.
    pub init_containers: Vec<ContainerStatus>,
    /// Containers, in the order of the spec.
    pub containers: Vec<ContainerStatus>,
    /// Ephemeral containers.
    pub ephemeral_containers: Vec<ContainerStatus>,
    /// Why the pod as a whole failed, if it did.
    pub failure: Option<PodFailure>,
    /// No container runs and none will be started.
    pub finished: bool,
    /// The most recent events, oldest first. A kubelet that was away for a while can still record them.
    pub events: Vec<PodEvent>,
    /// The metadata.generation of the newest bundle that the sandbox has applied.
    pub observed_generation: Option<i64>,
}

/// Facts about the machine on which a sandbox runs, as the sandbox finds them. The kubelet may run on another one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostFacts {
    /// The machine's addresses, at most one per family, the preferred one first.
    pub host_ips: Vec<IpAddr>,
    /// When the sandbox started, by the machine's clock.
    pub started_at: Option<Timestamp>,
    /// How root file systems are made from layers, such as `overlay`.
    pub snapshotter: String,
    /// Control groups enforce the limits of containers. Without them, only the job's limits apply.
    pub has_cgroups: bool,
    /// The limit of open files of a container.
    pub open_files: u64,
    /// The limit of processes of a container, if there is one.
    pub processes: Option<u64>,
}

/// An Event to record for the pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodEvent {
    /// Increases over the sandbox's lifetime, so that a kubelet records each event once.
    pub serial: u64,
    /// When it happened; no two events of a sandbox have the same time.
    pub at: Timestamp,
    /// `Warning` rather than `Normal`.
    pub warning: bool,
    /// Upstream's reason: `Pulled`, `Created`, `Started`, `Killing`, `BackOff`, `Unhealthy`, …
    pub reason: String,
    /// For people.
    pub message: String,
    /// The container that it concerns, as upstream's field path: `spec.containers{NAME}`, `spec.initContainers{NAME}`, …
    pub field_path: Option<String>,
}

/// A request to stop a pod.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stop {
    /// Seconds from now until SIGKILL; a later request can only shorten it.
    pub grace_seconds: i64,
    /// Set if the pod as a whole fails by this request (eviction, node shutdown).
    pub failure: Option<PodFailure>,
}

/// A command to run in a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecQuery {
    /// The container.
    pub container: String,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Connects its standard input; otherwise it reads end-of-file at once.
    pub stdin: bool,
    /// Connects its standard output.
    pub stdout: bool,
    /// Connects its standard error; with a terminal that is part of the output.
    pub stderr: bool,
    /// Allocates a terminal.
    pub tty: bool,
}

/// The streams of a running container to attach to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachQuery {
    /// The container.
    pub container: String,
    /// Its standard input, if it has one.
    pub stdin: bool,
    /// Its standard output.
    pub stdout: bool,
    /// Its standard error, if it has no terminal.
    pub stderr: bool,
    /// Start with the rest of the container's log after this many bytes, which the client has read already.
    #[serde(default)]
    pub log_bytes_seen: Option<u64>,
}

/// The part of a container's log to read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LogQuery {
    /// The container.
    pub container: String,
    /// Its previous run instead of the current one.
    #[serde(default)]
    pub previous: bool,
    /// Continues until the container exits.
    #[serde(default)]
    pub follow: bool,
    /// Only this many lines from the end.
    #[serde(default)]
    pub tail_lines: Option<u64>,
    /// Only records written since then, as RFC 3339.
    #[serde(default)]
    pub since: Option<String>,
    /// Prefixes each line with its time.
    #[serde(default)]
    pub timestamps: bool,
    /// At most this many bytes.
    #[serde(default)]
    pub limit_bytes: Option<u64>,
    /// Only this stream.
    #[serde(default)]
    pub stream: LogSource,
}

/// The streams of a container that a log is read from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum LogSource {
    /// Both.
    #[default]
    All,
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}
