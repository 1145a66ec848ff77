//! Interfaces between the lifecycle of a pod and the system around it.
//!
//! [`Runtime`] separates *what should happen to a pod* (`life`, which tests run with a simulated runtime and clock)
//! from *how it is done on Linux* (`runtime`).

use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, ContainerUser};
use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};

use pod_protocol::{ContainerInput, Problem};

/// A pod's containers, as the lifecycle uses them. All on one thread, so futures need not be `Send`.
#[allow(
    async_fn_in_trait,
    reason = "a sandbox runs on one thread; no caller needs Send futures"
)]
pub trait Runtime: 'static {
    /// Sets up the pod's namespaces, network and volumes. Called before everything else, and again after a failure.
    async fn up(&self) -> Result<PodNetwork, Problem>;

    /// Ensures that an image is present, pulling it if `policy` says so.
    async fn image(&self, request: &ImageRequest) -> Result<PodImage, Problem>;

    /// The images that a container mounts as volumes.
    fn image_volumes(&self, container: &Container) -> Vec<ImageRequest>;

    /// Starts a container. Its output goes to the log of this attempt.
    async fn start(&self, request: &StartRequest) -> Result<Started, Problem>;

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

    /// Called after every probe with the container, the kind (`Liveness`, …) and the result (`successful`, …).
    fn probed(&self, _container: &str, _kind: &'static str, _result: &'static str) {}

    /// Kills the remaining processes, and removes network and volumes. Never fails; errors are logged.
    async fn down(&self);
}

/// The pod's network configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodNetwork {
    /// The pod's addresses; those of the host for `hostNetwork`.
    pub ips: Vec<IpAddr>,
    /// A message for each `hostPort` that the pod asks for and that is not supported.
    pub closed_ports: Vec<String>,
}

/// An image that a container needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageRequest {
    /// The reference in the spec.
    pub reference: String,
    /// `Always`, `IfNotPresent` or `Never`.
    pub policy: String,
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
    pub layers: Vec<std::path::PathBuf>,
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
#[derive(Clone, Debug)]
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
pub struct Started {
    /// A new random id of 64 hexadecimal digits, without the `coracle://` prefix that statuses have.
    pub id: String,
    /// The start time.
    pub at: Timestamp,
    /// Receives the exit. The runtime never drops the sender without an exit while the sandbox runs.
    pub exit: oneshot::Receiver<Exit>,
    /// Its stop signal: `lifecycle.stopSignal`, STOPSIGNAL of the image, or SIGTERM.
    pub stop_signal: i32,
    /// The user of its first process.
    pub user: Option<ContainerUser>,
    /// Messages for the pod's user about problems with its log.
    pub log_warnings: mpsc::UnboundedReceiver<String>,
}

/// The exit of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// The exit code; 128 + the signal if it was killed by one.
    pub code: i32,
    /// The signal that killed it.
    pub signal: Option<i32>,
    /// It was killed for using too much memory.
    pub oom_killed: bool,
    /// The exit time.
    pub at: Timestamp,
}

/// The result of a command in a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecResult {
    /// Its exit code; `None` if it was killed at its time-out.
    pub code: Option<i32>,
    /// The first 10 KiB of stdout and stderr.
    pub output: String,
}

/// Services that a runtime uses from other parts of Coracle.
#[allow(
    async_fn_in_trait,
    reason = "a sandbox runs on one thread; no caller needs Send futures"
)]
pub trait World: 'static {
    /// Ensures that an image is present and unpacked.
    async fn image(
        &self,
        request: &ImageRequest,
        credentials: &[serde_json::Value],
    ) -> Result<PodImage, Problem>;

    /// Creates a volume, or updates the content of an existing one. `credentials` are for images.
    async fn volume(
        &self,
        name: &str,
        source: &serde_json::Value,
        fs_group: Option<i64>,
        credentials: &[serde_json::Value],
    ) -> Result<Volume, Problem>;

    /// Attaches a network namespace to the pod network, until [`World::leave`] or the end of this process.
    async fn attach(&self, network: std::os::fd::OwnedFd) -> Result<Attachment, Problem>;

    /// Waits until the pod's interface was recreated, and returns its configuration; `None` if the pod has lost its
    /// attachment.
    async fn reattached(&self) -> Option<Attachment> {
        std::future::pending().await
    }

    /// Removes volumes and network.
    async fn leave(&self);
}

/// A volume that is ready to be mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Volume {
    /// A directory or file on the host.
    Directory {
        /// Its path.
        path: std::path::PathBuf,
        /// Read-only for all containers.
        read_only: bool,
    },
    /// The layers of an image, the lowest first.
    Layers(Vec<std::path::PathBuf>),
}

/// An attachment to the pod network. The interface exists, and has to be configured with this address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// Name of the interface in the namespace.
    pub interface: String,
    /// Its address.
    pub address: IpAddr,
    /// Prefix length of the node's subnet.
    pub prefix: u8,
    /// The default gateway.
    pub gateway: IpAddr,
}
