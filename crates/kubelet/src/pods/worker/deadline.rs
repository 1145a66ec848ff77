//! The deadline of a pod (`activeDeadlineSeconds`) for as long as nobody else keeps it: a sandbox ends its pod in time, but
//! only once it knows the pod, and it isn't told before all that the pod refers to is there.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use pod_protocol::Problem;
use tokio::time::Instant;

use super::Worker;
use crate::pods::spec::is_final;

/// The end of a pod that was active for too long, in upstream's words.
pub(super) fn exceeded() -> Problem {
    Problem {
        reason: "DeadlineExceeded".to_owned(),
        message: "Pod was active on the node longer than the specified deadline".to_owned(),
    }
}

/// Since when a pod is active: since the time that its status names or, for a new one, since now.
pub(super) fn active_since(pod: &Pod) -> Instant {
    let status = pod.status.as_ref();
    let started = status.and_then(|status| status.start_time.as_ref());
    let age = started.map_or(Duration::ZERO, |started| {
        let age = Timestamp::now().duration_since(started.0);
        Duration::try_from(age).unwrap_or(Duration::ZERO)
    });
    let now = Instant::now();
    now.checked_sub(age).unwrap_or(now)
}

/// Waits until a deadline; for ever, if there is none.
pub(super) async fn passed(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

impl Worker {
    /// When the pod will have been active for too long, if it is this worker that has to notice.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let unattended = match self.instructed {
            Some(instructed) => !instructed,
            None => !self.has_sandbox(),
        };
        if !unattended || self.is_ending() || is_final(self.phase()) {
            return None;
        }
        let limit = self.pod.spec.as_ref()?.active_deadline_seconds?;
        let limit = Duration::from_secs(limit.try_into().unwrap_or(0));
        self.active_since.checked_add(limit)
    }

    /// Ends a pod that was active for too long.
    pub(super) fn check_deadline(&mut self) {
        let is_over = |deadline: Instant| deadline <= Instant::now();
        if self.deadline().is_some_and(is_over) {
            let Problem { reason, message } = exceeded();
            self.shared
                .recorder
                .say(&self.pod, false, &reason, &message);
            self.failed = Some(exceeded());
        }
    }
}
