//! A pod's containers on Linux: the [`Runtime`] that is no simulation.
//!
//! `plan` works out what a container will be, `inside` has it done by the inner process, and this file keeps the books.
//! What belongs to other parts of Coracle (images, volumes, addresses) comes from a [`World`].

mod env;
mod env_files;
mod etc;
mod groups;
mod inside;
mod last_words;
mod limits;
mod oom;
mod oom_score;
mod output;
mod plan;
mod process_output;
mod remains;
mod security;
mod stacking;
mod streams;
mod taps;
mod usage;
mod volumes;

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, ContainerUser, LinuxContainerUser, PodSpec};
use k8s_openapi::jiff::Timestamp;
use linux::cgroup::Group;
use linux::kin::Kin;
use linux::namespace::Ids;
use rustix::process::{Pid, Signal};
use tokio::net::TcpStream;
use tokio::sync::{oneshot, watch};

use self::env::Addresses;
pub use self::groups::place as pod_group;
use self::inside::{Inside, Process, Refusal};
pub use self::stacking::Stacking;
use self::stacking::{Changes, Mounted};
use self::streams::Attachable;
use crate::inner::message::{
    Identity, NetworkSetUp, PodSetUp, ProcessPlan, Processes, Request, RootKind,
};
use crate::logs::LogDir;
use crate::protocol::{Bundle, Problem};
use crate::seams::{
    ExecResult, Exit, ImageRequest, PodImage, PodNetwork, Runtime, StartRequest, Started, Volume,
    World,
};
use crate::usage::Meter;

/// The log's end as a termination message: so many lines, so many bytes.
const LOG_TAIL: (u64, usize) = (80, 2048);

