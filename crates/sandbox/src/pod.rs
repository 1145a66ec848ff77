//! The sandbox's service for the kubelet ([`SandboxService`]): the pod's lifecycle, once there is a bundle, and its logs.

use std::cell::{Cell, OnceCell, RefCell};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::jiff::Timestamp;
use pod_protocol::connection::{LogByteStream, SandboxService};
use pod_protocol::streams::{FrameReader, FrameStream};
use pod_protocol::usage::PodUsage;
use pod_protocol::{
    AttachQuery, Bundle, ExecQuery, HostFacts, LogQuery, PodFailure, PodState, RequestError, Stop,
};
use rustix::process::Pid;
use tokio::net::TcpStream;
use tokio::sync::{Notify, watch};

use crate::lifecycle::checkpoint::Checkpoint;
use crate::lifecycle::eviction;
use crate::lifecycle::{self, LifecycleHandle};
use crate::node_services::NodeServices;
use crate::runtime::logs::LogDir;
use crate::runtime::streams::ClientSession;
use crate::runtime::{LinuxRuntime, PodDirs, Snapshotter};

/// Time that a retired sandbox that is a step, and so holds resources of the node, waits for open log streams.
const LOG_READERS_TIMEOUT: Duration = Duration::from_secs(60);
/// Polling interval for open log streams.
const LOG_READERS_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// The API server's default of `terminationGracePeriodSeconds`.
const DEFAULT_GRACE_SECONDS: i64 = 30;
/// Retry interval of updates and checkpoints that failed.
const SUPERVISOR_RETRY_INTERVAL: Duration = Duration::from_secs(10);

type PodRuntime<S> = Rc<LinuxRuntime<S>>;

/// One pod, as the kubelet sees it.
pub struct SandboxPod<S> {
    logs: LogDir,
    stage: RefCell<Stage<S>>,
    checkpoint: Arc<Checkpoint>,
    /// The container runtime, once the pod has started.
    runtime: OnceCell<PodRuntime<S>>,
    /// The state that the kubelet sees: that of [`lifecycle`], once the pod has started.
    state: watch::Sender<PodState>,
    dismissed: Rc<Notify>,
    /// The sandbox was retired: the logs stay on disk for the kubelet.
    keeps_logs: Cell<bool>,
    /// Each log stream holds a clone.
    readers: Arc<()>,
    /// Facts about this machine, for the kubelet.
    host: HostFacts,
    /// The sandbox is a step, whose resources other pods may wait for.
    is_step: bool,
}

enum Stage<S> {
    /// No bundle has been received.
    Pending(Box<PendingPod<S>>),
    /// The pod has started.
    Running(LifecycleHandle, watch::Sender<Bundle>, PodRuntime<S>),
    /// The pod failed to start.
    Failed,
}

struct PendingPod<S> {
    environment: PodEnvironment<S>,
    /// The kubelet stopped the pod before it started.
    stop: Option<Stop>,
}

/// The parts of a pod that exist before its lifecycle is started.
pub struct PodEnvironment<S> {
    /// Provides images, volumes and a network.
    pub services: S,
    /// The pod's directories.
    pub dirs: PodDirs,
    /// The inner process.
    pub inner: Pid,
    /// The socket for requests to the inner process.
    pub inner_socket: OwnedFd,
    /// Makes root file systems from layers.
    pub snapshotter: Snapshotter,
    /// The limits of each container.
    pub limits: ContainerLimits,
    /// The sandbox is a step, whose resources other pods may wait for.
    pub is_step: bool,
}

/// The limits that the machine sets to each container.
#[derive(Clone, Copy, Debug)]
pub struct ContainerLimits {
    /// Open files.
    pub open_files: u64,
    /// Processes; `None` if they are not limited.
    pub processes: Option<u64>,
}

