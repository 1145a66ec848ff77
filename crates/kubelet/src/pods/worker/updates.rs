//! How a worker takes changes: of the pod, of its sandbox, and timers.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::jiff::Timestamp;
use pod_protocol::PodState;

use super::{PodUpdate, SandboxConnection, TimerKind, Worker, has_started};
use crate::pods::sandbox_listener::IncomingSandbox;
use crate::pods::spec::{full_name, phase, uid};
use crate::pods::status::{
    apply_checkpoint, restarts_after_loss, terminal_status, terminate_running,
};

/// How long a disconnected sandbox that its launcher does not know may take to reconnect.
const UNKNOWN_RECONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The relaunch back-off is reset if the sandbox has run for this long.
const STABLE_AFTER: Duration = Duration::from_secs(60);

impl Worker {
    pub(super) fn pod_updated(&mut self, update: PodUpdate) {
        self.pod = update.pod;
        self.deleted = update.deleted;
        self.pending_resize = update.pending_resize;
        // Another component has set a terminal phase, which is final for the kubelet too.
        if let Some(status) = &self.pod.status
            && phase(&self.pod).is_terminal()
            && !self.phase().is_terminal()
        {
            self.status.phase.clone_from(&status.phase);
            self.status.reason.clone_from(&status.reason);
            self.status.message.clone_from(&status.message);
        }
    }

    pub(super) async fn sandbox_connected(&mut self, sandbox: IncomingSandbox) {
        let client = sandbox.client;
        let states = match client.states().await {
            Ok(states) => states,
            Err(error) => {
                tracing::warn!(
                    pod = full_name(&self.pod),
                    error = &error as &dyn std::error::Error,
                    "cannot read the state of a sandbox that connected"
                );
                return;
            }
        };
        sandbox.authenticated.confirm();
        self.timer = None;
        let connected = &sandbox.hello.id;
        let known = self.sandbox.as_ref().and_then(|sandbox| sandbox.id());
        if let Some(known) = known.filter(|known| known != connected)
            && let Some(other) = self.sandbox.take()
        {
            // A pod has one sandbox. The connected sandbox holds the pod's lock, so kill the other one.
            tracing::warn!(
                pod = full_name(&self.pod),
                %known,
                %connected,
                "the pod has two sandboxes: killing the one that is not connected"
            );
            other.kill();
            (self.state, self.bundle_sent, self.last_event_serial) = (None, None, 0);
        }
        // Keep the handle of a sandbox that this process has launched: only its launcher gets the exit status.
        if self.sandbox.is_none() {
            self.killed = false;
            let adopted = self.shared.launcher.adopt(connected).await;
            self.sandbox = adopted.unwrap_or_else(|error| {
                let pod = full_name(&self.pod);
                tracing::warn!(pod, %connected, %error, "cannot find the connected sandbox");
                None
            });
        }
        self.shared
            .pod_manager
            .set_sandbox(uid(&self.pod), client.clone());
        self.connection = Some(SandboxConnection {
            client,
            states: states.filter_map(|state| async { state.ok() }).boxed(),
            has_bundle: false,
            sent_stop: None,
            retired: false,
        });
    }

    pub(super) fn state_received(&mut self, state: PodState) {
        for event in &state.events {
            if event.serial > self.last_event_serial {
                self.last_event_serial = event.serial;
                self.shared.recorder.record(&self.pod, event.clone());
            }
        }
        let before = self.state.as_ref().and_then(|state| state.failure.as_ref());
        if let Some(failure) = &state.failure
            && failure.cause.is_eviction()
            && before != Some(failure)
            && !self.phase().is_terminal()
        {
            let (reason, message) = (failure.cause.reason(), &failure.message);
            self.shared.recorder.warning(&self.pod, reason, message);
        }
        if self.state.as_ref().map(|state| &state.host) != Some(&state.host) {
            tracing::debug!(pod = full_name(&self.pod), host = ?state.host, "sandbox reported its host");
        }
        self.bundle_sent.get_or_insert_with(|| has_started(&state));
        self.state = Some(state);
    }

