//! The interface between the two parts of this crate: [`lifecycle`](crate::lifecycle) decides what happens to the pod's
//! containers, and [`runtime`](crate::runtime) does it on Linux. Tests of the lifecycle use a simulated runtime.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, ContainerUser};
use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};

use pod_protocol::{ContainerInput, Problem};

/// Runs the containers of one pod.
#[allow(
    async_fn_in_trait,
    reason = "a sandbox runs on one thread; no caller needs Send futures"
)]
pub trait ContainerRuntime: 'static {
    /// Sets up the pod's namespaces, network and volumes. Called before everything else, and again after a failure.
    async fn set_up(&self) -> Result<PodNetwork, Problem>;

    /// Ensures that an image is present; pulls it according to its policy.
    async fn ensure_image(&self, request: &ImageRequest) -> Result<PodImage, ImageProblem>;

    /// The images that a container mounts as volumes.
    fn image_volumes(&self, container: &Container) -> Vec<ImageRequest>;

    /// Starts a container. Its output goes to the log of this attempt.
    async fn start(&self, request: &StartRequest) -> Result<StartedContainer, StartFailure>;

    /// Sends a signal to a container's first process. Does nothing if that has exited.
    fn signal(&self, id: &str, signal: i32);

    /// Runs a command in a container until it exits. Kills it after `timeout`.
    async fn exec(
        &self,
        id: &str,
        command: &[String],
        timeout: Duration,
    ) -> Result<ExecResult, Problem>;

    /// Connects from within the pod's network.
    async fn connect(&self, address: IpAddr, port: u16) -> std::io::Result<TcpStream>;

    /// The termination message of a container that has exited: the end of the file at `terminationMessagePath` (4096
    /// bytes). If that is empty, the container failed and the policy is FallbackToLogsOnError: the end of its log (80
    /// lines, 2048 bytes).
    async fn termination_message(&self, request: &StartRequest, failed: bool) -> Option<String>;

    /// Counts a probe for the metrics: the container, the kind (`Liveness`, …) and the result (`successful`, …).
    fn record_probe(&self, _container: &str, _kind: &'static str, _result: &'static str) {}

    /// Kills the remaining processes, and removes network and volumes. Errors are logged.
    async fn tear_down(&self);
}

/// Why a container was not started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StartFailure {
    /// It could not be created.
    Create(Problem),
    /// It was created, but its program could not be executed, for this reason. This counts as a run.
    Program(String),
}

impl From<Problem> for StartFailure {
    fn from(problem: Problem) -> Self {
        Self::Create(problem)
    }
}

/// The pod's network configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodNetwork {
    /// The pod's addresses; those of the host for `hostNetwork`.
    pub ips: Vec<IpAddr>,
    /// A message for each `hostPort` of the spec that is not supported.
    pub unsupported_host_ports: Vec<String>,
}

/// When to pull an image: `imagePullPolicy` of a container, `pullPolicy` of an image volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImagePullPolicy {
    /// Before every start of a container.
    Always,
    /// If the image is not present.
    IfNotPresent,
    /// Never: the image must be present.
    Never,
}

impl ImagePullPolicy {
    /// Parses the policy of a spec. Without one, the default is `Always` for the tag `latest` or no tag, unless there is
    /// a digest.
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

/// An image that a container needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageRequest {
    /// The reference in the spec.
    pub reference: String,
    /// Whether to pull it.
    pub policy: ImagePullPolicy,
}

/// Why an image is not present.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageProblem {
    /// The kind of problem.
    pub reason: ImageProblemReason,
    /// For people.
    pub message: String,
}

/// The kind of an [`ImageProblem`], named as in upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageProblemReason {
    /// The reference is malformed.
    InvalidImageName,
    /// It may not be pulled.
    ErrImageNeverPull,
    /// The image in the store cannot be read.
    ImageInspectError,
    /// The registry cannot be reached, or has an internal error.
    RegistryUnavailable,
    /// The pull failed for any other reason.
    ErrImagePull,
}

