//! Launchers of pods' sandboxes: [`fork`] starts a child process, [`step`] a step of the Slurm job.
//!
//! Both run `coracle internal sandbox` on this node. The sandbox reads its configuration from standard input, joins the hub's user
//! namespace and connects to the agent. It outlives the agent and connects to the next one too.

mod fork;
mod image_list;
mod process;
mod records;
mod step;

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::ContainerImage;
use kubelet::{
    LaunchRequest, Launcher, LauncherKind, PodRecords, SandboxControl, SandboxEnd, SandboxHandle,
    SandboxState,
};
use pod_protocol::SandboxId;
use pod_protocol::connection::KubeletEndpoint;
use rustix::io::Errno;
use sandbox::runtime::Snapshotter;
use tokio::process::Child;
use tokio::sync::OnceCell;

use self::image_list::ImageList;
use self::process::SandboxProcess;
use self::records::NodeRecords;
use self::step::ResourcesBusy;
use crate::back_off::ProcessBackOff;
use crate::node_dir::{self, NodeDir};
use crate::node_hub::NodeHub;
use crate::process_lock;
use crate::roles::remove::{self, RemovedDir};
use crate::roles::sandbox::{SandboxConfig, sandbox_id};
use crate::snapshotter;

/// Back-off of a step whose resources are in use.
const QUEUE_BACK_OFF: ProcessBackOff =
    ProcessBackOff::new(Duration::from_secs(1), Duration::from_secs(10));

/// Starts sandboxes on this node. Clones share everything.
#[derive(Clone)]
pub struct NodeLauncher {
    /// The node's directory.
    pub node_dir: NodeDir,
    /// Where sandboxes connect to their kubelet.
    pub kubelet: KubeletEndpoint,
    /// The node's hub, whose user namespace sandboxes join.
    pub hub: Arc<NodeHub>,
    /// The path of the image store.
    pub store: PathBuf,
    /// The images in the store.
    pub images: Arc<ImageList>,
    /// The parent cgroup of the pods' cgroups, if there is one.
    pub pods_cgroup: Option<PathBuf>,
    /// The snapshotter of this node, once it has been chosen.
    pub snapshotter: Arc<OnceCell<Snapshotter>>,
    /// The host's addresses, at most one per family, the preferred one first.
    pub host_ips: Vec<IpAddr>,
    /// The Slurm job in which steps are started.
    pub job: u32,
    /// Slurm's name of this node.
    pub node: String,
    /// The job's limit on open files. The agent has raised its own.
    pub open_files: u64,
    /// The sandbox's id, if this is the launcher of a pod-job.
    pub job_sandbox: Option<SandboxId>,
}

impl Launcher for NodeLauncher {
    fn launch(&self, request: LaunchRequest) -> SandboxHandle {
        let (handle, control) = SandboxHandle::new(None, SandboxState::Starting);
        tokio::spawn(start_and_follow(self.clone(), request, control));
        handle
    }

    fn find(&self, uid: &str) -> BoxFuture<'_, io::Result<Option<SandboxHandle>>> {
        let found = find_process(&self.node_dir.dir, uid);
        let found = found.map(|process| process.map(|process| process.follow(uid)));
        std::future::ready(found).boxed()
    }

    fn adopt(&self, id: &SandboxId) -> BoxFuture<'_, io::Result<Option<SandboxHandle>>> {
        let id = id.clone();
        async move {
            let Some(uid) = process::pod_uid(&id) else {
                return Ok(None);
            };
            let found = self.find(uid).await?;
            Ok(found.filter(|found| found.id().as_ref() == Some(&id)))
        }
        .boxed()
    }

    fn records(&self) -> Arc<dyn PodRecords> {
        Arc::new(NodeRecords {
            node_dir: self.node_dir.dir.clone(),
            pods_cgroup: self.pods_cgroup.clone(),
        })
    }

    fn remove_local_volume(&self, name: &str) -> BoxFuture<'_, io::Result<()>> {
        let dir = node_dir::local_volumes(&self.node_dir.dir).join(name);
        async move {
            match dir.exists() {
                true => remove::run_process(dir, RemovedDir::Volume).await,
                false => Ok(()),
            }
        }
        .boxed()
    }

    fn images(&self) -> BoxFuture<'_, Vec<ContainerImage>> {
        self.images.read(&self.store).boxed()
    }
}

