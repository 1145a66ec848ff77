//! The pod worker: one per pod. Starts and ends the pod's sandbox, and reports the pod's status.
//!
//! ```text
//!   bound ──► (awaited) ──► launched ──► connected ──► finished ──► status written ──► object deleted ──► dismissed
//!                 ▲            │            │
//!                 └── lost ◄───┴────────────┘     launched again, if the restart policy allows it
//! ```
//!
//! Awaited: the worker waits for a sandbox that an earlier kubelet launched, or for the back-off before the next launch.
//!
//! Everything is level-triggered: [`Worker::sync`] compares the desired and the actual state and acts; the loop around it
//! only waits for the next change. Restarts of containers, probes and hooks are the sandbox's task.
//!
//! ```text
//!   updates.rs          handles changes: pod updates, sandbox connections and states, timers
//!   start.rs            rejects the pod, or launches its sandbox; sends it the bundle or a stop request
//!   terminate.rs        stops the pod, deletes its object, ends its sandbox
//!   active_deadline.rs  `activeDeadlineSeconds`
//! ```

mod active_deadline;
mod start;
mod terminate;
#[cfg(test)]
mod tests;
mod updates;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{BoxStream, StreamExt};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};
use k8s_openapi::jiff::Timestamp;
use pod_protocol::connection::SandboxClient;
use pod_protocol::{PodFailure, PodState, Problem, Stop};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::bundle::ResolvedBundle;
use super::sandbox_listener::IncomingSandbox;
use super::spec::{is_being_deleted, phase, uid};
use super::status::{StatusInputs, pod_status, terminal_status};
use super::status_manager::StatusManager;
use super::{PodPhase, SandboxEnd, SandboxHandle, SandboxState, Shared};
use crate::backoff::ExponentialBackoff;

/// Time-out for the connection of a sandbox that an earlier kubelet launched and that the launcher does not find. Sandboxes try to
/// connect every second.
const ADOPTION_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum delay before a sandbox is launched again, after it failed to start or was lost.
const MAX_RELAUNCH_DELAY: Duration = Duration::from_secs(60);

/// The newest version of a pod.
#[derive(Clone, Debug)]
pub(super) struct PodUpdate {
    /// The API server's pod, but with the allocated resources.
    pub pod: Arc<Pod>,
    /// The API server has deleted the object.
    pub deleted: bool,
    /// Why the resources of the API server's pod are not allocated yet.
    pub pending_resize: Option<Problem>,
}

/// How a worker starts.
pub(super) enum WorkerStart {
    /// The pod is new and admitted.
    Admitted,
    /// The pod is new and does not match the node's last known labels. Rejected if it does not match the current ones either.
    RecheckNodeAffinity(Problem),
    /// The pod is new and rejected.
    Rejected(Problem),
    /// An earlier kubelet has admitted the pod.
    Adopted,
}

/// The channels from which a worker receives changes.
pub(super) struct WorkerInputs {
    pub pods: watch::Receiver<PodUpdate>,
    pub bundles: watch::Receiver<Option<Arc<ResolvedBundle>>>,
    pub sandboxes: mpsc::UnboundedReceiver<IncomingSandbox>,
    /// When all pods must have ended; `None` unless the node is shutting down.
    pub shutdown: watch::Receiver<Option<Instant>>,
}

/// The connection to a sandbox.
struct SandboxConnection {
    client: SandboxClient,
    states: BoxStream<'static, PodState>,
    /// The sandbox has the current bundle.
    has_bundle: bool,
    /// The last stop request that was sent.
    sent_stop: Option<Stop>,
    /// The sandbox was asked to retire: to exit, but to keep the logs. It exits when all log requests are done.
    retired: bool,
}

pub(super) struct Worker {
    shared: Arc<Shared>,
    pod: Arc<Pod>,
    /// The API server has deleted the pod object.
    deleted: bool,
    pending_resize: Option<Problem>,
    /// The status that was generated last.
    status: PodStatus,
    status_manager: StatusManager,
    /// The sandbox that was launched or found, until it has ended. While there is one, no other is launched.
    sandbox: Option<SandboxHandle>,
    /// The sandbox was killed, and has not ended yet.
    killed: bool,
    /// The last reported reason why the sandbox is queued.
    reported_queue_reason: Option<String>,
    connection: Option<SandboxConnection>,
    state: Option<PodState>,
    bundle: Option<Arc<ResolvedBundle>>,
    /// Whether the sandbox was sent a bundle. `None` without a sandbox, or until a found sandbox has reported its state.
    bundle_sent: Option<bool>,
    /// The container statuses when an earlier sandbox was lost. Sent with the bundle.
    previous_statuses: Vec<ContainerStatus>,
    /// The serial number of the last sandbox event that the worker recorded.
    last_event_serial: u64,
    /// The time within which the pod has to end; `None` unless the node is shutting down.
    shutdown_seconds: Option<i64>,
    /// When the time limit of `activeDeadlineSeconds` began; `None` until the pod's sandbox leaves the queue.
    active_since: Option<Instant>,
    /// Why this worker ends the pod: it is evicted, or its deadline has passed before a sandbox could enforce it.
    failure: Option<PodFailure>,
    evictions: watch::Receiver<BTreeMap<String, PodFailure>>,
    shutdown: watch::Receiver<Option<Instant>>,
    /// The worker has deleted the pod object, or the API server only waits for finalizers.
    object_deleted: bool,
    timer: Option<(Instant, TimerKind)>,
    launched_at: Instant,
    relaunch_backoff: ExponentialBackoff,
}

