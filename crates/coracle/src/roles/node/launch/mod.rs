//! Launchers of pods' sandboxes: [`fork`] starts a child process, [`step`] a step of the Slurm job.
//!
//! Both run `coracle internal sandbox` on this node. The sandbox reads its configuration from standard input, joins the hub's user
//! namespace and connects to the agent. It outlives the agent and connects to the next one too.

mod fork;
mod step;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::ContainerImage;
use kubelet::{LaunchError, LaunchRequest, Launcher, LauncherKind, SandboxHandle, SandboxProcess};
use pod_protocol::connection::LogByteStream;
use pod_protocol::{LogQuery, PodState, Problem};
use sandbox::checkpoint;
use sandbox::logs::LogDir;
use sandbox::runtime::Snapshotter;
use tokio::sync::OnceCell;

use super::hub::NodeHub;
use super::image_list::ImageList;
use crate::node_dir::{self, NodeDir};
use crate::pod_lock;
use crate::roles::sandbox::SandboxStart;
use crate::rootfs;

/// Time-out of ending all sandboxes and the hub.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// Starts sandboxes on this node.
pub struct Launchers {
    /// The node's directory.
    pub place: NodeDir,
    /// The node's hub, whose user namespace sandboxes join.
    pub hub: Arc<NodeHub>,
    /// The path of the image store.
    pub store: PathBuf,
    /// The images in the store.
    pub images: ImageList,
    /// The parent cgroup of the pods' cgroups, if there is one.
    pub groups: Option<PathBuf>,
    /// The snapshotter of this node, once it has been chosen.
    pub stacking: OnceCell<Snapshotter>,
    /// The Slurm job in which steps are started.
    pub job: u32,
    /// Slurm's name of this node.
    pub node: String,
    /// The job's limit on open files. The agent has raised its own.
    pub open_files: u64,
}

impl Launcher for Launchers {
    fn launch(
        &self,
        launch: LaunchRequest,
    ) -> BoxFuture<'_, Result<Box<dyn SandboxHandle>, LaunchError>> {
        async move {
            let started = match launch.launcher {
                LauncherKind::Fork => fork::start(self, launch).await.map(boxed),
                LauncherKind::Step => step::start(self, launch).await.map(boxed),
            };
            started.map_err(|error| LaunchError(error.into()))
        }
        .boxed()
    }

    fn find(&self, uid: &str) -> Option<Box<dyn SandboxHandle>> {
        let dir = self.place.dir.join("pods").join(uid);
        let id = pod_lock::holder(&dir)?;
        let process = SandboxProcess::with_id(id).ok()?;
        // Check again after opening the pidfd: the process may have exited and its pid been reused.
        (pod_lock::holder(&dir) == Some(id)).then(|| boxed(process))
    }

    fn checkpoint(&self, uid: &str) -> BoxFuture<'_, Option<PodState>> {
        let dir = self.place.dir.join("pods").join(uid);
        async move {
            let from = dir.clone();
            let read = tokio::task::spawn_blocking(move || checkpoint::read(&from)).await;
            let read = read.map_err(std::io::Error::other).flatten();
            read.unwrap_or_else(|error| {
                tracing::warn!(dir = %dir.display(), %error, "ignoring the pod's checkpoint");
                None
            })
        }
        .boxed()
    }

    fn logs(
        &self,
        uid: &str,
        query: LogQuery,
    ) -> BoxFuture<'_, Option<Result<LogByteStream, Problem>>> {
        let dir = self.place.dir.join("pods").join(uid).join("logs");
        async move {
            if !dir.exists() {
                return None;
            }
            Some(LogDir::new(dir).read(&query).await)
        }
        .boxed()
    }

    fn remove(&self, dir: PathBuf) -> BoxFuture<'_, std::io::Result<()>> {
        // A sandbox removes its pod's cgroup itself, unless it was killed.
        if let (Some(groups), Some(uid)) = (&self.groups, dir.file_name()) {
            let group = sandbox::runtime::pod_cgroup(groups, &uid.to_string_lossy());
            if let Err(error) = group.remove() {
                tracing::warn!(group = %group.path().display(), %error, "cannot remove a control group");
            }
        }
        node_dir::remove_elsewhere(dir).boxed()
    }

    fn images(&self) -> BoxFuture<'_, Vec<ContainerImage>> {
        self.images.read(&self.store).boxed()
    }
}

/// Ends the node's hub and all sandboxes. Sandboxes that are steps, or that an agent with another guard started, are not descendants
/// of this guard, which ends everything else. The caller must not hold the lock of a pod.
pub fn end_all(place: &NodeDir) {
    let mark = place.mark_argument();
    let end = Instant::now() + END_TIMEOUT;
    while Instant::now() < end {
        // A sandbox takes its lock before it becomes non-dumpable, so it is found either by its mark or by its lock.
        let marked = linux::process::kill_marked(&mark).unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot look for processes of the node");
            0
        });
        let sandboxes = node_dir::kill_sandboxes(&place.dir);
        let has_hub = network::hub::shut_down(&place.hub_socket()).is_ok();
        if marked + sandboxes == 0 && !has_hub {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn boxed(handle: impl SandboxHandle + 'static) -> Box<dyn SandboxHandle> {
    Box::new(handle)
}

impl Launchers {
    /// The snapshotter of this node; chooses it on first use.
    pub async fn stacking(&self) -> anyhow::Result<Snapshotter> {
        let chosen = self
            .stacking
            .get_or_try_init(|| rootfs::choose(&self.place.dir));
        chosen.await.cloned()
    }

    /// The sandbox's configuration as one line of JSON. Waits until the node's hub is ready.
    async fn start_line(&self, launch: &LaunchRequest) -> anyhow::Result<String> {
        self.hub.ready().await?;
        let start = SandboxStart {
            uid: launch.uid.clone(),
            token: launch.token.clone(),
            host_pid: launch.host_pid,
            node_dir: self.place.dir.clone(),
            store: self.store.clone(),
            groups: match launch.launcher {
                LauncherKind::Fork => self.groups.clone(),
                // The sandbox divides the cgroup of its own step.
                LauncherKind::Step => None,
            },
            stacking: self.stacking().await?,
            announces: launch.launcher == LauncherKind::Step,
            open_files: self.open_files,
            processes: self.hub.processes_of_containers().await,
        };
        let mut line = serde_json::to_string(&start)?;
        line.push('\n');
        Ok(line)
    }
}
