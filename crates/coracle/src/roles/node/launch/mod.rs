//! How the agent starts pods' sandboxes: [`fork`] as a process of its own, [`step`] as a step of the Slurm job.
//!
//! Either way the same `coracle internal sandbox` runs on this node, is told who it is on its standard input, joins the hub and
//! dials the agent; and it outlives the agent, so that the next one is dialled too.

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

/// What killed sandboxes, and the hub, may take to be gone.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// Starts sandboxes on this node.
pub struct Launchers {
    /// The node's directory.
    pub place: NodeDir,
    /// Its hub, whose user namespace sandboxes join.
    pub hub: Arc<NodeHub>,
    /// Where images are.
    pub store: PathBuf,
    /// Which ones there are.
    pub images: ImageList,
    /// The control group in which those of pods are made, if there is one.
    pub groups: Option<PathBuf>,
    /// How layers are stacked here, once that is known.
    pub stacking: OnceCell<Snapshotter>,
    /// The job, for steps of it.
    pub job: u32,
    /// This node, by Slurm's name for it.
    pub node: String,
    /// How many files a process of the job may open; we ourselves may open more.
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
        // Had it ended, its number could be another's by now.
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
        // Of a sandbox that was killed; others remove their pod's group themselves.
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

/// Ends the node's hub and all sandboxes: steps, and what an agent with another guard started, are not below the guard of this one,
/// which ends everything else. The caller must not hold the lock of a pod.
pub fn end_all(place: &NodeDir) {
    let mark = place.mark_argument();
    let end = Instant::now() + END_TIMEOUT;
    while Instant::now() < end {
        // A sandbox takes its lock before it hides, so that one or the other finds it.
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
    /// How layers are stacked here.
    pub async fn stacking(&self) -> anyhow::Result<Snapshotter> {
        let chosen = self
            .stacking
            .get_or_try_init(|| rootfs::choose(&self.place.dir));
        chosen.await.cloned()
    }

    /// What a sandbox is told, as one line, once the node is ready for it.
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
                // It divides the group of its own step.
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
