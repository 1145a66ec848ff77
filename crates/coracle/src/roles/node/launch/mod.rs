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
use sandbox::lifecycle::checkpoint;
use sandbox::logs::LogDir;
use sandbox::runtime::Snapshotter;
use tokio::sync::OnceCell;

use super::hub::NodeHub;
use super::image_list::ImageList;
use crate::node_dir::{self, NodeDir};
use crate::pod_lock;
use crate::roles::remove::{self, RemovedDir};
use crate::roles::sandbox::SandboxConfig;
use crate::snapshotter;

/// Time-out of [`kill_all`].
const KILL_TIMEOUT: Duration = Duration::from_secs(2);

/// Starts sandboxes on this node.
pub struct NodeLauncher {
    /// The node's directory.
    pub node_dir: NodeDir,
    /// The node's hub, whose user namespace sandboxes join.
    pub hub: Arc<NodeHub>,
    /// The path of the image store.
    pub store: PathBuf,
    /// The images in the store.
    pub images: ImageList,
    /// The parent cgroup of the pods' cgroups, if there is one.
    pub pods_cgroup: Option<PathBuf>,
    /// The snapshotter of this node, once it has been chosen.
    pub snapshotter: OnceCell<Snapshotter>,
    /// The Slurm job in which steps are started.
    pub job: u32,
    /// Slurm's name of this node.
    pub node: String,
    /// The job's limit on open files. The agent has raised its own.
    pub open_files: u64,
}

impl Launcher for NodeLauncher {
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
        let dir = self.node_dir.dir.join("pods").join(uid);
        let pid = pod_lock::holder(&dir)?;
        let process = SandboxProcess::with_id(pid).ok()?;
        // Check again after opening the pidfd: the process may have exited and its pid been reused.
        (pod_lock::holder(&dir) == Some(pid)).then(|| boxed(process))
    }

    fn checkpoint(&self, uid: &str) -> BoxFuture<'_, Option<PodState>> {
        let dir = self.node_dir.dir.join("pods").join(uid);
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
        let dir = self.node_dir.dir.join("pods").join(uid).join("logs");
        async move {
            if !dir.exists() {
                return None;
            }
            Some(LogDir::new(dir).read(&query).await)
        }
        .boxed()
    }

    fn remove(&self, dir: PathBuf) -> BoxFuture<'_, std::io::Result<()>> {
        if dir.parent() != Some(&*self.node_dir.dir.join("pods")) {
            return remove::run_process(dir, RemovedDir::Volume).boxed();
        }
        async move {
            let uid = dir.file_name().unwrap_or_default().to_owned();
            remove::run_process(dir, RemovedDir::Pod).await?;
            // A sandbox removes its pod's cgroup itself, unless it was killed.
            if let Some(pods_cgroup) = &self.pods_cgroup {
                let group = sandbox::runtime::pod_cgroup(pods_cgroup, &uid.to_string_lossy());
                if let Err(error) = group.remove() {
                    tracing::warn!(group = %group.path().display(), %error, "cannot remove the pod's cgroup");
                }
            }
            Ok(())
        }
        .boxed()
    }

    fn images(&self) -> BoxFuture<'_, Vec<ContainerImage>> {
        self.images.read(&self.store).boxed()
    }
}

/// Kills all sandboxes and shuts down the node's hub. Sandboxes that are steps, or that an agent with another guard started, are not
/// descendants of this guard, which kills everything else. The caller must not hold the lock of a pod.
pub fn kill_all(node_dir: &NodeDir) {
    let mark = node_dir.mark_argument();
    let end = Instant::now() + KILL_TIMEOUT;
    while Instant::now() < end {
        // A sandbox takes its lock before it becomes non-dumpable, so it is found either by its mark or by its lock.
        let marked = linux::process::kill_marked(&mark).unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot kill the node's processes");
            0
        });
        let sandboxes = node_dir::kill_sandboxes(&node_dir.dir);
        let sockets = node_dir.hub_sockets();
        let has_hub = [sockets.outside, sockets.inside]
            .map(|socket| network::hub::shut_down(&socket).is_ok())
            .contains(&true);
        if marked + sandboxes == 0 && !has_hub {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn boxed(handle: impl SandboxHandle + 'static) -> Box<dyn SandboxHandle> {
    Box::new(handle)
}

impl NodeLauncher {
    /// The snapshotter of this node; chooses it on first use.
    pub async fn snapshotter(&self) -> anyhow::Result<Snapshotter> {
        let chosen = self
            .snapshotter
            .get_or_try_init(|| snapshotter::select(&self.node_dir.dir));
        chosen.await.cloned()
    }

    /// The sandbox's configuration as one line of JSON. Waits until the node's hub is ready.
    async fn config_line(&self, launch: &LaunchRequest) -> anyhow::Result<String> {
        self.hub.ensure_running().await?;
        let config = SandboxConfig {
            uid: launch.uid.clone(),
            token: launch.token.clone(),
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