/// The directories of a pod.
#[derive(Clone, Debug)]
pub struct Places {
    /// On disk: what containers change, and volumes.
    pub disk: PathBuf,
    /// In memory, and seen by this sandbox and its containers only.
    pub memory: PathBuf,
    /// Containers' logs.
    pub logs: PathBuf,
    /// The control group in which those of pods are made, if there is one that we may divide.
    pub groups: Option<PathBuf>,
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
    is_set_up: OnceCell<()>,
    /// The pod's control group, if it has one, once it is up.
    group: OnceCell<Group>,
    is_ending: Cell<bool>,
    meter: Meter,
    volumes: RefCell<BTreeMap<String, Volume>>,
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
            is_set_up: OnceCell::new(),
            group: OnceCell::new(),
            is_ending: Cell::new(false),
            meter: Meter::default(),
            volumes: RefCell::default(),
            making_volume: tokio::sync::Mutex::default(),
            shared: RefCell::default(),
            containers: Rc::default(),
        })
    }

    /// Takes note of a new bundle, and brings the content of volumes up to date.
    pub async fn put_bundle(&self, bundle: Bundle) {
        let before = self.bundle.replace(Rc::new(bundle));
        let bundle = self.bundle.borrow().clone();
        let fs_group = fs_group(&bundle);
        for (name, source) in &bundle.volumes {
            let is_there = self.volumes.borrow().contains_key(name);
            if is_there
                && before.volumes.get(name) != Some(source)
                && let Err(problem) = self
                    .world
                    .volume(name, source, fs_group, &bundle.pull_credentials)
                    .await
            {
                tracing::warn!(volume = name, problem = problem.message, "cannot update");
            }
        }
        if before.pod.spec != bundle.pod.spec {
            self.resize();
        }
    }

    /// Gives the control groups of the pod and of what runs in it the limits of the spec, which may have changed.
    fn resize(&self) {
        let Some(pod) = self.group.get() else { return };
        let spec = self.spec();
        let limited = pod.limit(&limits::of_pod(&spec));
        let running = self.containers.borrow();
        let each = running.values().filter_map(|running| {
            let group = running.memory.group()?;
            let init = spec.init_containers.iter().flatten();
            let mut all = init.chain(&spec.containers);
            let container = all.find(|container| container.name == running.name)?;
            Some(group.limit(&limits::of_container(container)))
        });
        for error in [limited].into_iter().chain(each).filter_map(Result::err) {
            tracing::warn!(%error, "cannot change limits");
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

    async fn set_up(&self, bundle: &Bundle, spec: &PodSpec) -> Result<(), Problem> {
        if self.is_set_up.get().is_some() {
            return Ok(());
        }
        let host_network = spec.host_network == Some(true);
        let hostname = etc::hostname(&bundle.pod, &bundle.node.cluster_domain);
        let sysctls = spec
            .security_context
            .as_ref()
            .and_then(|context| context.sysctls.clone());
        let plan = PodSetUp {
            network: !host_network,
            ipc: spec.host_ipc != Some(true),
            hostname: (!host_network).then_some(hostname),
            sysctls: sysctls
                .unwrap_or_default()
                .into_iter()
                .map(|sysctl| (sysctl.name, sysctl.value))
                .collect(),
        };
        self.inside
            .ask(Request::SetUp(plan))
            .await
            .map_err(sandbox_problem)?;
        let _ = self.is_set_up.set(());
        Ok(())
    }

    /// Makes the pod's control group.
    fn make_group(&self, bundle: &Bundle, spec: &PodSpec) -> std::io::Result<()> {
        let (Some(pods), None) = (&self.places.groups, self.group.get()) else {
            return Ok(());
        };
        let uid = bundle.pod.metadata.uid.as_deref().unwrap_or_default();
        let group = groups::place(pods, uid);
        groups::make_pod(&group, spec)?;
        let _ = self.group.set(group);
        Ok(())
    }

    async fn make_container_group(&self, request: &StartRequest) -> std::io::Result<Option<Group>> {
        match self.group.get() {
            Some(pod) => groups::make_container(pod, &request.container, request.attempt)
                .await
                .map(Some),
            None => Ok(None),
        }
    }

    async fn join_network(&self, bundle: &Bundle, spec: &PodSpec) -> Result<(), Problem> {
        if self.addresses.get().is_some() {
            return Ok(());
        }
        let host_ips = bundle.node.host_ips.clone();
        let pod_ips = if spec.host_network == Some(true) {
            host_ips.iter().take(1).cloned().collect()
        } else {
            let path = format!("/proc/{}/ns/net", self.inner.as_raw_nonzero());
            let namespace = std::fs::File::open(&path).map_err(|error| {
                sandbox_problem(Refusal {
                    message: format!("{path}: {error}"),
                    program: false,
                })
            })?;
            let place = self.world.attach(namespace.into()).await?;
            let plan = NetworkSetUp {
                interface: place.interface,
                address: place.address,
                prefix: place.prefix,
                gateway: place.gateway,
            };
            self.inside
                .ask(Request::Network(plan))
                .await
                .map_err(sandbox_problem)?;
            vec![place.address.to_string()]
        };
        let _ = self.addresses.set(Addresses { pod_ips, host_ips });
        Ok(())
    }

    /// Makes the volumes but those that are images, which only those containers wait for that mount them.
    async fn make_volumes(&self, bundle: &Bundle, spec: &PodSpec) -> Result<(), Problem> {
        let names = bundle.volumes.keys();
        for name in names.filter(|name| volumes::image(spec, name).is_none()) {
            self.make_volume(bundle, name).await?;
            if volumes::is_shared(spec, name) {
                self.share_volume(name)?;
            }
        }
        Ok(())
    }

    /// Makes a volume if it is not there yet.
    async fn make_volume(&self, bundle: &Bundle, name: &str) -> Result<(), Problem> {
        let Some(source) = bundle.volumes.get(name) else {
            return Ok(());
        };
        // Several containers may wait for one.
        let _making = self.making_volume.lock().await;
        if self.volumes.borrow().contains_key(name) {
            return Ok(());
        }
        let volume = self
            .world
            .volume(name, source, fs_group(bundle), &bundle.pull_credentials)
            .await?;
        let volume = self.one_directory(name, volume).await;
        let volume = volume.map_err(|error| volumes::failed(name, &error))?;
        self.volumes.borrow_mut().insert(name.to_owned(), volume);
        Ok(())
    }

    /// Lets what containers mount in a volume travel to the others.
    fn share_volume(&self, name: &str) -> Result<(), Problem> {
        let path = match self.volumes.borrow().get(name) {
            Some(Volume::Directory { path, .. }) => path.clone(),
            Some(Volume::Layers(_)) | None => return Ok(()),
        };
        if self.shared.borrow().contains(&path) {
            return Ok(());
        }
        linux::tree::share(&path).map_err(|error| volumes::failed(name, &error))?;
        self.shared.borrow_mut().push(path);
        Ok(())
    }

    /// An image as a volume, where the kernel doesn't stack its layers.
    async fn one_directory(&self, name: &str, volume: Volume) -> std::io::Result<Volume> {
        let layers = match volume {
            Volume::Layers(layers) if layers.len() > 1 => layers,
            other => return Ok(other),
        };
        let place = match &self.stacking {
            Stacking::Overlay => return Ok(Volume::Layers(layers)),
            Stacking::Fuse(program) => {
                let place = self.places.memory.join("images").join(name);
                let mounted = Mounted::new(program, &layers, None, &place).await?;
                self.shown.borrow_mut().insert(place.clone(), mounted);
                place
            }
            Stacking::Copy => {
                let place = self.places.disk.join("images").join(name);
                let target = place.clone();
                let copied = tokio::task::spawn_blocking(move || copy_image(&layers, &target));
                copied.await.map_err(std::io::Error::other)??;
                place
            }
        };
        Ok(Volume::Layers(vec![place]))
    }

    /// How the root file system of a container is made.
    fn root_kind(&self, request: &StartRequest) -> RootKind {
        match self.stacking {
            Stacking::Overlay => RootKind::Overlay,
            Stacking::Fuse(_) => RootKind::At(self.root_place(request)),
            Stacking::Copy => RootKind::Copy,
        }
    }

    /// Where fuse-overlayfs shows it.
    fn root_place(&self, request: &StartRequest) -> PathBuf {
        let name = format!("{}-{}", request.container.name, request.attempt);
        self.places.memory.join("roots").join(name)
    }

    /// Has fuse-overlayfs show a container's root file system, if that is how it is made here.
    async fn show_root(&self, request: &StartRequest, dir: &Path) -> std::io::Result<()> {
        let Stacking::Fuse(program) = &self.stacking else {
            return Ok(());
        };
        let place = self.root_place(request);
        hide(&self.shown, &place).await;
        let (upper, work) = (dir.join("upper"), dir.join("work"));
        std::fs::create_dir_all(&upper)?;
        std::fs::create_dir_all(&work)?;
        let changes = Changes {
            upper: &upper,
            work: &work,
        };
        let mounted = Mounted::new(program, &request.image.layers, Some(changes), &place).await?;
        self.shown.borrow_mut().insert(place, mounted);
        Ok(())
    }

    fn write_etc(&self, bundle: &Bundle) -> std::io::Result<()> {
        let pod_ips = self
            .addresses
            .get()
            .map(|addresses| addresses.pod_ips.clone())
            .unwrap_or_default();
        let etc = self.places.memory.join("etc");
        std::fs::create_dir_all(&etc)?;
        let host = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let (pod, node) = (&bundle.pod, &bundle.node);
        let hosts = etc::hosts(pod, node, &pod_ips, &host("/etc/hosts"));
        std::fs::write(etc.join("hosts"), hosts)?;
        let resolv = etc::resolv_conf(pod, node, &host("/etc/resolv.conf"));
        std::fs::write(etc.join("resolv.conf"), resolv)?;
        let name = etc::hostname(pod, &node.cluster_domain);
        std::fs::write(etc.join("hostname"), format!("{name}\n"))?;
        let shm = self.places.memory.join("shm");
        if !shm.is_dir() {
            std::fs::create_dir_all(&shm)?;
            linux::mount::shared_memory(&shm)?;
        }
        Ok(())
    }

    /// The directory of one run of a container.
    fn container_dir(&self, request: &StartRequest) -> PathBuf {
        let attempt = request.attempt.to_string();
        self.places
            .disk
            .join("containers")
            .join(&request.container.name)
            .join(attempt)
    }

    fn plan(
        &self,
        request: &StartRequest,
    ) -> Result<crate::inner::message::ContainerPlan, Problem> {
        let bundle = self.bundle.borrow().clone();
        let spec = self.spec();
        let target = match &request.target {
            Some(name) => Some(self.serial_of(name)?),
            None => None,
        };
        let hostname = match spec.host_network {
            Some(true) => rustix::system::uname()
                .nodename()
                .to_string_lossy()
                .into_owned(),
            _ => etc::hostname(&bundle.pod, &bundle.node.cluster_domain),
        };
        let none = Addresses::default();
        let place = plan::PodPlace {
            spec: &spec,
            oom_score_adj: oom_score::adjustment(
                &bundle.pod,
                &request.container,
                bundle.node.memory_bytes,
            ),
            hostname: &hostname,
            etc: &self.places.memory.join("etc"),
            shm: &self.places.memory.join("shm"),
            volumes: &self.volumes.borrow(),
            addresses: self.addresses.get().unwrap_or(&none),
            one_id: self.ids == Ids::One,
            has_group: self.group.get().is_some(),
            root: self.root_kind(request),
        };
        let mut request = request.clone();
        request.input.env = env_files::put_in(&request.input.env, place.volumes)?;
        plan::container(&place, &request, &self.container_dir(&request), target)
    }

    fn serial_of(&self, name: &str) -> Result<u64, Problem> {
        let containers = self.containers.borrow();
        let found = containers.values().find(|running| running.name == name);
        found.map(|running| running.serial).ok_or_else(|| Problem {
            reason: "CreateContainerConfigError".to_owned(),
            message: format!("target container \"{name}\" is not running"),
        })
    }

    /// Tells of a container's end, after its last words are in its log.
    fn watch(
        &self,
        id: String,
        root: PathBuf,
        kin: Option<Kin>,
        memory: Rc<oom::Watch>,
        end: oneshot::Receiver<inside::End>,
        copying: tokio::task::JoinHandle<()>,
    ) -> oneshot::Receiver<Exit> {
        let (tell, exit) = oneshot::channel();
        let containers = self.containers.clone();
        let shown = self.shown.clone();
        tokio::task::spawn_local(async move {
            let (code, signal) = end.await.unwrap_or((137, Some(9)));
            let at = Timestamp::now();
            let running = containers.borrow_mut().remove(&id);
            let taps = running.map(|running| running.attachable.taps);
            if let Some(group) = memory.group() {
                group.kill();
            }
            if let Some(kin) = kin {
                remains::end(kin).await;
            }
            // Not for ever: a process that left the container may still hold the pipe.
            let _ = tokio::time::timeout(Duration::from_secs(2), copying).await;
            if let Some(taps) = taps {
                taps.close();
            }
            let oom_killed = memory.was_it(code);
            let _ = tell.send(Exit {
                code,
                signal,
                oom_killed,
                at,
            });
            if let Some(group) = memory.group() {
                groups::end(group).await;
            }
            hide(&shown, &root).await;
        });
        exit
    }
}

impl<W: World> Runtime for LinuxRuntime<W> {
    async fn up(&self) -> Result<PodNetwork, Problem> {
        let bundle = self.bundle.borrow().clone();
        let spec = self.spec();
        self.set_up(&bundle, &spec).await?;
        self.make_group(&bundle, &spec).map_err(|error| {
            sandbox_problem(Refusal {
                message: format!("the pod's control group: {error}"),
                program: false,
            })
        })?;
        self.join_network(&bundle, &spec).await?;
        self.make_volumes(&bundle, &spec).await?;
        self.write_etc(&bundle).map_err(|error| {
            sandbox_problem(Refusal {
                message: format!("the pod's files below /etc: {error}"),
                program: false,
            })
        })?;
        let ips = self.addresses.get().map(|addresses| &addresses.pod_ips[..]);
        let parse = |ip: &String| ip.parse().ok();
        Ok(PodNetwork {
            ips: ips.unwrap_or_default().iter().filter_map(parse).collect(),
        })
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
        let bundle = self.bundle.borrow().clone();
        for mount in request.container.volume_mounts.iter().flatten() {
            self.make_volume(&bundle, &mount.name).await?;
        }
        let mut plan = self.plan(request)?;
        let dir = self.container_dir(request);
        make_container_dir(&dir).map_err(|error| Problem {
            reason: "CreateContainerError".to_owned(),
            message: format!("{}: {error}", dir.display()),
        })?;
        remains::remove_earlier(&dir, request.attempt).await;
        self.show_root(request, &dir)
            .await
            .map_err(|error| Problem {
                reason: "CreateContainerError".to_owned(),
                message: format!("mounting the image: {error}"),
            })?;
        let stop_signal = stop_signal(request);
        let group = self
            .make_container_group(request)
            .await
            .map_err(|error| Problem {
                reason: "CreateContainerError".to_owned(),
                message: format!("the container's control group: {error}"),
            })?;
        plan.process.group = group.as_ref().map(|group| group.path().to_owned());
        let memory = Rc::new(oom::Watch::new(group));
        // The kernel ends all processes of a namespace with the first.
        let alone = plan.processes == Processes::Own;
        let process_plan = plan.process.clone();
        let pipes =
            output::Pipes::new(plan.process.terminal, request.container.stdin == Some(true))
                .map_err(|error| Problem {
                    reason: "CreateContainerError".to_owned(),
                    message: format!("making the container's pipes: {error}"),
                })?;
        let log = self
            .logs
            .writer(&request.container.name, request.attempt)
            .map_err(|error| Problem {
                reason: "CreateContainerError".to_owned(),
                message: error.to_string(),
            })?;
        let started = self
            .inside
            .start(Request::Start(Box::new(plan)), &pipes.theirs())
            .await;
        let Process {
            serial,
            descriptors,
            end,
            identity,
        } = match started {
            Ok(process) => process,
            Err(refusal) => {
                if let Some(group) = memory.group() {
                    groups::end(group).await;
                }
                hide(&self.shown, &self.root_place(request)).await;
                return Err(start_problem(refusal));
            }
        };
        let at = Timestamp::now();
        let mut descriptors = descriptors.into_iter();
        let process = descriptors.next().ok_or_else(|| {
            start_problem(Refusal {
                message: "the inner process told of no process".to_owned(),
                program: false,
            })
        })?;
        let kin = descriptors.next().filter(|_| !alone).map(Kin::of);
        let kin = kin.transpose().map_err(|error| Problem {
            reason: "CreateContainerError".to_owned(),
            message: format!("the container's mount namespace: {error}"),
        })?;
        let (attachable, copying) =
            streams::connect(pipes, descriptors.next(), &request.container, log);
        let id = crate::id::new();
        let running = Running {
            name: request.container.name.clone(),
            attempt: request.attempt,
            started: at,
            serial,
            process: Rc::new(process),
            plan: process_plan,
            memory: memory.clone(),
            attachable,
            alive: watch::Sender::new(()),
        };
        self.containers.borrow_mut().insert(id.clone(), running);
        let root = self.root_place(request);
        let exit = self.watch(id.clone(), root, kin, memory, end, copying);
        Ok(Started {
            id,
            at,
            exit,
            stop_signal,
            user: identity.map(container_user),
        })
    }

    fn signal(&self, id: &str, signal: i32) {
        let process = self.containers.borrow().get(id).map(|running| {
            if signal == Signal::KILL.as_raw() {
                running.memory.we_kill();
            }
            running.process.clone()
        });
        if let Some(process) = process {
            // Gone already is as good.
            let _ = linux::signal::send(process.as_fd(), signal);
        }
    }

    async fn exec(
        &self,
        id: &str,
        command: &[String],
        timeout: Duration,
    ) -> Result<ExecResult, Problem> {
        let gone = || Problem {
            reason: "ExecError".to_owned(),
            message: "the container is not running".to_owned(),
        };
        let (container, mut process) = {
            let containers = self.containers.borrow();
            let running = containers.get(id).ok_or_else(gone)?;
            (running.serial, running.plan.clone())
        };
        process.args = command.to_vec();
        process.terminal = false;
        let request = Request::Exec {
            container,
            process: Box::new(process),
        };
        output::exec(&self.inside, request, timeout).await
    }

    async fn connect(&self, address: IpAddr, port: u16) -> std::io::Result<TcpStream> {
        let request = Request::Socket {
            v6: address.is_ipv6(),
        };
        let made = self.inside.ask(request).await;
        let socket = made
            .map_err(|refusal| std::io::Error::other(refusal.message))?
            .pop();
        let socket = socket.ok_or_else(|| std::io::Error::other("no socket came"))?;
        let socket = tokio::net::TcpSocket::from_std_stream(socket.into());
        socket.connect(SocketAddr::new(address, port)).await
    }

    async fn termination_message(&self, request: &StartRequest, failed: bool) -> Option<String> {
        let dir = self.container_dir(request);
        let message = last_words::read(&dir.join("termination-log")).unwrap_or_default();
        // That was the last that anybody wants to know of it.
        tokio::task::spawn_local(remains::remove(dir));
        let policy = request.container.termination_message_policy.as_deref();
        if message.is_empty() && failed && policy == Some("FallbackToLogsOnError") {
            let (lines, size) = LOG_TAIL;
            let name = &request.container.name;
            return Some(
                self.logs
                    .tail_text(name, request.attempt, lines, size)
                    .await,
            );
        }
        (!message.is_empty()).then_some(message)
    }

    async fn down(&self) {
        self.is_ending.set(true);
        if self.spec().host_pid == Some(true) {
            // There is no namespace whose end would be theirs: the inner process kills all that descends from it.
            self.inside.hang_up();
        } else {
            // Its death is the death of all in the pod's process namespace.
            let _ = rustix::process::kill_process(self.inner, Signal::KILL);
        }
        self.inside.gone().await;
        if let Some(group) = self.group.get() {
            groups::end(group).await;
        }
        let shown: Vec<PathBuf> = self.shown.borrow().keys().cloned().collect();
        for place in shown {
            hide(&self.shown, &place).await;
        }
        for path in self.shared.take().iter().rev() {
            if let Err(error) = linux::mount::detach(path) {
                tracing::warn!(path = %path.display(), %error, "cannot unmount a volume");
            }
        }
        self.world.leave().await;
        for dir in ["containers", "images"] {
            let dir = self.places.disk.join(dir);
            if let Err(error) = std::fs::remove_dir_all(&dir)
                && error.kind() != std::io::ErrorKind::NotFound
            {
                tracing::warn!(path = %dir.display(), %error, "cannot remove what containers wrote");
            }
        }
    }
}

/// Takes away what fuse-overlayfs shows at `place`, if it does.
async fn hide(shown: &RefCell<HashMap<PathBuf, Mounted>>, place: &Path) {
    let mounted = shown.borrow_mut().remove(place);
    if let Some(mounted) = mounted {
        mounted.end().await;
    }
}

fn copy_image(layers: &[PathBuf], place: &Path) -> std::io::Result<()> {
    // What an attempt that failed has left.
    match std::fs::remove_dir_all(place) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => std::fs::create_dir_all(place)?,
    }
    linux::stack::copy(layers, place).map(drop)
}

