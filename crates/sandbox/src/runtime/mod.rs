//! The [`ContainerRuntime`] on Linux.
//!
//! `pod_sandbox` starts and stops the pod, `start_container` and `container_exit` a container; `streaming` and `exec` run commands
//! in it. `plan` computes a container's file system and process, and `inner_client` sends the plan to the inner process
//! ([`inner`], pid 1 of the pod). `logs` writes and reads the containers' output, `streams` has the sessions of exec and attach, and
//! `usage` measures. Images, volumes and the network attachment come from [`NodeServices`].

mod cgroups;
mod cleanup;
mod container_exit;
mod env;
mod etc;
mod exec;
mod exec_stream;
mod file_key_ref;
mod host_port_udp;
mod host_ports;
pub mod inner;
mod inner_client;
mod limits;
pub mod logs;
mod oom_score_adj;
mod oom_watch;
mod output_subscribers;
mod plan;
mod pod_sandbox;
mod resize;
mod rootfs;
mod security;
mod snapshotter;
mod start_container;
mod stdio;
mod streaming;
pub mod streams;
mod sub_paths;
mod termination_message;
#[cfg(test)]
mod testing;
mod usage;
mod volume_spec;
mod volumes;

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, PodSpec, ResourceRequirements};
use k8s_openapi::jiff::Timestamp;
use linux::cgroup::Cgroup;
use linux::namespace::MappedIds;
use pod_protocol::{Bundle, Problem};
use rustix::process::Pid;
use tokio::net::TcpStream;
use tokio::sync::watch;

pub use self::cgroups::pod_cgroup;
use self::env::PodAddresses;
pub(crate) use self::env::expand;
use self::host_ports::HostPorts;
use self::inner::message::ProcessPlan;
use self::inner_client::InnerClient;
pub use self::limits::effective_amount;
use self::logs::LogDir;
use self::oom_watch::OomWatch;
use self::snapshotter::FuseMount;
pub use self::snapshotter::Snapshotter;
use self::streaming::Attachable;
use self::usage::UsageMeter;
use crate::container_runtime::{
    ContainerRuntime, ExecResult, ImageProblem, ImageRequest, PodImage, PodNetwork, StartFailure,
    StartRequest, StartedContainer,
};
use crate::node_services::{NetworkAttachment, NodeServices, ReadyVolume};

/// The directories of a pod.
#[derive(Clone, Debug)]
pub struct PodDirs {
    /// On disk: upper directories, volumes, files in /etc.
    pub disk: PathBuf,
    /// In a tmpfs that only this sandbox and its containers see.
    pub memory: PathBuf,
    /// Container logs.
    pub logs: PathBuf,
    /// The parent cgroup of all pods, if one was delegated to us.
    pub cgroup: Option<PathBuf>,
}

impl PodDirs {
    /// The pod's files in /etc. On disk, because containers may write to them without a limit.
    pub fn etc(&self) -> PathBuf {
        self.disk.join("etc")
    }
}

/// A pod's containers on this machine.
pub struct LinuxRuntime<S> {
    services: S,
    dirs: PodDirs,
    inner_pid: Pid,
    inner: Rc<InnerClient>,
    bundle: RefCell<Rc<Bundle>>,
    logs: LogDir,
    ids: MappedIds,
    snapshotter: Snapshotter,
    /// Mounts of fuse-overlayfs by mount point: root file systems and image volumes.
    fuse_mounts: Rc<RefCell<HashMap<PathBuf, FuseMount>>>,
    /// Set when the pod has joined its network.
    addresses: OnceCell<PodAddresses>,
    /// Set when the pod's namespaces are created.
    network_namespace: OnceCell<OwnedFd>,
    /// Set when the pod is attached to the pod network.
    attachment: OnceCell<NetworkAttachment>,
    /// Listeners for `hostPort`, while the pod runs.
    host_ports: RefCell<Option<HostPorts>>,
    /// Set when the pod's cgroup is created, if it has one.
    cgroup: OnceCell<Cgroup>,
    is_stopping: Cell<bool>,
    meter: UsageMeter,
    volumes: RefCell<BTreeMap<String, ReadyVolume>>,
    /// Volumes whose last update failed.
    stale_volumes: RefCell<BTreeSet<String>>,
    /// Held while a volume is created.
    volume_lock: tokio::sync::Mutex<()>,
    /// Paths of the volumes that are shared mounts.
    shared_volumes: RefCell<Vec<PathBuf>>,
    /// By container id.
    containers: Rc<RefCell<HashMap<String, RunningContainer>>>,
}

