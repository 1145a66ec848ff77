//! How the agent starts pods' sandboxes: [`fork`] as a process of its own, [`step`] as a step of the Slurm job.
//!
//! Either way the same `coracle internal sandbox` runs on this node, is told who it is on its standard input, joins the hub and
//! dials the agent; and it outlives the agent, so that the next one is dialled too.

mod fork;
mod step;

use std::path::PathBuf;
use std::sync::Arc;

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

pub use self::step::end_all as end_steps;
use super::hub::NodeHub;
use super::image_list::ImageList;
use super::place::{self, NodePlace};
use super::stacking;
use crate::sandbox_role;

/// Starts sandboxes on this node.
pub struct Launchers {
    /// The node's directory.
    pub place: NodePlace,
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
    /// For the environment of sandboxes.
    pub mark: String,
    /// The job, for steps of it.
    pub job: u32,
    /// This node, by Slurm's name for it.
    pub node: String,
    /// How many files a process of the job may open; we ourselves may open more.
    pub open_files: u64,
}

impl Launcher for Launchers {
    fn launch(&self, launch: LaunchRequest) -> BoxFuture<'_, Result<Box<dyn SandboxHandle>, LaunchError>> {
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
        let id = sandbox_role::lock::holder(&dir)?;
        let process = SandboxProcess::with_id(id).ok()?;
        // Had it ended, its number could be another's by now.
        (sandbox_role::lock::holder(&dir) == Some(id)).then(|| boxed(process))
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
        place::remove_elsewhere(dir).boxed()
    }

    fn images(&self) -> BoxFuture<'_, Vec<ContainerImage>> {
        self.images.read(&self.store).boxed()
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
            .get_or_try_init(|| stacking::choose(&self.place.dir));
        chosen.await.cloned()
    }

    /// What a sandbox is told, as one line, once the node is ready for it.
    async fn start_line(&self, launch: &LaunchRequest) -> anyhow::Result<String> {
        self.hub.ready().await?;
        let start = sandbox_role::Start {
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