/// The action of the timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TimerKind {
    /// No sandbox has connected in time.
    SandboxMissing,
    /// The launcher could not tell whether the pod has a sandbox: ask it again.
    FindSandbox,
    /// Launch the sandbox again.
    Relaunch,
    /// Delete the pod object again.
    RetryDelete,
    /// The sandbox has not finished in time after a stop request.
    StopOverdue,
}

impl Worker {
    /// Runs until the pod has ended, and either its object is deleted or the node is shutting down.
    pub(super) async fn run(shared: Arc<Shared>, mut inputs: WorkerInputs, start: WorkerStart) {
        let PodUpdate {
            pod,
            pending_resize,
            ..
        } = inputs.pods.borrow_and_update().clone();
        let mut worker = Self {
            status_manager: StatusManager::new(
                &shared.client,
                &pod,
                Arc::clone(&shared.status_updates),
            ),
            status: pod.status.clone().unwrap_or_default(),
            active_since: active_deadline::active_since(&pod),
            failure: None,
            evictions: shared.evictions.subscribe(),
            shutdown: inputs.shutdown.clone(),
            shared,
            pod,
            deleted: false,
            pending_resize,
            sandbox: None,
            killed: false,
            reported_queue_reason: None,
            connection: None,
            state: None,
            bundle: None,
            bundle_sent: None,
            previous_statuses: vec![],
            last_event_serial: 0,
            shutdown_seconds: None,
            object_deleted: false,
            timer: None,
            launched_at: Instant::now(),
            relaunch_backoff: ExponentialBackoff::up_to(MAX_RELAUNCH_DELAY),
        };
        match start {
            WorkerStart::Admitted => worker.restore_lost_sandbox().await,
            WorkerStart::RecheckNodeAffinity(problem) => {
                match worker.shared.matches_current_node(&worker.pod).await {
                    true => worker.restore_lost_sandbox().await,
                    false => worker.reject(&problem),
                }
            }
            WorkerStart::Rejected(problem) => worker.reject(&problem),
            // The pod has no start time: it was queued, or the earlier kubelet could not write the status. `launch_sandbox` finds a
            // sandbox that still exists.
            WorkerStart::Adopted if worker.active_since.is_none() => {
                worker.restore_lost_sandbox().await;
            }
            WorkerStart::Adopted => {
                if !worker.find_sandbox().await {
                    let authenticator = &worker.shared.authenticator;
                    authenticator.await_adoption(uid(&worker.pod));
                    worker.set_timer(ADOPTION_TIMEOUT, TimerKind::SandboxMissing);
                }
            }
        }
        while worker.sync().await {
            worker.wait_for_change(&mut inputs).await;
        }
        worker.shared.pod_manager.clear_sandbox(uid(&worker.pod));
        worker.remove_records().await;
    }

    /// Waits for the next change, and updates the worker's state.
    async fn wait_for_change(&mut self, inputs: &mut WorkerInputs) {
        let deadline = self.deadline();
        tokio::select! {
            Ok(()) = inputs.pods.changed() => {
                let update = inputs.pods.borrow_and_update().clone();
                self.pod_updated(update);
            }
            Ok(()) = inputs.bundles.changed() => {
                self.bundle = inputs.bundles.borrow_and_update().clone();
                if let Some(connection) = &mut self.connection {
                    connection.has_bundle = false;
                }
            }
            Some(sandbox) = inputs.sandboxes.recv() => self.sandbox_connected(sandbox).await,
            state = next_state(&mut self.connection) => match state {
                Some(state) => self.state_received(state),
                None => self.sandbox_disconnected(),
            },
            state = launcher_state(&mut self.sandbox) => self.launcher_state_changed(state).await,
            kind = timer_fires(self.timer) => {
                self.timer = None;
                self.timer_fired(kind).await;
            }
            () = self.status_manager.wait_for_write() => {}
            () = active_deadline::wait_until(deadline) => {}
            Ok(()) = self.evictions.changed() => {
                let eviction = self.evictions.borrow_and_update().get(uid(&self.pod)).cloned();
                self.failure = self.failure.take().or(eviction);
            }
            Ok(()) = inputs.shutdown.changed() => {
                let until = *inputs.shutdown.borrow_and_update();
                self.shutdown_seconds = until.map(|until| {
                    let left = until.saturating_duration_since(Instant::now());
                    i64::try_from(left.as_secs()).unwrap_or(i64::MAX)
                });
            }
        }
    }