    /// The connection broke, or does not work any more: the sandbox has to connect again.
    pub(super) fn sandbox_disconnected(&mut self) {
        if let Some(connection) = self.connection.take() {
            connection.client.close();
        }
        self.shared.pod_manager.clear_sandbox(uid(&self.pod));
        let timeout = match self.sandbox {
            Some(_) => self.shared.launcher.timeouts().reconnect,
            None => UNKNOWN_RECONNECT_TIMEOUT,
        };
        if !self.killed {
            self.set_timer(timeout, TimerKind::SandboxMissing);
        }
    }

    pub(super) async fn sandbox_exited(&mut self, exit: &str) {
        tracing::info!(pod = full_name(&self.pod), exit, "sandbox has exited");
        self.sandbox = None;
        self.connection = None;
        self.timer = None;
        self.sandbox_lost().await;
    }

    pub(super) async fn timer_fired(&mut self, kind: TimerKind) {
        if kind == TimerKind::FindSandbox && !self.find_sandbox().await {
            self.sandbox_lost().await;
        }
        if matches!(kind, TimerKind::SandboxMissing | TimerKind::StopOverdue) {
            // The sandbox of a terminated pod has usually exited by then.
            if !self.phase().is_terminal() {
                tracing::warn!(
                    pod = full_name(&self.pod),
                    timer = ?kind,
                    "sandbox does not respond: killing it"
                );
            }
            self.kill_sandbox().await;
        }
    }

    /// The sandbox has exited, and all its containers with it.
    pub(super) async fn sandbox_lost(&mut self) {
        self.shared.pod_manager.clear_sandbox(uid(&self.pod));
        self.bundle_sent = None;
        self.last_event_serial = 0;
        // The result of a finished pod stays.
        if self.sandbox_finished() {
            return;
        }
        self.state = None;
        if self.phase().is_terminal() {
            return;
        }
        self.restore_checkpoint().await;
        if self.sandbox_finished() {
            return;
        }
        if !restarts_after_loss(&self.pod, &self.status) {
            let failure = self.termination_failure();
            self.status =
                terminal_status(&self.status_inputs(), failure.as_ref(), Timestamp::now());
            return;
        }
        for statuses in [
            &mut self.status.init_container_statuses,
            &mut self.status.container_statuses,
            &mut self.status.ephemeral_container_statuses,
        ] {
            *statuses = statuses.as_deref().map(terminate_running);
        }
        self.previous_statuses = [
            &self.status.init_container_statuses,
            &self.status.container_statuses,
            &self.status.ephemeral_container_statuses,
        ]
        .into_iter()
        .flatten()
        .flatten()
        .cloned()
        .collect();
        // A terminating pod is not started again.
        if self.is_terminating() {
            return;
        }
        self.shared.recorder.normal(
            &self.pod,
            "SandboxChanged",
            "Pod sandbox changed, it will be killed and re-created.",
        );
        if self.launched_at.elapsed() >= STABLE_AFTER {
            self.relaunch_backoff.reset();
        }
        let delay = self.relaunch_backoff.next_delay();
        self.set_timer(delay, TimerKind::Relaunch);
    }

    /// Reads the lost sandbox's checkpoint, which may contain exit codes that it could not report any more.
    async fn restore_checkpoint(&mut self) {
        let records = self.shared.launcher.records();
        let checkpoint = records.checkpoint(uid(&self.pod)).await;
        let Some(state) = checkpoint else { return };
        if state.finished {
            self.state = Some(state);
            self.update_status();
            return;
        }
        for (statuses, saved) in [
            (
                &mut self.status.init_container_statuses,
                &state.init_containers,
            ),
            (&mut self.status.container_statuses, &state.containers),
            (
                &mut self.status.ephemeral_container_statuses,
                &state.ephemeral_containers,
            ),
        ] {
            apply_checkpoint(statuses.get_or_insert_default(), saved);
        }
    }

    /// Handles a sandbox that has already exited, of a pod without status: an earlier kubelet started it and could not write the
    /// status.
    pub(super) async fn restore_lost_sandbox(&mut self) {
        let launcher = Arc::clone(&self.shared.launcher);
        let uid = uid(&self.pod);
        let has_ended = matches!(launcher.find(uid).await, Ok(None));
        if has_ended && launcher.records().checkpoint(uid).await.is_some() {
            self.sandbox_lost().await;
        }
    }
}
