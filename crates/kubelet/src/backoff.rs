//! Delays between retries.

use std::time::Duration;

use kube::runtime::utils::Backoff;

/// Delays that double from `FIRST_DELAY` to `max`. Maxima are small, so that the kubelet notices within seconds that an outage is over.
#[derive(Debug)]
pub(crate) struct ExponentialBackoff {
    next: Duration,
    max: Duration,
}

const FIRST_DELAY: Duration = Duration::from_millis(100);

impl ExponentialBackoff {
    pub(crate) fn up_to(max: Duration) -> Self {
        Self {
            next: FIRST_DELAY,
            max,
        }
    }

    /// The delay before the next attempt.
    pub(crate) fn next_delay(&mut self) -> Duration {
        let delay = self.next;
        self.next = (delay * 2).min(self.max);
        delay
    }

    /// Starts again with the first delay, after a success.
    pub(crate) fn reset(&mut self) {
        self.next = FIRST_DELAY;
    }
}

impl Iterator for ExponentialBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(self.next_delay())
    }
}

impl Backoff for ExponentialBackoff {
    fn reset(&mut self) {
        self.next = FIRST_DELAY;
    }
}

/// The delay before the next attempt to reach an API server that is starting, `elapsed` after the first attempt.
///
/// It is a small fraction of `elapsed`: doubling would make a node that waited 1 s for the control plane up to 1 s late.
pub(crate) fn startup_retry_delay(elapsed: Duration) -> Duration {
    (elapsed / 50).clamp(Duration::from_millis(20), Duration::from_secs(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_maximum_and_reset() {
        let mut delays = ExponentialBackoff::up_to(Duration::from_millis(300));
        let first: Vec<_> = delays
            .by_ref()
            .take(4)
            .map(|delay| delay.as_millis())
            .collect();
        assert_eq!(first, [100, 200, 300, 300]);
        delays.reset();
        assert_eq!(delays.next_delay().as_millis(), 100);
    }

    #[test]
    fn startup_retry_delays_grow_and_are_bounded() {
        let delays = [0, 100, 1_000, 5_000, 60_000]
            .map(|ms| startup_retry_delay(Duration::from_millis(ms)).as_millis());
        assert_eq!(delays, [20, 20, 20, 100, 1_000]);
    }
}
