//! Exponential back-off.
//!
//! The values are upstream's: no delay after the first failure, then 10 s, doubled each time up to 5 minutes.

use std::time::Duration;

use tokio::time::Instant;

const INITIAL_DELAY: Duration = Duration::from_secs(10);
const MAX_DELAY: Duration = Duration::from_secs(300);
/// After this long without a failure, the delay starts again at its initial value.
const RESET_AFTER: Duration = Duration::from_secs(600);

/// The delay before the next attempt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerBackOff {
    last_attempt: Option<Attempt>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Attempt {
    /// The delay after it, if it fails.
    delay: Duration,
    at: Instant,
}

impl ContainerBackOff {
    /// The earliest time of the next attempt after a failure at `failed_at`; `None` if there is no delay.
    pub fn retry_at(&self, failed_at: Instant) -> Option<Instant> {
        let last = self.last_attempt?;
        (failed_at.saturating_duration_since(last.at) <= RESET_AFTER)
            .then(|| failed_at + last.delay)
    }

    /// The current delay.
    pub fn delay(&self) -> Duration {
        self.last_attempt.map_or(Duration::ZERO, |last| last.delay)
    }

    /// Records an attempt at `now` after a failure at `failed_at`; the delay after the next failure is longer.
    pub fn record_attempt(&mut self, failed_at: Instant, now: Instant) {
        let delay = match self.last_attempt {
            Some(last) if failed_at.saturating_duration_since(last.at) <= RESET_AFTER => {
                (last.delay * 2).min(MAX_DELAY)
            }
            _ => INITIAL_DELAY,
        };
        self.last_attempt = Some(Attempt { delay, at: now });
    }

    /// Removes the delay.
    pub fn reset(&mut self) {
        self.last_attempt = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delay_doubles_up_to_five_minutes() {
        let mut back_off = ContainerBackOff::default();
        let mut now = Instant::now();
        assert_eq!(back_off.retry_at(now), None);
        let mut delays = Vec::new();
        for _ in 0..8 {
            back_off.record_attempt(now, now);
            delays.push(back_off.delay().as_secs());
            now = back_off.retry_at(now).expect("a delay");
        }
        assert_eq!(delays, [10, 20, 40, 80, 160, 300, 300, 300]);
    }

    #[test]
    fn delay_resets_after_ten_minutes_without_failure() {
        let mut back_off = ContainerBackOff::default();
        let start = Instant::now();
        back_off.record_attempt(start, start);
        back_off.record_attempt(start, start);
        let failed_at = start + Duration::from_secs(601);
        assert_eq!(back_off.retry_at(failed_at), None);
        back_off.record_attempt(failed_at, failed_at);
        assert_eq!(back_off.delay(), INITIAL_DELAY);
    }
}