    /// Brings the pod closer to its desired state. Returns `false` when the worker is done.
    async fn sync(&mut self) -> bool {
        self.check_deadline();
        self.sync_sandbox().await;
        if self.needs_sandbox() {
            self.launch_sandbox().await;
        } else if !self.has_sandbox() && self.is_terminating() && !self.phase().is_terminal() {
            let failure = self.termination_failure();
            self.status =
                terminal_status(&self.status_inputs(), failure.as_ref(), Timestamp::now());
        }
        self.update_status();
        if !self.is_terminated() {
            return true;
        }
        if is_being_deleted(&self.pod) && !self.deleted && !self.object_deleted {
            self.delete_object().await;
        }
        if self.deleted || self.object_deleted || self.shutdown_seconds.is_some() {
            self.dismiss_sandbox().await;
            return false;
        }
        // The pod's directory stays, because it contains the logs.
        self.retire_sandbox().await;
        true
    }

    fn phase(&self) -> PodPhase {
        PodPhase::of(Some(&self.status))
    }

    fn status_inputs(&self) -> StatusInputs<'_> {
        StatusInputs {
            pod: &self.pod,
            state: self.state.as_ref(),
            previous: &self.status,
            terminating: self.is_terminating(),
            pending_resize: self.pending_resize.as_ref(),
        }
    }

    /// The pod has to end, whatever its restart policy.
    fn is_terminating(&self) -> bool {
        self.deleted
            || self.shutdown_seconds.is_some()
            || self.failure.is_some()
            || is_being_deleted(&self.pod)
            || phase(&self.pod).is_terminal()
    }

    fn has_sandbox(&self) -> bool {
        self.connection.is_some()
            || self.sandbox.is_some()
            || self.timer_is(TimerKind::SandboxMissing)
            || self.timer_is(TimerKind::FindSandbox)
    }

    fn needs_sandbox(&self) -> bool {
        !self.has_sandbox()
            && !self.is_terminating()
            && !self.phase().is_terminal()
            && !self.timer_is(TimerKind::Relaunch)
    }

    /// No container runs or will run, and the API server has the terminal phase.
    fn is_terminated(&self) -> bool {
        let runs = self.has_sandbox() && !self.sandbox_finished();
        let written = self.status_manager.written();
        let reported = phase(&self.pod).is_terminal()
            || written.pod_deleted
            || PodPhase::of(written.status.as_ref()).is_terminal();
        // The sandbox may still be running although the API server has a terminal phase.
        !runs && (reported || self.deleted)
    }

    /// The sandbox has reported that the pod has ended.
    fn sandbox_finished(&self) -> bool {
        self.state.as_ref().is_some_and(|state| state.finished)
    }

    fn timer_is(&self, kind: TimerKind) -> bool {
        self.timer.is_some_and(|(_, timer)| timer == kind)
    }

    fn set_timer(&mut self, after: Duration, kind: TimerKind) {
        self.timer = Some((Instant::now() + after, kind));
    }

    /// Generates the pod's status and passes it to the status manager.
    fn update_status(&mut self) {
        if self.deleted {
            return;
        }
        // The status of a rejected pod does not change any more.
        if self.state.is_some() || !self.phase().is_terminal() {
            self.status = pod_status(&self.status_inputs(), Timestamp::now());
        }
        self.shared
            .pod_manager
            .set_status(uid(&self.pod), &self.status);
        self.shared
            .network
            .set_pod(uid(&self.pod), Some(&self.status));
        self.status_manager.set_status(&self.pod, &self.status);
    }
}

/// Whether a sandbox has received a bundle: from then on its state contains containers.
pub(super) fn has_started(state: &PodState) -> bool {
    !(state.containers.is_empty() && state.init_containers.is_empty()) || state.finished
}

async fn next_state(connection: &mut Option<SandboxConnection>) -> Option<PodState> {
    match connection {
        Some(connection) => connection.states.next().await,
        None => std::future::pending().await,
    }
}

async fn launcher_state(sandbox: &mut Option<SandboxHandle>) -> SandboxState {
    match sandbox {
        Some(sandbox) => sandbox.changed().await,
        None => std::future::pending().await,
    }
}

async fn timer_fires(timer: Option<(Instant, TimerKind)>) -> TimerKind {
    match timer {
        Some((at, kind)) => {
            tokio::time::sleep_until(at).await;
            kind
        }
        None => std::future::pending().await,
    }
}