impl<S: NodeServices> SandboxPod<S> {
    /// A pod without a bundle.
    pub fn new(environment: PodEnvironment<S>) -> Self {
        let host = HostFacts {
            host_ips: environment.services.host_ips(),
            started_at: Some(Timestamp::now()),
            snapshotter: environment.snapshotter.to_string(),
            has_cgroups: environment.dirs.cgroup.is_some(),
            open_files: environment.limits.open_files,
            processes: environment.limits.processes,
        };
        let dirs = &environment.dirs;
        Self {
            is_step: environment.is_step,
            logs: LogDir::new(&dirs.logs),
            checkpoint: Arc::new(Checkpoint::new(&dirs.disk)),
            stage: RefCell::new(Stage::Pending(Box::new(PendingPod {
                environment,
                stop: None,
            }))),
            runtime: OnceCell::new(),
            state: watch::Sender::new(PodState {
                host: host.clone(),
                ..PodState::default()
            }),
            host,
            dismissed: Rc::default(),
            keeps_logs: Cell::new(false),
            readers: Arc::default(),
        }
    }

    /// Waits until the kubelet dismisses the sandbox, or has retired it and the log streams are closed.
    pub fn dismissed(&self) -> impl Future<Output = ()> + 'static {
        let dismissed = self.dismissed.clone();
        async move { dismissed.notified().await }
    }

    /// Whether the sandbox was retired, so that the logs must stay.
    pub fn keeps_logs(&self) -> bool {
        self.keeps_logs.get()
    }

    /// Writes the checkpoint and freezes it: later changes are not saved.
    pub fn save_final_checkpoint(&self) {
        let state = self.state.subscribe();
        if let Err(error) = self.checkpoint.save(|| state.borrow().clone()) {
            tracing::warn!(%error, "cannot write the pod's checkpoint");
        }
        self.checkpoint.freeze();
    }

    /// Ends the pod within its grace period, because Slurm ends it, and waits until no container runs.
    pub async fn terminate(&self, failure: PodFailure) {
        let (lifecycle, grace_seconds) = match &mut *self.stage.borrow_mut() {
            Stage::Running(lifecycle, bundle, _) => {
                let spec = bundle.borrow().pod.spec.clone().unwrap_or_default();
                let grace = spec.termination_grace_period_seconds;
                (lifecycle.clone(), grace.unwrap_or(DEFAULT_GRACE_SECONDS))
            }
            // A bundle that arrives now starts no container.
            Stage::Pending(pending) => {
                pending.stop = Some(Stop {
                    grace_seconds: 1,
                    failure: Some(failure),
                });
                return;
            }
            Stage::Failed => return,
        };
        lifecycle.stop(Stop {
            grace_seconds,
            failure: Some(failure),
        });
        lifecycle.finished().await;
    }

    /// Kills the containers that still run, and waits for them.
    pub async fn end(&self) {
        let lifecycle = match &*self.stage.borrow() {
            Stage::Running(lifecycle, ..) => lifecycle.clone(),
            Stage::Pending(_) | Stage::Failed => return,
        };
        lifecycle.stop(Stop {
            grace_seconds: 0,
            failure: None,
        });
        lifecycle.finished().await;
    }

    /// Starts an attach session. Waits for a container that has not started yet, and misses nothing of its output.
    async fn open_attach(&self, mut query: AttachQuery) -> Result<ClientSession, RequestError> {
        let mut states = self.state.subscribe();
        loop {
            let is_awaited = is_not_started(&states.borrow_and_update(), &query.container);
            let problem = match self.runtime() {
                Ok(runtime) => match (runtime.open_attach(&query).await, query.log_bytes_seen) {
                    (Ok(session), _) => return Ok(session),
                    (Err(problem), _) if is_awaited => problem,
                    (Err(_), Some(seen)) => {
                        return Ok(runtime.replay_log(&query.container, seen).await);
                    }
                    (Err(problem), None) => return Err(problem),
                },
                Err(problem) => problem,
            };
            if !is_awaited || states.changed().await.is_err() {
                return Err(problem);
            }
            query.log_bytes_seen = Some(0);
        }
    }

    /// The container runtime, if the pod has started.
    fn runtime(&self) -> Result<PodRuntime<S>, RequestError> {
        match &*self.stage.borrow() {
            Stage::Running(_, _, runtime) => Ok(runtime.clone()),
            Stage::Pending(_) | Stage::Failed => {
                Err(RequestError::not_found("the pod does not run"))
            }
        }
    }

    fn start(&self, pending: PendingPod<S>, bundle: Bundle) -> std::io::Result<Stage<S>> {
        let PendingPod { environment, stop } = pending;
        let (pod, measured_dirs) = (bundle.pod.clone(), environment.dirs.clone());
        let runtime = LinuxRuntime::new(
            environment.services,
            environment.dirs,
            self.logs.clone(),
            environment.inner,
            environment.inner_socket,
            bundle.clone(),
            environment.snapshotter,
        )?;
        let runtime = Rc::new(runtime);
        let _ = self.runtime.set(runtime.clone());
        let lifecycle = lifecycle::start(runtime.clone(), bundle.clone());
        if let Some(stop) = stop {
            lifecycle.stop(stop);
        }
        let evicted = lifecycle.clone();
        tokio::task::spawn_local(async move {
            let failure = eviction::wait_until_exceeded(&pod, &measured_dirs).await;
            evicted.stop(Stop {
                grace_seconds: 1,
                failure: Some(failure),
            });
        });
        tokio::task::spawn_local(publish_states(
            lifecycle.state(),
            self.host.clone(),
            self.state.clone(),
        ));
        let checkpoints = save_checkpoints(Arc::clone(&self.checkpoint), lifecycle.state());
        tokio::task::spawn_local(checkpoints);
        tokio::task::spawn_local(exit_after_inner_died(runtime.clone()));
        tokio::task::spawn_local(exit_after_network_lost(runtime.clone(), lifecycle.clone()));
        let (bundles, newest) = watch::channel(bundle);
        tokio::task::spawn_local(apply_bundles(newest, runtime.clone(), lifecycle.clone()));
        Ok(Stage::Running(lifecycle, bundles, runtime))
    }
}

