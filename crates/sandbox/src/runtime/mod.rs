//! A pod's containers on Linux: the [`Runtime`] that is no simulation.
//!
//! `set_up` makes the pod, `start` a container, `exec` reaches into what runs, `end` takes it away again. `plan` works out what a
//! container will be, `inside` has it done by the inner process, and this file keeps the books. What belongs to other parts
//! of Coracle (images, volumes, addresses) comes from a [`World`].

mod end;
mod env;
mod env_files;
mod etc;
mod exec;
mod groups;
mod host_datagrams;
mod host_ports;
mod inside;
mod last_words;
mod limits;
mod make_volumes;
mod oom;
mod oom_score;
mod output;
mod plan;
mod process_output;
mod remains;
mod resize;
mod root;
mod security;
mod set_up;
mod stacking;
mod start;
mod streams;
mod sub_paths;
mod taps;
#[cfg(test)]
mod testing;
mod usage;
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
use linux::cgroup::Group;
use linux::namespace::Ids;
use rustix::process::Pid;
use tokio::net::TcpStream;
use tokio::sync::watch;

use self::env::Addresses;
pub(crate) use self::env::expand;
pub use self::groups::place as pod_group;
use self::host_ports::HostPorts;
use self::inside::Inside;
pub use self::limits::together;
use self::make_volumes::fs_group;
use self::stacking::Mounted;
pub use self::stacking::Stacking;
use self::streams::Attachable;
use crate::inner::message::ProcessPlan;
use crate::logs::LogDir;
use crate::seams::{
    Attachment, ExecResult, ImageRequest, PodImage, PodNetwork, Runtime, StartRequest, Started,
    Volume, World,
};
use crate::usage::Meter;
use pod_protocol::{Bundle, Problem};

/// The directories of a pod.
#[derive(Clone, Debug)]
pub struct Places {
    /// On disk: what containers change, volumes, files below /etc.
    pub disk: PathBuf,
    /// In memory, and seen by this sandbox and its containers only.
    pub memory: PathBuf,
    /// Containers' logs.
    pub logs: PathBuf,
    /// The control group in which those of pods are made, if there is one that we may divide.
    pub groups: Option<PathBuf>,
}

impl Places {
    /// The files below /etc that containers have of the pod: on disk, for containers write to them as much as they like.
    pub fn etc(&self) -> PathBuf {
        self.disk.join("etc")
    }
}

/// A pod's containers on this machine.
pub struct LinuxRuntime<W> {
    world: W,
    places: Places,
    inner: Pid,
    inside: Rc<Inside>,
    bundle: RefCell<Rc<Bundle>>,
    logs: LogDir,
    ids: Ids,
    stacking: Stacking,
    /// Images that fuse-overlayfs shows, by place: roots of containers, and volumes.
    shown: Rc<RefCell<HashMap<PathBuf, Mounted>>>,
    /// Known once the pod is up.
    addresses: OnceCell<Addresses>,
    /// Stands for the pod's network namespace, once it has its namespaces.
    network: OnceCell<OwnedFd>,
    /// The pod's place in the network, once it was given one.
    attachment: OnceCell<Attachment>,
    /// Ports of the machine that lead to the pod, once it is up.
    host_ports: RefCell<Option<HostPorts>>,
    /// The pod's control group, if it has one, once it is up.
    group: OnceCell<Group>,
    is_ending: Cell<bool>,
    meter: Meter,
    volumes: RefCell<BTreeMap<String, Volume>>,
    /// Those whose content is not up to date, because that failed.
    stale: RefCell<BTreeSet<String>>,
    making_volume: tokio::sync::Mutex<()>,
    /// Those of them in which mounts travel.
    shared: RefCell<Vec<PathBuf>>,
    containers: Rc<RefCell<HashMap<String, Running>>>,
}

/// A container that runs.
struct Running {
    name: String,
    attempt: u32,
    started: Timestamp,
    serial: u64,
    process: Rc<OwnedFd>,
    plan: ProcessPlan,
    /// Those that its control group has, if it has one.
    resources: RefCell<Option<ResourceRequirements>>,
    memory: Rc<oom::Watch>,
    attachable: Attachable,
    /// Goes with the container.
    alive: watch::Sender<()>,
}

impl<W: World> LinuxRuntime<W> {
    /// Takes over the inner process `inner`, at the other end of `socket`.
    pub fn new(
        world: W,
        places: Places,
        logs: LogDir,
        inner: Pid,
        socket: OwnedFd,
        bundle: Bundle,
        stacking: Stacking,
    ) -> std::io::Result<Self> {
        Ok(Self {
            world,
            places,
            inner,
            inside: Inside::new(socket)?,
            bundle: RefCell::new(Rc::new(bundle)),
            logs,
            ids: linux::namespace::ids(),
            stacking,
            shown: Rc::default(),
            addresses: OnceCell::new(),
            network: OnceCell::new(),
            attachment: OnceCell::new(),
            host_ports: RefCell::default(),
            group: OnceCell::new(),
            is_ending: Cell::new(false),
            meter: Meter::default(),
            volumes: RefCell::default(),
            stale: RefCell::default(),
            making_volume: tokio::sync::Mutex::default(),
            shared: RefCell::default(),
            containers: Rc::default(),
        })
    }

