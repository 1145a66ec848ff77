//! Exponential back-off before a failed or exited process is started again.

use std::time::Duration;

/// A process that ran for this long was healthy: its exit does not count towards the back-off.
const HEALTHY_AFTER: Duration = Duration::from_secs(20);

/// A wait that doubles from `first` to `longest` and resets after a success. There is no limit on retries: the callers supervise
/// processes that pods depend on, so they must not give up.
#[derive(Clone, Debug)]
pub struct BackOff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl BackOff {
    /// A back-off that starts at `first` and is capped at `longest`.
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self {
            first,
            longest,
            next: first,
        }
    }

    /// The wait after a failure.
    pub fn wait(&mut self) -> Duration {
        let wait = self.next;
        self.next = wait.saturating_mul(2).min(self.longest);
        wait
    }

    /// The wait after the exit of a process that ran for `ran`.
    pub fn wait_after(&mut self, ran: Duration) -> Duration {
        if ran >= HEALTHY_AFTER {
            self.reset();
        }
        self.wait()
    }

    /// Resets the wait to `first`, after a success.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_longest() {
        let mut back_off = BackOff::new(Duration::from_millis(50), Duration::from_millis(300));
        let waits: Vec<_> = (0..5).map(|_| back_off.wait().as_millis()).collect();
        assert_eq!(waits, [50, 100, 200, 300, 300]);
        back_off.reset();
        assert_eq!(back_off.wait().as_millis(), 50);
    }

    #[test]
    fn only_a_healthy_run_resets_the_back_off() {
        let mut back_off = BackOff::new(Duration::from_millis(50), Duration::from_secs(10));
        let quick = HEALTHY_AFTER - Duration::from_millis(1);
        assert_eq!(back_off.wait_after(quick).as_millis(), 50);
        assert_eq!(back_off.wait_after(quick).as_millis(), 100);
        assert_eq!(back_off.wait_after(HEALTHY_AFTER).as_millis(), 50);
    }
}