/// Whether a container has not been started yet, and may be.
fn is_not_started(pod: &PodState, container: &str) -> bool {
    let PodState {
        init_containers,
        containers,
        ephemeral_containers,
        ..
    } = pod;
    let mut statuses = (init_containers.iter())
        .chain(containers)
        .chain(ephemeral_containers);
    let status = statuses.find(|status| status.name == container);
    !pod.finished
        && status.is_none_or(|status| {
            let is_waiting = (status.state.as_ref()).is_none_or(|state| state.waiting.is_some());
            is_waiting
                && status.restart_count == 0
                && status
                    .last_state
                    .as_ref()
                    .is_none_or(|last| last.terminated.is_none())
        })
}

/// Copies the states of the lifecycle, which starts after clients may have subscribed, and adds the facts of the host.
async fn publish_states(
    mut lifecycle: watch::Receiver<PodState>,
    host: HostFacts,
    state: watch::Sender<PodState>,
) {
    loop {
        let now = lifecycle.borrow_and_update().clone();
        state.send_replace(PodState {
            host: host.clone(),
            ..now
        });
        if lifecycle.changed().await.is_err() {
            return;
        }
    }
}

/// Exits when the inner process dies. The kubelet notices the exit and starts another sandbox, which continues by the pod's restart
/// policy.
async fn exit_after_inner_died<S: NodeServices>(runtime: PodRuntime<S>) {
    runtime.inner_died().await;
    tracing::error!("the pod's inner process was killed");
    // In the host's pid namespace, the inner process's children survive it.
    let _ = linux::process::kill_descendants(Duration::from_secs(2));
    std::process::exit(1);
}

/// Exits when the pod has lost its network, as after the death of the inner process.
async fn exit_after_network_lost<S: NodeServices>(
    runtime: PodRuntime<S>,
    lifecycle: LifecycleHandle,
) {
    runtime.network_lost().await;
    if lifecycle.abandon().await {
        tracing::error!("the sandbox exits: the pod has lost its network");
        let _ = linux::process::kill_descendants(Duration::from_secs(2));
        std::process::exit(1);
    }
}

/// Applies each bundle that is the newest when the one before is applied: updating volumes takes a while.
async fn apply_bundles<S: NodeServices>(
    mut newest: watch::Receiver<Bundle>,
    runtime: PodRuntime<S>,
    lifecycle: LifecycleHandle,
) {
    let mut is_complete = true;
    loop {
        let changed = match is_complete {
            true => newest.changed().await,
            false => {
                let changed =
                    tokio::time::timeout(SUPERVISOR_RETRY_INTERVAL, newest.changed()).await;
                changed.unwrap_or(Ok(()))
            }
        };
        if changed.is_err() {
            return;
        }
        let bundle = newest.borrow_and_update().clone();
        let applied;
        (applied, is_complete) = runtime.put_bundle(bundle).await;
        lifecycle.put_bundle(applied);
    }
}

