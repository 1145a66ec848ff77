//! How a worker starts a pod: rejects it, or launches its sandbox and sends the bundle.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use pod_protocol::connection::ConnectionError;
use pod_protocol::{Problem, RequestError};
use tokio::time::Instant;

use super::{SandboxEnd, SandboxHandle, SandboxState, TimerKind, Worker, active_deadline};
use crate::pods::LaunchRequest;
use crate::pods::admission::pod_resources;
use crate::pods::runtime_class;
use crate::pods::spec::{full_name, name, namespace, uid};
use crate::pods::status::rejected_status;

/// A sandbox that was asked to stop is killed this long after the pod's grace period.
const STOP_TIMEOUT: Duration = Duration::from_secs(60);

/// The request that was just sent to a sandbox.
enum Sent {
    Nothing,
    Bundle,
    /// A stop request, with this grace period in seconds.
    Stop(i64),
}

impl Worker {
    pub(super) fn reject(&mut self, problem: &Problem) {
        tracing::info!(
            pod = full_name(&self.pod),
            reason = problem.reason,
            message = problem.message,
            "rejecting pod"
        );
        self.status = rejected_status(&self.pod, problem, Timestamp::now());
        self.shared
            .recorder
            .warning(&self.pod, &problem.reason, &problem.message);
    }

    /// Looks for a sandbox that an earlier kubelet has started and that has not connected yet. Returns `false` only if there is none: a
    /// failed lookup is retried.
    pub(super) async fn find_sandbox(&mut self) -> bool {
        match self.shared.launcher.find(uid(&self.pod)).await {
            Ok(None) => false,
            Ok(Some(sandbox)) => {
                self.shared.authenticator.await_adoption(uid(&self.pod));
                self.follow_sandbox(sandbox);
                true
            }
            Err(error) => {
                tracing::warn!(pod = full_name(&self.pod), %error, "cannot look for a running sandbox; will retry");
                let delay = self.relaunch_backoff.next_delay();
                self.set_timer(delay, TimerKind::FindSandbox);
                true
            }
        }
    }

    /// Takes the handle of a sandbox that was launched or found.
    fn follow_sandbox(&mut self, sandbox: SandboxHandle) {
        let state = sandbox.state();
        self.sandbox = Some(sandbox);
        self.killed = false;
        self.observe_state(&state);
    }

    /// Limits the time until a running sandbox connects. The launcher limits the time until it runs.
    fn observe_state(&mut self, state: &SandboxState) {
        // The time in a queue does not count, also if the launcher noticed only late that there is one.
        match state {
            SandboxState::Queued { .. } => {
                self.active_since = active_deadline::active_since(&self.pod);
            }
            _ => _ = self.active_since.get_or_insert_with(Instant::now),
        }
        match state {
            SandboxState::Running if self.connection.is_none() && !self.killed => {
                let timeout = self.shared.launcher.timeouts().connect;
                self.set_timer(timeout, TimerKind::SandboxMissing);
            }
            SandboxState::Queued { reason, .. }
                if self.reported_queue_reason.as_ref() != Some(reason) =>
            {
                let message = match state {
                    SandboxState::Queued {
                        expected_start: Some(start),
                        ..
                    } => format!("waiting for resources: {reason}, expected to start at {start}"),
                    _ => format!("waiting for resources: {reason}"),
                };
                self.shared.recorder.normal(&self.pod, "Queued", &message);
                self.reported_queue_reason = Some(reason.clone());
            }
            _ => {}
        }
    }

    /// The launcher has published a new state of the sandbox.
    pub(super) async fn launcher_state_changed(&mut self, state: SandboxState) {
        match state {
            SandboxState::Ended(SandboxEnd::NotStarted(reason)) => {
                self.sandbox = None;
                self.bundle_sent = None;
                self.timer = None;
                // It was killed before it ran, because the pod has to end.
                if !self.killed {
                    self.launch_failed(&reason);
                }
            }
            SandboxState::Ended(SandboxEnd::Exited(exit)) => self.sandbox_exited(&exit).await,
            state => self.observe_state(&state),
        }
    }

