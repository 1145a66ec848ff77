//! The interface between the kubelet and the launchers, which start sandboxes.
//!
//! A launcher may start a sandbox on another machine, and hours after the request. So the kubelet does not rely on a file system,
//! process table or clock that it shares with a sandbox. It identifies a sandbox by its [`SandboxId`], tracks its
//! [`SandboxState`], and reads the logs and the last state of an exited sandbox from [`PodRecords`].

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::ContainerImage;
use k8s_openapi::jiff::Timestamp;
use pod_protocol::connection::LogByteStream;
use pod_protocol::{LogQuery, PodState, RequestError, SandboxId};
use tokio::sync::{Notify, watch};

/// Starts sandboxes: as children of the agent, or as job steps.
pub trait Launcher: Send + Sync {
    /// Starts a sandbox. Returns at once; the handle reports the progress. The sandbox connects to the kubelet when it runs.
    fn launch(&self, request: LaunchRequest) -> SandboxHandle;

    /// Finds a pod's sandbox if it may still run, even if an earlier kubelet launched it. After an error the caller must not launch
    /// another one.
    fn find(&self, uid: &str) -> BoxFuture<'_, io::Result<Option<SandboxHandle>>>;

    /// Finds a connected sandbox by the id from its first message.
    fn adopt(&self, id: &SandboxId) -> BoxFuture<'_, io::Result<Option<SandboxHandle>>>;

    /// Logs and checkpoints of the sandboxes of this launcher.
    fn records(&self) -> Arc<dyn PodRecords>;

    /// The time-outs for sandboxes of this launcher.
    fn timeouts(&self) -> SandboxTimeouts {
        SandboxTimeouts::default()
    }

    /// Removes a `local` persistent volume of this node.
    fn remove_local_volume(&self, name: &str) -> BoxFuture<'_, io::Result<()>>;

    /// The images in the local store, for the Node's status.
    fn images(&self) -> BoxFuture<'_, Vec<ContainerImage>> {
        Box::pin(std::future::ready(Vec::new()))
    }
}

/// The logs and the last states of pods whose sandbox has exited.
pub trait PodRecords: Send + Sync {
    /// The uids of all pods with records.
    fn uids(&self) -> BoxFuture<'_, Vec<String>>;

    /// The last checkpoint of a pod; `None` if there is none.
    fn checkpoint(&self, uid: &str) -> BoxFuture<'_, Option<PodState>>;

    /// Reads a container's log; `None` if the log was removed.
    fn logs(
        &self,
        uid: &str,
        query: LogQuery,
    ) -> BoxFuture<'_, Option<Result<LogByteStream, RequestError>>>;

    /// Removes all records and other data of a pod. Fails while its sandbox runs.
    fn remove(&self, uid: &str) -> BoxFuture<'_, io::Result<()>>;
}

/// The time-outs after which the kubelet kills a sandbox.
#[derive(Clone, Copy, Debug)]
pub struct SandboxTimeouts {
    /// From [`SandboxState::Running`] to the first connection.
    pub connect: Duration,
    /// From the loss of a connection to the next one.
    pub reconnect: Duration,
}

impl Default for SandboxTimeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(60),
            reconnect: Duration::from_secs(30),
        }
    }
}

/// The state of a sandbox, as its launcher sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SandboxState {
    /// The sandbox waits for resources, maybe for days.
    Queued {
        /// Why, such as Slurm's `Priority`.
        reason: String,
        /// When it is expected to start.
        expected_start: Option<Timestamp>,
    },
    /// The sandbox is being started. The launcher limits the time that this takes.
    Starting,
    /// The sandbox's process runs.
    Running,
    /// The sandbox has ended, and all containers of its pod with it. The last state.
    Ended(SandboxEnd),
}

/// How a sandbox ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SandboxEnd {
    /// It never ran, for this reason.
    NotStarted(String),
    /// It exited, with this status.
    Exited(String),
}

/// A sandbox and its launcher's view of it. Dropping the handle does not end the sandbox: pods outlive their kubelet.
#[derive(Debug)]
pub struct SandboxHandle {
    status: watch::Receiver<(Option<SandboxId>, SandboxState)>,
    kill: Arc<Notify>,
}

/// The launcher's side of a [`SandboxHandle`].
#[derive(Debug)]
pub struct SandboxControl {
    status: watch::Sender<(Option<SandboxId>, SandboxState)>,
    kill: Arc<Notify>,
}

impl SandboxHandle {
    /// Creates the handle of a sandbox in this state, and the launcher's side of it.
    pub fn new(id: Option<SandboxId>, state: SandboxState) -> (Self, SandboxControl) {
        let (sender, receiver) = watch::channel((id, state));
        let kill = Arc::new(Notify::new());
        let handle = Self {
            status: receiver,
            kill: Arc::clone(&kill),
        };
        let control = SandboxControl {
            status: sender,
            kill,
        };
        (handle, control)
    }

    /// The sandbox's id, once the launcher knows it.
    pub fn id(&self) -> Option<SandboxId> {
        self.status.borrow().0.clone()
    }