    /// Takes note of a new bundle, and brings the content of volumes and limits up to it. Returns the bundle as far as it could
    /// be done, and whether that is all of it; if not, the same bundle is to be given again.
    pub async fn put_bundle(&self, bundle: Bundle) -> (Bundle, bool) {
        let before = self.bundle.replace(Rc::new(bundle));
        let bundle = self.bundle.borrow().clone();
        let mut done = Bundle::clone(&bundle);
        if self.is_ending.get() {
            return (done, true);
        }
        self.update_volumes(&before, &bundle).await;
        let resized = match &mut done.pod.spec {
            Some(spec) => self.resize(spec),
            None => true,
        };
        (done, resized && self.stale.borrow().is_empty())
    }

    async fn update_volumes(&self, before: &Bundle, bundle: &Bundle) {
        let fs_group = fs_group(bundle);
        for (name, source) in &bundle.volumes {
            let is_there = self.volumes.borrow().contains_key(name);
            let is_stale = self.stale.borrow_mut().remove(name);
            if !is_there || (before.volumes.get(name) == Some(source) && !is_stale) {
                continue;
            }
            let updated = self
                .world
                .volume(name, source, fs_group, &bundle.pull_credentials)
                .await;
            if let Err(problem) = updated {
                tracing::warn!(volume = name, problem = problem.message, "cannot update");
                self.stale.borrow_mut().insert(name.clone());
            }
        }
    }

    /// Returns when the inner process has died by itself, and all containers with it: there is nothing to go on with.
    pub async fn inner_died(&self) {
        self.inside.gone().await;
        if self.is_ending.get() {
            std::future::pending().await
        }
    }

    fn spec(&self) -> PodSpec {
        self.bundle.borrow().pod.spec.clone().unwrap_or_default()
    }
}

impl<W: World> Runtime for LinuxRuntime<W> {
    async fn up(&self) -> Result<PodNetwork, Problem> {
        self.set_up().await
    }

    async fn image(&self, request: &ImageRequest) -> Result<PodImage, Problem> {
        let bundle = self.bundle.borrow().clone();
        self.world.image(request, &bundle.pull_credentials).await
    }

    fn image_volumes(&self, container: &Container) -> Vec<ImageRequest> {
        let spec = self.spec();
        let mounts = container.volume_mounts.iter().flatten();
        mounts
            .filter_map(|mount| volumes::image(&spec, &mount.name))
            .collect()
    }

    async fn start(&self, request: &StartRequest) -> Result<Started, Problem> {
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
        self.run_command(id, command, timeout).await
    }

    async fn connect(&self, address: IpAddr, port: u16) -> std::io::Result<TcpStream> {
        self.connect_from_pod(address, port).await
    }

    async fn termination_message(&self, request: &StartRequest, failed: bool) -> Option<String> {
        self.last_words_of(request, failed).await
    }

    fn probed(&self, container: &str, kind: &'static str, result: &'static str) {
        self.meter.probed(container, kind, result);
    }

    async fn down(&self) {
        self.take_down().await;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::testing::{Asked, bundle, runtime, within_patience};
    use super::*;

    #[tokio::test]
    async fn a_volume_that_could_not_be_brought_up_to_date_is_tried_again() {
        within_patience(async {
            let world = Asked::default();
            let with = |content: &str| {
                let mut bundle = bundle(json!({"containers": []}));
                bundle.volumes.insert("v".to_owned(), json!(content));
                bundle.volumes.insert("same".to_owned(), json!("same"));
                bundle
            };
            let (runtime, _inner) = runtime(world.clone(), with("old"));
            for name in ["v", "same"] {
                let made = Volume::Layers(Vec::new());
                runtime.volumes.borrow_mut().insert(name.to_owned(), made);
            }
            assert!(runtime.put_bundle(with("old")).await.1);
            world.broken.borrow_mut().insert("v".to_owned());
            assert!(!runtime.put_bundle(with("new")).await.1);
            assert!(!runtime.put_bundle(with("new")).await.1);
            world.broken.borrow_mut().clear();
            assert!(runtime.put_bundle(with("new")).await.1);
            assert!(runtime.put_bundle(with("new")).await.1);
            assert_eq!(*world.volumes.borrow(), ["v", "v", "v"]);
        })
        .await;
    }
}
