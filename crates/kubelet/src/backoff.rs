//! How long to wait before asking again.

use std::time::Duration;

use kube::runtime::utils::Backoff;

/// Waits that double from `FIRST` to `last`; what comes back after an outage should be noticed within seconds.
#[derive(Debug)]
pub(crate) struct Doubling {
    next: Duration,
    last: Duration,
}

const FIRST: Duration = Duration::from_millis(100);

impl Doubling {
    /// Waits that grow up to `last`.
    pub(crate) fn up_to(last: Duration) -> Self {
        Self { next: FIRST, last }
    }

    /// The wait before the next attempt.
    pub(crate) fn wait(&mut self) -> Duration {
        let wait = self.next;
        self.next = (wait * 2).min(self.last);
        wait
    }

    /// Starts over, after a success.
    pub(crate) fn restart(&mut self) {
        self.next = FIRST;
    }
}

impl Iterator for Doubling {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(self.wait())
    }
}

impl Backoff for Doubling {
    fn reset(&mut self) {
        self.restart();
    }
}

/// The wait before the next attempt to reach an API server that is being started, `elapsed` after the first one.
///
/// A small part of what has passed: doubling would make a node that waited 1 s for the control plane up to 1 s late.
pub(crate) fn startup_wait(elapsed: Duration) -> Duration {
    (elapsed / 50).clamp(Duration::from_millis(20), Duration::from_secs(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubling_stops_growing_and_starts_over() {
        let mut waits = Doubling::up_to(Duration::from_millis(300));
        let first: Vec<_> = waits
            .by_ref()
            .take(4)
            .map(|wait| wait.as_millis())
            .collect();
        assert_eq!(first, [100, 200, 300, 300]);
        waits.reset();
        assert_eq!(waits.wait().as_millis(), 100);
    }

    #[test]
    fn startup_waits_are_short_first_and_bounded() {
        let waits = [0, 100, 1_000, 5_000, 60_000]
            .map(|ms| startup_wait(Duration::from_millis(ms)).as_millis());
        assert_eq!(waits, [20, 20, 20, 100, 1_000]);
    }
}
