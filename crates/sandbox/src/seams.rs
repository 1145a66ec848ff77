//! What the life of a pod asks of the world around it.
//!
//! [`Runtime`] is the one seam between *what should happen to a pod* (`life`, which can be tried with a simulated
//! runtime and a simulated clock) and *how it is done on Linux* (`runtime`).

use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, ContainerUser};
use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};

use pod_protocol::{ContainerInput, Problem};

/// A pod's containers, as the life of the pod handles them. All on one thread, so futures need not be `Send`.
#[allow(
    async_fn_in_trait,
    reason = "a sandbox runs on one thread; no caller needs Send futures"
)]
pub trait Runtime: 'static {
    /// Makes the pod's namespaces, network and volumes. Called once, before anything else; again after a failure.
    async fn up(&self) -> Result<PodNetwork, Problem>;

    /// Makes sure that an image is there, pulling it if `policy` says so.
    async fn image(&self, request: &ImageRequest) -> Result<PodImage, Problem>;

    /// The images that a container mounts as volumes.
    fn image_volumes(&self, container: &Container) -> Vec<ImageRequest>;

    /// Starts a container. Its output goes to the log of this attempt.
    async fn start(&self, request: &StartRequest) -> Result<Started, Problem>;

    /// Sends a signal to a container's first process. Quietly nothing if it has ended.
    fn signal(&self, id: &str, signal: i32);

    /// Runs a command in a container and waits for its end, or `timeout`, after which it is killed.
    async fn exec(
        &self,
        id: &str,
        command: &[String],
        timeout: Duration,
    ) -> Result<ExecResult, Problem>;

    /// Connects from within the pod's network.
    async fn connect(&self, address: IpAddr, port: u16) -> std::io::Result<TcpStream>;

    /// The termination message of a container that has ended: the end of the file at `terminationMessagePath` (4096 bytes), or
    /// the log's end (80 lines, 2048 bytes) where the policy is FallbackToLogsOnError, the file is empty and it failed.
    async fn termination_message(&self, request: &StartRequest, failed: bool) -> Option<String>;

    /// Hears of every probe: the container, what was asked (`Liveness`, …) and the result (`successful`, …).
    fn probed(&self, _container: &str, _kind: &'static str, _result: &'static str) {}

    /// Kills what is left and takes network and volumes away. Never fails; what can't be removed is logged.
    async fn down(&self);
}

/// The pod's place in the network.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodNetwork {
    /// Its addresses; those of the host for `hostNetwork`.
    pub ips: Vec<IpAddr>,
    /// Ports of the host that the pod asks for and that nobody listens at, and why, in words.
    pub closed_ports: Vec<String>,
}

/// An image to have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageRequest {
    /// As the spec names it.
    pub reference: String,
    /// `Always`, `IfNotPresent` or `Never`.
    pub policy: String,
}

/// An image that is there.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PodImage {
    /// The normalised reference, for `ContainerStatus.image`.
    pub reference: String,
    /// For `ContainerStatus.imageID`.
    pub id: String,
    /// In bytes.
    pub size: u64,
    /// It had to be fetched.
    pub pulled: bool,
    /// Directories to stack, the lowest first.
    pub layers: Vec<std::path::PathBuf>,
    /// What the image says about running it.
    pub config: ImageDefaults,
}

/// What an image says about running it.
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
    /// Its spec; an ephemeral container's is converted to this.
    pub container: Container,
    /// For an ephemeral container: whose process namespace it joins.
    pub target: Option<String>,
    /// How often it was started before; names its log.
    pub attempt: u32,
    /// What the API server contributed.
    pub input: ContainerInput,
    /// Its image.
    pub image: PodImage,
}

/// A container that was started.
#[derive(Debug)]
pub struct Started {
    /// A new random id of 64 hexadecimal digits, without the `coracle://` that a status puts before it.
    pub id: String,
    /// When.
    pub at: Timestamp,
    /// Tells of its end. Never dropped without a word while the sandbox lives.
    pub exit: oneshot::Receiver<Exit>,
    /// The signal with which it wants to be stopped: `lifecycle.stopSignal`, STOPSIGNAL of the image, or SIGTERM.
    pub stop_signal: i32,
    /// Who its first process is.
    pub user: Option<ContainerUser>,
    /// What goes wrong with its log, in words for the pod's user.
    pub log_warnings: mpsc::UnboundedReceiver<String>,
}

/// How a container ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// 128 + the signal if it was killed by one.
    pub code: i32,
    /// The signal that killed it.
    pub signal: Option<i32>,
    /// It was killed for using too much memory.
    pub oom_killed: bool,
    /// When.
    pub at: Timestamp,
}

/// How a command in a container ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecResult {
    /// Its exit code, or `None` if it was killed at its timeout.
    pub code: Option<i32>,
    /// The first 10 KiB of its output, both streams.
    pub output: String,
}

/// What a runtime asks of the parts of Coracle beside it.
#[allow(
    async_fn_in_trait,
    reason = "a sandbox runs on one thread; no caller needs Send futures"
)]
pub trait World: 'static {
    /// Makes sure that an image is there, unpacked.
    async fn image(
        &self,
        request: &ImageRequest,
        credentials: &[serde_json::Value],
    ) -> Result<PodImage, Problem>;

    /// Makes a volume, or brings the content of one that is there up to date. `credentials` are for images.
    async fn volume(
        &self,
        name: &str,
        source: &serde_json::Value,
        fs_group: Option<i64>,
        credentials: &[serde_json::Value],
    ) -> Result<Volume, Problem>;

    /// Connects a network namespace to the pod network. The place is kept until [`World::leave`], or our end.
    async fn attach(&self, network: std::os::fd::OwnedFd) -> Result<Attachment, Problem>;

    /// Waits until the pod's interface was made anew, and returns how it is to be set up; `None` if the pod has lost its place.
    async fn reattached(&self) -> Option<Attachment> {
        std::future::pending().await
    }

    /// Takes volumes and network away.
    async fn leave(&self);
}

/// A volume that is ready to be mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Volume {
    /// A directory or file of this machine.
    Directory {
        /// Where.
        path: std::path::PathBuf,
        /// For everybody.
        read_only: bool,
    },
    /// The layers of an image, the lowest first.
    Layers(Vec<std::path::PathBuf>),
}

/// A place in the pod network: the interface is there, and is to be given this address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// The interface in the namespace.
    pub interface: String,
    /// Its address.
    pub address: IpAddr,
    /// How many bits of it name the node's network.
    pub prefix: u8,
    /// Where everything else goes.
    pub gateway: IpAddr,
}