fn fs_group(bundle: &Bundle) -> Option<i64> {
    let spec = bundle.pod.spec.as_ref()?;
    spec.security_context.as_ref()?.fs_group
}

fn container_user(identity: Identity) -> ContainerUser {
    let groups = identity.groups.into_iter().map(i64::from).collect();
    ContainerUser {
        linux: Some(LinuxContainerUser {
            uid: identity.uid.into(),
            gid: identity.gid.into(),
            supplemental_groups: Some(groups),
        }),
    }
}

fn make_container_dir(dir: &std::path::Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::create_dir_all(dir)?;
    let file = std::fs::File::create(dir.join("termination-log"))?;
    // Whoever the container's user is.
    file.set_permissions(std::fs::Permissions::from_mode(0o666))
}

/// `lifecycle.stopSignal`, else the image's, else SIGTERM.
fn stop_signal(request: &StartRequest) -> i32 {
    let lifecycle = request.container.lifecycle.as_ref();
    let wanted = lifecycle.and_then(|lifecycle| lifecycle.stop_signal.as_deref());
    wanted
        .or(request.image.config.stop_signal.as_deref())
        .and_then(linux::signal::by_name)
        .unwrap_or(Signal::TERM.as_raw())
}

fn sandbox_problem(refusal: Refusal) -> Problem {
    Problem {
        reason: "FailedCreatePodSandBox".to_owned(),
        message: refusal.message,
    }
}

fn start_problem(refusal: Refusal) -> Problem {
    let reason = if refusal.program {
        "StartError"
    } else {
        "CreateContainerError"
    };
    Problem {
        reason: reason.to_owned(),
        message: refusal.message,
    }
}
