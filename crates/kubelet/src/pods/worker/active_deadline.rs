//! `activeDeadlineSeconds`. A sandbox enforces it as soon as it has a bundle. Until then, which may be long if the pod refers to
//! a missing object, the worker does.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use pod_protocol::PodFailure;
use tokio::time::Instant;

use super::Worker;

/// The start of the time that the deadline limits: `status.startTime`; `None` for a pod that has not started.
pub(super) fn active_since(pod: &Pod) -> Option<Instant> {
    let started = pod.status.as_ref()?.start_time.as_ref()?;
    let age = Timestamp::now().duration_since(started.0);
    let age = Duration::try_from(age).unwrap_or(Duration::ZERO);
    let now = Instant::now();
    Some(now.checked_sub(age).unwrap_or(now))
}

/// Waits until a deadline. Never returns without one.
pub(super) async fn wait_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

impl Worker {
    /// The pod's deadline, if the worker has to enforce it.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let is_enforced_by_sandbox = match self.bundle_sent {
            Some(sent) => sent,
            None => self.has_sandbox(),
        };
        if is_enforced_by_sandbox || self.is_terminating() || self.phase().is_terminal() {
            return None;
        }
        let limit = self.pod.spec.as_ref()?.active_deadline_seconds?;
        let limit = Duration::from_secs(limit.try_into().unwrap_or(0));
        self.active_since?.checked_add(limit)
    }

    /// Ends the pod if its deadline has passed.
    pub(super) fn check_deadline(&mut self) {
        let has_passed = |deadline: Instant| deadline <= Instant::now();
        if self.deadline().is_some_and(has_passed) {
            let failure = PodFailure::deadline_exceeded();
            let reason = failure.cause.reason();
            self.shared
                .recorder
                .normal(&self.pod, reason, &failure.message);
            self.failure = Some(failure);
        }
    }
}
