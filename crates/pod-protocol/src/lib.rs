//! The protocol between a kubelet and the sandbox of a pod.
//!
//! The sandbox connects to its kubelet, over a Unix socket or TLS, and sends [`SandboxHello`] as one line of JSON. The kubelet
//! responds with [`SandboxWelcome`], another line. Then the sandbox is the HTTP/2 *server* on that connection:
//!
//! ```text
//!   PUT  /v1/pod      Bundle    the complete desired pod, sent again on each change
//!   GET  /v1/state              the complete PodState, one line of JSON per change, until the connection ends
//!   POST /v1/stop     Stop      stop the pod
//!   POST /v1/dismiss            the pod has finished and its status is recorded: the sandbox cleans up and exits
//!   POST /v1/retire             as dismiss, but the log files stay: the kubelet serves them from now on
//!   POST /v1/logs     LogQuery  a container's log, as a stream of bytes
//!   GET  /v1/usage              PodUsage: current resource usage
//!   POST /v1/exec     frames, the first an ExecQuery: runs a command in a container
//!   POST /v1/attach   frames, the first an AttachQuery: the streams of a running container
//!   POST /v1/port-forward/PORT  bytes in both directions, to a port of the pod
//! ```
//!
//! Frames are those of [`streams`]. The response to exec, attach or port-forward begins when the command or container runs, or the
//! port is connected. From then on, the request and response bodies carry data at the same time. The kubelet resets the HTTP/2
//! stream if its client has disconnected.
//!
//! The protocol is level-triggered: after a broken connection, or the exit of the kubelet, the sandbox connects
//! again, receives the bundle again, and reports its complete state. The two ends need not share a file system, a
//! process table or a clock.
//!
//! Responsible for: the types, the connection with both of its ends, the framing of streams, and what both ends derive from a
//! pod in the same way: whether a container is restarted, and the QoS class.
//!
//! Deliberately does not know: the kubelet's internals, and how a sandbox runs its pod. The sandbox's end calls a
//! [`connection::SandboxService`].
//!
//! Start reading at [`Bundle`] and [`PodState`], then at [`connection`].

#![warn(unused_crate_dependencies)]

pub mod connection;
mod go_duration;
pub mod mounts;
mod pod_failure;
mod qos_class;
mod request_error;
pub mod restart;
mod selector;
pub mod streams;
pub mod termination;
mod types;
pub mod usage;

pub use go_duration::go_duration;
pub use pod_failure::{FailureCause, PodFailure};
pub use qos_class::QosClass;
pub use request_error::{RequestError, RequestErrorKind};
pub use selector::SelectorOperator;
pub use types::{
    AttachQuery, Bundle, ContainerInput, ExecQuery, HostFacts, LogQuery, LogSource, NodeFacts,
    PROTOCOL_VERSION, PodEvent, PodState, Problem, SandboxCredential, SandboxHello, SandboxId,
    SandboxWelcome, Stop,
};
