//! The interface between the pod life cycle and the container runtime.
//!
//! [`lifecycle`](crate::lifecycle) decides what happens to a pod, and is tested with a simulated runtime and clock;
//! [`runtime`](crate::runtime) does it on Linux.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, ContainerUser};
use k8s_openapi::jiff::Timestamp;
use pod_protocol::{ContainerInput, Problem};
use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};

/// Runs the containers of one pod. All on one thread, so futures need not be `Send`.
#[allow(
    async_fn_in_trait,
    reason = "a sandbox runs on one thread; no caller needs Send futures"
)]
pub trait ContainerRuntime: 'static {
    /// Sets up the pod's namespaces, network and volumes. Called before all else, and again after a failure.
    async fn set_up(&self) -> Result<PodNetwork, Problem>;

    /// Makes an image available, and pulls it if its policy says so.
    async fn ensure_image(&self, request: &ImageRequest) -> Result<PodImage, Problem>;

    /// The images that a container mounts as volumes.
    fn image_volumes(&self, container: &Container) -> Vec<ImageRequest>;

    /// Starts a container. Its output goes to the log of this attempt.
    async fn start(&self, request: &StartRequest) -> Result<StartedContainer, Problem>;

    /// Sends a signal to a container's first process; does nothing if it has exited.
    fn signal(&self, id: &str, signal: i32);

    /// Runs a command in a container, and waits until it exits. Kills it after `timeout`.
    async fn exec(
        &self,
        id: &str,
        command: &[String],
        timeout: Duration,
    ) -> Result<ExecResult, Problem>;

    /// Opens a TCP connection from inside the pod's network.
    async fn connect(&self, address: IpAddr, port: u16) -> std::io::Result<TcpStream>;

    /// The termination message of a container that has exited: the last 4096 bytes of the file at
    /// `terminationMessagePath`. If that is empty, the container failed and its policy is FallbackToLogsOnError: the end of
    /// its log (80 lines, 2048 bytes).
    async fn termination_message(&self, request: &StartRequest, failed: bool) -> Option<String>;

    /// Counts a probe for the metrics, by its kind (`Liveness`, …) and result (`successful`, …).
    fn record_probe(&self, _container: &str, _kind: &'static str, _result: &'static str) {}

    /// Kills all processes of the pod, and removes its network and volumes. Failures are only logged.
    async fn tear_down(&self);
}

/// The pod's network.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodNetwork {
    /// The pod's addresses; those of the host for `hostNetwork`.
    pub ips: Vec<IpAddr>,
    /// A message for each requested host port that is not supported.
    pub unsupported_host_ports: Vec<String>,
}

/// When to pull an image: `imagePullPolicy` of the spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImagePullPolicy {
    /// Before each start of a container.
    Always,
    /// Only if it is not in the store.
    IfNotPresent,
    /// Not at all.
    Never,
}

impl ImagePullPolicy {
    /// The policy in a spec. Without one, images with a moving tag are pulled each time.
    pub fn from_spec(policy: Option<&str>, reference: &str) -> Self {
        match policy {
            Some("Always") => Self::Always,
            Some("Never") => Self::Never,
            Some(_) => Self::IfNotPresent,
            None => Self::default_for(reference),
        }
    }

    fn default_for(reference: &str) -> Self {
        let name = reference.split('@').next().unwrap_or(reference);
        let has_digest = name.len() != reference.len();
        let last = name.rsplit('/').next().unwrap_or(name);
        let tag = last.split_once(':').map(|(_, tag)| tag);
        match tag {
            None | Some("latest") if !has_digest => Self::Always,
            _ => Self::IfNotPresent,
        }
    }
}

/// An image to make available.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageRequest {
    /// As in the spec.
    pub reference: String,
    /// Whether to pull it.
    pub policy: ImagePullPolicy,
}

/// An image that is available.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PodImage {
    /// The normalised reference, for `ContainerStatus.image`.
    pub reference: String,
    /// For `ContainerStatus.imageID`.
    pub id: String,
    /// In bytes.
    pub size: u64,
    /// It was not in the store and had to be pulled.
    pub pulled: bool,
    /// Directories to stack, the lowest first.
    pub layers: Vec<PathBuf>,
    /// The defaults of its containers.
    pub config: ImageDefaults,
}

/// The part of an image's OCI configuration that containers need.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageDefaults {
    /// ENTRYPOINT
    pub entrypoint: Vec<String>,
    /// CMD
    pub cmd: Vec<String>,
    /// ENV, as `NAME=value`
    pub env: Vec<String>,
    /// USER: empty, a name or number, with `:group` or without
    pub user: String,
    /// WORKDIR
    pub working_dir: String,
    /// STOPSIGNAL
    pub stop_signal: Option<String>,
    /// VOLUME
    pub volumes: Vec<String>,
}

/// A container to start.
#[derive(Clone, Debug)]
pub struct StartRequest {
    /// Its spec; that of an ephemeral container is converted.
    pub container: Container,
    /// For an ephemeral container: the container whose process namespace it joins.
    pub target: Option<String>,
    /// The number of earlier runs; part of the name of its log.
    pub attempt: u32,
    /// The API server's part of its configuration.
    pub input: ContainerInput,
    /// Its image.
    pub image: PodImage,
}

/// A container that was started.
#[derive(Debug)]
pub struct StartedContainer {
    /// A new random id of 64 hexadecimal digits, without the prefix `coracle://`.
    pub id: String,
    /// When it was started.
    pub at: Timestamp,
    /// Receives its exit. The sender is not dropped before while the sandbox lives.
    pub exit: oneshot::Receiver<ContainerExit>,
    /// The signal that stops it: `lifecycle.stopSignal`, STOPSIGNAL of the image, or SIGTERM.
    pub stop_signal: i32,
    /// The ids of its first process.
    pub user: Option<ContainerUser>,
    /// Failures to write its log, as messages for the pod's user.
    pub log_warnings: mpsc::UnboundedReceiver<String>,
}

/// How a container exited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContainerExit {
    /// 128 plus the signal's number if a signal killed it.
    pub code: i32,
    /// The signal that killed it.
    pub signal: Option<i32>,
    /// The OOM killer killed it.
    pub oom_killed: bool,
    /// When it exited.
    pub at: Timestamp,
}

/// The result of a command in a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecResult {
    /// Its exit code; `None` if it was killed at its time-out.
    pub code: Option<i32>,
    /// The first 10 KiB of standard output and standard error.
    pub output: String,
}

#[cfg(test)]
mod tests {
    use super::ImagePullPolicy::{self, Always, IfNotPresent, Never};

    #[test]
    fn default_pull_policy_depends_on_tag() {
        for (reference, policy) in [
            ("busybox", Always),
            ("busybox:latest", Always),
            ("busybox:1.36", IfNotPresent),
            ("registry:5000/busybox", Always),
            ("registry:5000/busybox:1", IfNotPresent),
            ("busybox@sha256:00", IfNotPresent),
        ] {
            assert_eq!(ImagePullPolicy::from_spec(None, reference), policy, "{reference}");
        }
        assert_eq!(ImagePullPolicy::from_spec(Some("Never"), "busybox"), Never);
    }
}