impl ImageProblemReason {
    /// Parses the reason of the API. An unknown one is `ErrImagePull`.
    pub fn parse(reason: &str) -> Self {
        match reason {
            "InvalidImageName" => Self::InvalidImageName,
            "ErrImageNeverPull" => Self::ErrImageNeverPull,
            "ImageInspectError" => Self::ImageInspectError,
            "RegistryUnavailable" => Self::RegistryUnavailable,
            _ => Self::ErrImagePull,
        }
    }

    /// The reason of the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InvalidImageName => "InvalidImageName",
            Self::ErrImageNeverPull => "ErrImageNeverPull",
            Self::ImageInspectError => "ImageInspectError",
            Self::RegistryUnavailable => "RegistryUnavailable",
            Self::ErrImagePull => "ErrImagePull",
        }
    }
}

impl From<ImageProblem> for Problem {
    fn from(problem: ImageProblem) -> Self {
        Self::new(problem.reason.as_str(), problem.message)
    }
}

/// An image that is present.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PodImage {
    /// The normalised reference, for `ContainerStatus.image`.
    pub reference: String,
    /// For `ContainerStatus.imageID`.
    pub id: String,
    /// In bytes.
    pub size: u64,
    /// Whether it had to be pulled.
    pub pulled: bool,
    /// Directories of the layers, the lowest first.
    pub layers: Vec<PathBuf>,
    /// Defaults from the image's configuration.
    pub config: ImageDefaults,
}

/// Defaults from an image's configuration.
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
#[derive(Clone)]
pub struct StartRequest {
    /// Its spec; that of an ephemeral container is converted to this.
    pub container: Container,
    /// For an ephemeral container: the container whose pid namespace it joins.
    pub target: Option<String>,
    /// The number of earlier starts; part of the log's file name.
    pub attempt: u32,
    /// The API server's part of its configuration.
    pub input: ContainerInput,
    /// Its image.
    pub image: PodImage,
}

/// A container that was started.
#[derive(Debug)]
pub struct StartedContainer {
    /// A new id of 64 hexadecimal digits, without the prefix `coracle://` of statuses.
    pub id: String,
    /// The start time.
    pub started_at: Timestamp,
    /// Receives the exit. The runtime never drops the sender without an exit while the sandbox runs.
    pub exit: oneshot::Receiver<ContainerExit>,
    /// Its stop signal: `lifecycle.stopSignal`, STOPSIGNAL of the image, or SIGTERM.
    pub stop_signal: i32,
    /// The user of its first process.
    pub user: Option<ContainerUser>,
    /// Messages for the pod's user about problems with its log.
    pub log_warnings: mpsc::UnboundedReceiver<String>,
}

/// The exit of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContainerExit {
    /// The exit code; 128 + the signal if it was killed by one.
    pub code: i32,
    /// The signal that killed it.
    pub signal: Option<i32>,
    /// The OOM killer killed it.
    pub oom_killed: bool,
    /// The exit time.
    pub finished_at: Timestamp,
}

/// The result of a command in a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecResult {
    /// Its exit code; `None` if it was killed at its time-out.
    pub code: Option<i32>,
    /// The first 10 KiB of stdout and stderr.
    pub output: String,
}

#[cfg(test)]
mod tests {
    use super::ImagePullPolicy::{self, Always, IfNotPresent, Never};

    #[test]
    fn default_pull_policy_depends_on_the_tag() {
        for (reference, policy) in [
            ("busybox", Always),
            ("busybox:latest", Always),
            ("busybox:1.36", IfNotPresent),
            ("registry:5000/busybox", Always),
            ("registry:5000/busybox:1", IfNotPresent),
            ("busybox@sha256:00", IfNotPresent),
        ] {
            let found = ImagePullPolicy::from_spec(None, reference);
            assert_eq!(found, policy, "{reference}");
        }
        assert_eq!(ImagePullPolicy::from_spec(Some("Never"), "busybox"), Never);
    }
}
