//! Asking again and again.

use std::rc::Rc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Probe;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use super::{Outcome, Subject, at_least_one, check};
use crate::seams::Runtime;

/// A question that could not be asked is repeated at once so many times.
const TRIES: usize = 3;

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// Is it up? Asked until the answer is final, before anything else is.
    Startup,
    /// Is it alive? Asked until it isn't.
    Liveness,
    /// Can it take work? Asked as long as it runs.
    Readiness,
}

impl Which {
    fn word(self) -> &'static str {
        match self {
            Self::Startup => "Startup",
            Self::Liveness => "Liveness",
            Self::Readiness => "Readiness",
        }
    }
}

/// What a worker tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Word {
    /// The thresholds are reached: well, or not.
    Verdict(bool),
    /// Worth a warning: reason and message of the event.
    Event(&'static str, String),
}

/// Asks until the answer is final, or for ever. `since` is when the container was started.
pub async fn work<R: Runtime>(
    runtime: Rc<R>,
    which: Which,
    subject: Subject,
    probe: Probe,
    since: Instant,
    tell: impl Fn(Word),
) {
    let delay = u64::try_from(probe.initial_delay_seconds.unwrap_or(0)).unwrap_or(0);
    let period = Duration::from_secs(at_least_one(probe.period_seconds, 10));
    let first = (since + Duration::from_secs(delay)).max(Instant::now());
    let mut ticks = interval_at(first, period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut run = (false, 0_u64);
    loop {
        ticks.tick().await;
        let outcome = ask(&*runtime, &subject, &probe).await;
        runtime.probed(&subject.container.name, which.word(), outcome.word());
        let well = match outcome {
            Outcome::Success => true,
            Outcome::Warning(output) => {
                let message = format!("{} probe warning: {output}", which.word());
                tell(Word::Event("ProbeWarning", message));
                true
            }
            Outcome::Failure(output) => {
                let message = format!("{} probe failed: {output}", which.word());
                tell(Word::Event("Unhealthy", message));
                false
            }
            Outcome::Error(error) => {
                let message = format!(
                    "{} probe errored and resulted in unknown state: {error}",
                    which.word()
                );
                tell(Word::Event("Unhealthy", message));
                continue;
            }
        };
        run = if run.0 == well && run.1 > 0 {
            (well, run.1.saturating_add(1))
        } else {
            (well, 1)
        };
        let threshold = if well {
            at_least_one(probe.success_threshold, 1)
        } else {
            at_least_one(probe.failure_threshold, 3)
        };
        if run.1 < threshold {
            continue;
        }
        tell(Word::Verdict(well));
        // What is up stays up, and what is dead will be ended.
        if which == Which::Startup || (which == Which::Liveness && !well) {
            return;
        }
    }
}

async fn ask<R: Runtime>(runtime: &R, subject: &Subject, probe: &Probe) -> Outcome {
    let mut outcome = check(runtime, subject, probe).await;
    for _ in 1..TRIES {
        if !matches!(outcome, Outcome::Error(_)) {
            break;
        }
        outcome = check(runtime, subject, probe).await;
    }
    outcome
}