/// Starts a sandbox, publishes its states, and kills it on request.
async fn start_and_follow(launcher: NodeLauncher, request: LaunchRequest, control: SandboxControl) {
    // A start is not interrupted: a sandbox that was half started would be lost. The request to kill it stays pending.
    let failed = |error: anyhow::Error| {
        let reason = format!("cannot start the sandbox: {error:#}");
        control.set_state(SandboxState::Ended(SandboxEnd::NotStarted(reason)));
    };
    let running = |pid| {
        control.set_id(sandbox_id(&request.uid, pid));
        control.set_state(SandboxState::Running);
    };
    match request.launcher {
        LauncherKind::Fork => match fork::start(&launcher, &request).await {
            Ok(child) => {
                running(child.id().map_or(0, u32::cast_signed));
                process::follow_child(child, &control).await;
            }
            Err(error) => failed(error),
        },
        LauncherKind::Step => match start_step(&launcher, &request, &control).await {
            Ok(process) => {
                running(process.pid());
                process.follow_until_exit(&control).await;
            }
            Err(error) => failed(error),
        },
    }
}

/// Starts a step, as soon as other steps have released its resources.
async fn start_step(
    launcher: &NodeLauncher,
    request: &LaunchRequest,
    control: &SandboxControl,
) -> anyhow::Result<SandboxProcess> {
    let mut back_off = QUEUE_BACK_OFF;
    loop {
        let busy = match step::start(launcher, request).await {
            Err(error) if error.is::<ResourcesBusy>() => error,
            started => return started,
        };
        control.set_state(SandboxState::Queued {
            reason: format!("{busy:#}"),
            expected_start: None,
        });
        tokio::select! {
            () = tokio::time::sleep(back_off.next_delay()) => {}
            () = control.kill_requested() => anyhow::bail!("the pod has ended"),
        }
    }
}

/// The first address of each family, the first family first.
pub fn one_per_family(ips: &[IpAddr]) -> Vec<IpAddr> {
    let first = ips.first().copied();
    let other = first.and_then(|first| ips.iter().find(|ip| ip.is_ipv4() != first.is_ipv4()));
    first.into_iter().chain(other.copied()).collect()
}

/// Finds the running sandbox of a pod by its lock.
fn find_process(node_dir: &Path, uid: &str) -> io::Result<Option<SandboxProcess>> {
    let dir = node_dir::pod(node_dir, uid);
    let Some(pid) = process_lock::find_holder(&dir)? else {
        return Ok(None);
    };
    let process = match SandboxProcess::open(pid) {
        Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => return Ok(None),
        opened => opened?,
    };
    // Check again after opening the pidfd: the process may have exited and its pid been reused.
    Ok((process_lock::find_holder(&dir)? == Some(pid)).then_some(process))
}

impl NodeLauncher {
    /// The snapshotter of this node; chooses it on first use.
    pub async fn snapshotter(&self) -> anyhow::Result<Snapshotter> {
        let chosen = self
            .snapshotter
            .get_or_try_init(|| snapshotter::select(&self.node_dir.dir));
        chosen.await.cloned()
    }

    /// Starts a sandbox as a child process.
    pub async fn fork(&self, request: &LaunchRequest) -> anyhow::Result<Child> {
        fork::start(self, request).await
    }

    /// The sandbox's configuration as one line of JSON. Waits until the node's hub is ready.
    async fn config_line(&self, launch: &LaunchRequest) -> anyhow::Result<String> {
        self.hub.ensure_running().await?;
        let config = SandboxConfig {
            uid: launch.uid.clone(),
            job_sandbox: self.job_sandbox.clone(),
            kubelet: self.kubelet.clone(),
            token: launch.token.clone(),
            host_ips: self.host_ips.clone(),
            host_pid: launch.host_pid,
            node_dir: self.node_dir.dir.clone(),
            store: self.store.clone(),
            pods_cgroup: match launch.launcher {
                LauncherKind::Fork => self.pods_cgroup.clone(),
                // The sandbox divides the cgroup of its own step.
                LauncherKind::Step => None,
            },
            snapshotter: self.snapshotter().await?,
            is_step: launch.launcher == LauncherKind::Step,
            open_files: self.open_files,
            process_limit: self.hub.container_process_limit().await,
        };
        let mut line = serde_json::to_string(&config)?;
        line.push('\n');
        Ok(line)
    }
}