/// A running container.
struct RunningContainer {
    name: String,
    attempt: u32,
    started_at: Timestamp,
    /// Serial of its start request to the inner process.
    serial: u64,
    /// Its pidfd.
    process: Rc<OwnedFd>,
    plan: ProcessPlan,
    /// The resources to which its cgroup is set.
    resources: RefCell<Option<ResourceRequirements>>,
    oom: Rc<OomWatch>,
    attachable: Attachable,
    /// Dropped when the container exits.
    alive: watch::Sender<()>,
}

impl<S: NodeServices> LinuxRuntime<S> {
    /// Uses the inner process `inner_pid`, at the other end of `socket`.
    pub fn new(
        services: S,
        dirs: PodDirs,
        logs: LogDir,
        inner_pid: Pid,
        socket: OwnedFd,
        bundle: Bundle,
        snapshotter: Snapshotter,
    ) -> std::io::Result<Self> {
        Ok(Self {
            services,
            dirs,
            inner_pid,
            inner: InnerClient::new(socket)?,
            bundle: RefCell::new(Rc::new(bundle)),
            logs,
            ids: linux::namespace::mapped_ids(),
            snapshotter,
            fuse_mounts: Rc::default(),
            addresses: OnceCell::new(),
            network_namespace: OnceCell::new(),
            attachment: OnceCell::new(),
            host_ports: RefCell::default(),
            cgroup: OnceCell::new(),
            is_stopping: Cell::new(false),
            meter: UsageMeter::default(),
            volumes: RefCell::default(),
            stale_volumes: RefCell::default(),
            volume_lock: tokio::sync::Mutex::default(),
            shared_volumes: RefCell::default(),
            containers: Rc::default(),
        })
    }

    /// Applies a new bundle: updates volumes and cgroup limits. Returns the bundle as far as it was applied, and whether it was
    /// applied completely; if not, the caller retries with the same bundle.
    pub async fn put_bundle(&self, bundle: Bundle) -> (Bundle, bool) {
        let before = self.bundle.replace(Rc::new(bundle));
        let bundle = self.bundle.borrow().clone();
        let mut applied = Bundle::clone(&bundle);
        if self.is_stopping.get() {
            return (applied, true);
        }
        self.update_volumes(&before, &bundle).await;
        let resized = match &mut applied.pod.spec {
            Some(spec) => self.resize(spec),
            None => true,
        };
        (applied, resized && self.stale_volumes.borrow().is_empty())
    }

    /// Returns when the inner process has died unexpectedly, and all containers with it. The pod cannot go on then.
    pub async fn inner_died(&self) {
        self.inner.closed().await;
        if self.is_stopping.get() {
            std::future::pending().await
        }
    }

    fn spec(&self) -> PodSpec {
        self.bundle.borrow().pod.spec.clone().unwrap_or_default()
    }
}

impl<S: NodeServices> ContainerRuntime for LinuxRuntime<S> {
    async fn set_up(&self) -> Result<PodNetwork, Problem> {
        self.run_pod_sandbox().await
    }

    async fn ensure_image(&self, request: &ImageRequest) -> Result<PodImage, ImageProblem> {
        let bundle = self.bundle.borrow().clone();
        self.services
            .ensure_image(request, &bundle.pull_credentials)
            .await
    }

    fn image_volumes(&self, container: &Container) -> Vec<ImageRequest> {
        let spec = self.spec();
        let mounts = container.volume_mounts.iter().flatten();
        mounts
            .filter_map(|mount| volume_spec::image(&spec, &mount.name))
            .collect()
    }

    async fn start(&self, request: &StartRequest) -> Result<StartedContainer, StartFailure> {
        self.start_container(request).await
    }

    fn signal(&self, id: &str, signal: i32) {
        self.send_signal(id, signal);
    }

    async fn exec(
        &self,
        id: &str,
        command: &[String],
        timeout: Duration,
    ) -> Result<ExecResult, Problem> {
        self.exec_sync(id, command, timeout).await
    }

    async fn connect(&self, address: IpAddr, port: u16) -> std::io::Result<TcpStream> {
        self.connect_from_pod(address, port).await
    }

    async fn termination_message(&self, request: &StartRequest, failed: bool) -> Option<String> {
        self.read_termination_message(request, failed).await
    }

    fn record_probe(&self, container: &str, kind: &'static str, result: &'static str) {
        self.meter.record_probe(container, kind, result);
    }

    async fn tear_down(&self) {
        self.stop_pod_sandbox().await;
    }
}