    pub(super) async fn launch_sandbox(&mut self) {
        // An earlier kubelet may have ended before it could report that it had launched one.
        if self.find_sandbox().await {
            return;
        }
        if let Err(error) = runtime_class::check(&self.shared.client, &self.pod).await {
            self.active_since.get_or_insert_with(Instant::now);
            return self.launch_failed(&with_sources(&error));
        }
        let request = LaunchRequest {
            uid: uid(&self.pod).to_owned(),
            namespace: namespace(&self.pod).to_owned(),
            name: name(&self.pod).to_owned(),
            host_pid: self.pod.spec.as_ref().and_then(|spec| spec.host_pid) == Some(true),
            launcher: self.shared.launcher_kind(&self.pod),
            resources: pod_resources(&self.pod),
            token: self.shared.authenticator.issue_token(uid(&self.pod)),
        };
        self.bundle_sent = Some(false);
        self.launched_at = Instant::now();
        let sandbox = self.shared.launcher.launch(request);
        self.follow_sandbox(sandbox);
    }

    fn launch_failed(&mut self, reason: &str) {
        let message = format!("Failed to create pod sandbox: {reason}");
        tracing::warn!(
            pod = full_name(&self.pod),
            message,
            "cannot launch sandbox; will retry"
        );
        self.shared
            .recorder
            .warning(&self.pod, "FailedCreatePodSandBox", &message);
        let delay = self.relaunch_backoff.next_delay();
        self.set_timer(delay, TimerKind::Relaunch);
    }

    /// Sends the sandbox the newest bundle or, if the pod is terminating, a stop request.
    pub(super) async fn sync_sandbox(&mut self) {
        let stop = self.stop_request();
        if stop.is_some() && self.bundle_sent == Some(false) {
            // Without a bundle no container runs: only the sandbox itself has to end.
            self.dismiss_sandbox().await;
            self.sandbox_lost().await;
            return;
        }
        let Some(connection) = &mut self.connection else {
            return;
        };
        let sent = async {
            match (&stop, &self.bundle) {
                // A found sandbox must first report whether it has a bundle.
                (Some(request), _)
                    if connection.sent_stop != stop && self.bundle_sent.is_some() =>
                {
                    connection.client.stop(request).await?;
                    connection.sent_stop.clone_from(&stop);
                    Ok(Sent::Stop(request.grace_seconds))
                }
                (None, Some(resolved))
                    if !connection.has_bundle
                        && (resolved.complete || self.bundle_sent == Some(true)) =>
                {
                    let mut bundle = resolved.bundle.clone();
                    bundle.previous_statuses.clone_from(&self.previous_statuses);
                    connection.client.put_bundle(&bundle).await?;
                    connection.has_bundle = true;
                    Ok(Sent::Bundle)
                }
                _ => Ok::<_, ConnectionError>(Sent::Nothing),
            }
        };
        match sent.await {
            Ok(Sent::Nothing) => {}
            Ok(Sent::Bundle) => self.bundle_sent = Some(true),
            Err(ConnectionError::Rejected { call, error, .. }) => {
                self.request_rejected(call, &error);
            }
            Ok(Sent::Stop(grace)) => self.await_stop(grace),
            Err(error) => {
                tracing::warn!(
                    pod = full_name(&self.pod),
                    error = &error as &dyn std::error::Error,
                    "cannot send a request to the sandbox"
                );
                self.sandbox_disconnected();
            }
        }
    }

    /// Limits the time until the sandbox has ended the pod.
    fn await_stop(&mut self, grace_seconds: i64) {
        let grace = Duration::from_secs(grace_seconds.unsigned_abs());
        self.set_timer(grace + STOP_TIMEOUT, TimerKind::StopOverdue);
    }

    /// The sandbox works, but does not accept the bundle or the stop request: the same one would be rejected again. The next change of
    /// the pod is sent.
    fn request_rejected(&mut self, call: &str, error: &RequestError) {
        let message = format!("cannot {call}: {}", error.message);
        tracing::warn!(
            pod = full_name(&self.pod),
            message,
            "sandbox rejected a request"
        );
        self.shared
            .recorder
            .warning(&self.pod, "FailedSync", &message);
        let stop = self.stop_request();
        if let Some(connection) = &mut self.connection {
            connection.has_bundle = true;
            connection.sent_stop.clone_from(&stop);
        }
        if let Some(stop) = stop {
            self.await_stop(stop.grace_seconds);
        }
    }
}

/// The messages of an error and of all its sources.
fn with_sources(error: &dyn std::error::Error) -> String {
    let sources = std::iter::successors(error.source(), |source| source.source());
    sources.fold(error.to_string(), |text, source| {
        format!("{text}: {source}")
    })
}
