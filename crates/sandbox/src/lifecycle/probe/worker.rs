//! Runs a probe periodically.

use std::rc::Rc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Probe;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use super::{ProbeResult, ProbedContainer, at_least_one, probe_once};
use crate::container_runtime::ContainerRuntime;

/// A probe that could not run is repeated at once, up to this many times. As upstream.
const MAX_TRIES: usize = 3;

/// The kind of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeKind {
    /// Runs before the others, until a threshold is reached.
    Startup,
    /// Runs until the failure threshold is reached.
    Liveness,
    /// Runs as long as the container does.
    Readiness,
}

impl ProbeKind {
    fn as_str(self) -> &'static str {
        match self {
            Self::Startup => "Startup",
            Self::Liveness => "Liveness",
            Self::Readiness => "Readiness",
        }
    }
}

/// A message of a probe worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeEvent {
    /// The success threshold (`true`) or the failure threshold (`false`) is reached.
    ThresholdReached(bool),
    /// A warning Event: reason and message.
    Warning(&'static str, String),
}

/// Runs a probe until its result is final, or until the task is aborted. `since` is when the container was started.
pub async fn run<R: ContainerRuntime>(
    runtime: Rc<R>,
    kind: ProbeKind,
    container: ProbedContainer,
    probe: Probe,
    since: Instant,
    send: impl Fn(ProbeEvent),
) {
    let delay = u64::try_from(probe.initial_delay_seconds.unwrap_or(0)).unwrap_or(0);
    let period = Duration::from_secs(at_least_one(probe.period_seconds, 10));
    let first = (since + Duration::from_secs(delay)).max(Instant::now());
    let mut ticks = interval_at(first, period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut streak = (false, 0_u64);
    loop {
        ticks.tick().await;
        let result = probe_with_retries(&*runtime, &container, &probe).await;
        runtime.record_probe(&container.spec.name, kind.as_str(), result.metric_label());
        let is_healthy = match result {
            ProbeResult::Success => true,
            ProbeResult::Warning(output) => {
                let message = format!("{} probe warning: {output}", kind.as_str());
                send(ProbeEvent::Warning("ProbeWarning", message));
                true
            }
            ProbeResult::Failure(output) => {
                let message = format!("{} probe failed: {output}", kind.as_str());
                send(ProbeEvent::Warning("Unhealthy", message));
                false
            }
            ProbeResult::Unknown(error) => {
                let message = format!(
                    "{} probe errored and resulted in unknown state: {error}",
                    kind.as_str()
                );
                send(ProbeEvent::Warning("Unhealthy", message));
                continue;
            }
        };
        streak = if streak.0 == is_healthy && streak.1 > 0 {
            (is_healthy, streak.1.saturating_add(1))
        } else {
            (is_healthy, 1)
        };
        let threshold = if is_healthy {
            at_least_one(probe.success_threshold, 1)
        } else {
            at_least_one(probe.failure_threshold, 3)
        };
        if streak.1 < threshold {
            continue;
        }
        send(ProbeEvent::ThresholdReached(is_healthy));
        // Final: a startup probe does not run again, and a container that is not alive is killed.
        if kind == ProbeKind::Startup || (kind == ProbeKind::Liveness && !is_healthy) {
            return;
        }
    }
}

async fn probe_with_retries<R: ContainerRuntime>(
    runtime: &R,
    container: &ProbedContainer,
    probe: &Probe,
) -> ProbeResult {
    let mut result = probe_once(runtime, container, probe).await;
    for _ in 1..MAX_TRIES {
        if !matches!(result, ProbeResult::Unknown(_)) {
            break;
        }
        result = probe_once(runtime, container, probe).await;
    }
    result
}