/// Saves the checkpoint whenever it is outdated, on another thread because the disk may be slow.
async fn save_checkpoints(checkpoint: Arc<Checkpoint>, mut state: watch::Receiver<PodState>) {
    loop {
        let is_outdated = checkpoint.is_outdated_by(&state.borrow_and_update());
        let saved = match is_outdated {
            true => {
                let (checkpoint, newest) = (Arc::clone(&checkpoint), state.clone());
                let save = move || checkpoint.save(|| newest.borrow().clone());
                let saved = tokio::task::spawn_blocking(save).await;
                saved.map_err(std::io::Error::other).flatten()
            }
            false => Ok(()),
        };
        let changed = match saved {
            Ok(()) => state.changed().await,
            Err(error) => {
                tracing::warn!(%error, "cannot write the pod's checkpoint yet");
                let changed =
                    tokio::time::timeout(SUPERVISOR_RETRY_INTERVAL, state.changed()).await;
                changed.unwrap_or(Ok(()))
            }
        };
        if changed.is_err() {
            return;
        }
    }
}

impl<S: NodeServices> SandboxService for SandboxPod<S> {
    fn put_bundle(&self, bundle: Bundle) {
        let stage = self.stage.replace(Stage::Failed);
        let stage = match stage {
            Stage::Pending(pending) => self.start(*pending, bundle).unwrap_or_else(|error| {
                tracing::error!(%error, "cannot start the pod");
                // Those of an earlier sandbox of this pod.
                self.keeps_logs.set(true);
                self.dismissed.notify_one();
                Stage::Failed
            }),
            running @ Stage::Running(..) => {
                if let Stage::Running(_, bundles, _) = &running {
                    bundles.send_replace(bundle);
                }
                running
            }
            Stage::Failed => Stage::Failed,
        };
        self.stage.replace(stage);
    }

    fn stop(&self, stop: Stop) {
        match &mut *self.stage.borrow_mut() {
            Stage::Pending(pending) => pending.stop = Some(stop),
            Stage::Running(lifecycle, ..) => lifecycle.stop(stop),
            Stage::Failed => {}
        }
    }

    fn dismiss(&self) {
        self.dismissed.notify_one();
    }

    fn retire(&self) {
        self.keeps_logs.set(true);
        let is_step = self.is_step;
        let (dismissed, readers) = (self.dismissed.clone(), Arc::downgrade(&self.readers));
        tokio::task::spawn_local(async move {
            // No new log streams are opened: the kubelet reads the logs from disk now.
            let readers_closed = async {
                while readers.strong_count() > 1 {
                    tokio::time::sleep(LOG_READERS_POLL_INTERVAL).await;
                }
            };
            match is_step {
                true => _ = tokio::time::timeout(LOG_READERS_TIMEOUT, readers_closed).await,
                false => readers_closed.await,
            }
            dismissed.notify_one();
        });
    }

    fn state(&self) -> watch::Receiver<PodState> {
        self.state.subscribe()
    }

    async fn logs(&self, query: LogQuery) -> Result<LogByteStream, RequestError> {
        let log = self.logs.read(&query).await?;
        let reader = self.readers.clone();
        Ok(log.inspect(move |_| _ = &reader).boxed())
    }

    async fn exec(
        &self,
        query: ExecQuery,
        client: FrameReader,
    ) -> Result<FrameStream, RequestError> {
        let session = self.runtime()?.open_exec(query).await?;
        Ok(session.run(client))
    }

    async fn attach(
        &self,
        query: AttachQuery,
        client: FrameReader,
    ) -> Result<FrameStream, RequestError> {
        Ok(self.open_attach(query).await?.run(client))
    }

    async fn port_forward(&self, port: u16) -> Result<TcpStream, RequestError> {
        self.runtime()?.open_port(port).await
    }

    async fn usage(&self) -> Option<PodUsage> {
        let runtime = self.runtime.get().cloned()?;
        runtime.usage().await
    }
}