    /// The sandbox's state.
    pub fn state(&self) -> SandboxState {
        let state = self.status.borrow().1.clone();
        match (self.status.has_changed(), state) {
            // The launcher's task ended without publishing `Ended`.
            (Err(_), state) if !matches!(state, SandboxState::Ended(_)) => lost(),
            (_, state) => state,
        }
    }

    /// Waits for a change, and returns the new state.
    pub async fn changed(&mut self) -> SandboxState {
        match self.status.changed().await {
            Ok(()) => self.status.borrow_and_update().1.clone(),
            Err(_) => lost(),
        }
    }

    /// Waits until the sandbox has ended.
    pub async fn ended(&mut self) -> SandboxEnd {
        let ended = |status: &(_, SandboxState)| matches!(status.1, SandboxState::Ended(_));
        match self
            .status
            .wait_for(ended)
            .await
            .map(|status| status.1.clone())
        {
            Ok(SandboxState::Ended(end)) => end,
            _ => SandboxEnd::Exited("unknown".to_owned()),
        }
    }

    /// Asks the launcher to kill the sandbox, and so all containers of the pod. The state becomes `Ended` when it has exited.
    pub fn kill(&self) {
        self.kill.notify_one();
    }
}

fn lost() -> SandboxState {
    SandboxState::Ended(SandboxEnd::Exited("unknown".to_owned()))
}

impl SandboxControl {
    /// Sets the id, once it is known.
    pub fn set_id(&self, id: SandboxId) {
        self.status.send_modify(|status| status.0 = Some(id));
    }

    /// Publishes a new state.
    pub fn set_state(&self, state: SandboxState) {
        self.status.send_modify(|status| status.1 = state);
    }

    /// Waits until the kubelet asks to kill the sandbox.
    pub async fn kill_requested(&self) {
        self.kill.notified().await;
    }
}

/// The annotation with which a pod selects its launcher.
pub const LAUNCHER_ANNOTATION: &str = "coracle.dev/launcher";

/// How a sandbox is started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LauncherKind {
    /// As a child of the agent.
    #[default]
    Fork,
    /// As a job step, to which Slurm allocates the pod's resources until its sandbox exits.
    Step,
}

impl LauncherKind {
    /// Parses a value of [`LAUNCHER_ANNOTATION`].
    pub(crate) fn parse(value: &str) -> Option<Self> {
        match value {
            "fork" => Some(Self::Fork),
            "step" => Some(Self::Step),
            _ => None,
        }
    }
}

/// The resources of a pod: the largest amounts that it needs at any one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodResources {
    /// Requested CPUs, in thousandths.
    pub cpu_millis: u64,
    /// Memory in bytes: the limit or, without one, the request.
    pub memory_bytes: u64,
    /// Extended resources by name, such as `nvidia.com/gpu`.
    pub extended: BTreeMap<String, u64>,
}

impl PodResources {
    /// Whether these resources fit in `allocated`. Extended resources must be equal.
    pub(crate) fn fit_in(&self, allocated: &Self) -> bool {
        // 0 means no memory request or limit: the pod may use all memory.
        let memory = allocated.memory_bytes == 0
            || (self.memory_bytes > 0 && self.memory_bytes <= allocated.memory_bytes);
        memory && self.cpu_millis <= allocated.cpu_millis && self.extended == allocated.extended
    }
}

/// The parameters of a new sandbox. It receives everything else over its connection. No `Debug`: the token must not reach a log.
#[derive(Clone)]
pub struct LaunchRequest {
    /// The pod's uid.
    pub uid: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// The pod uses the host's PID namespace. The sandbox needs this before its first fork.
    pub host_pid: bool,
    /// The launcher to use.
    pub launcher: LauncherKind,
    /// The pod's resources.
    pub resources: PodResources,
    /// Authenticates the sandbox's first connection to the kubelet. A secret: it must not be on a command line.
    pub token: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_fit_if_none_is_larger() {
        let resources = |cpu_millis, memory_bytes| PodResources {
            cpu_millis,
            memory_bytes,
            ..PodResources::default()
        };
        assert!(resources(500, 10).fit_in(&resources(500, 10)));
        assert!(resources(100, 99).fit_in(&resources(500, 0)));
        assert!(!resources(501, 10).fit_in(&resources(500, 10)));
        assert!(!resources(500, 11).fit_in(&resources(500, 10)));
        assert!(!resources(500, 0).fit_in(&resources(500, 10)));
    }

    #[tokio::test]
    async fn handle_follows_launcher() {
        let (mut handle, control) = SandboxHandle::new(None, SandboxState::Starting);
        assert_eq!(
            (handle.id(), handle.state()),
            (None, SandboxState::Starting)
        );
        control.set_id(SandboxId::new("1"));
        control.set_state(SandboxState::Running);
        assert_eq!(handle.changed().await, SandboxState::Running);
        assert_eq!(handle.id(), Some(SandboxId::new("1")));
        handle.kill();
        control.kill_requested().await;
        // If the launcher's task ends, the sandbox counts as ended.
        drop(control);
        assert!(matches!(handle.state(), SandboxState::Ended(_)));
        assert!(matches!(handle.ended().await, SandboxEnd::Exited(_)));
    }
}
