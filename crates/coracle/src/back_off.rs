//! Exponential back-off before a failed or exited process is started again.

use std::time::Duration;

/// A process that ran for this long was healthy: its exit does not count towards the back-off.
const HEALTHY_AFTER: Duration = Duration::from_secs(20);

/// A delay that doubles from `first` to `max` and resets after a success. There is no limit on retries: the callers supervise
/// processes that pods depend on, so they must not give up.
#[derive(Clone, Debug)]
pub struct ProcessBackOff {
    first: Duration,
    max: Duration,
    next: Duration,
}

impl ProcessBackOff {
    /// A back-off that starts at `first` and is capped at `max`.
    pub const fn new(first: Duration, max: Duration) -> Self {
        Self {
            first,
            max,
            next: first,
        }
    }

    /// The delay after a failure.
    pub fn next_delay(&mut self) -> Duration {
        let delay = self.next;
        self.next = delay.saturating_mul(2).min(self.max);
        delay
    }

    /// The delay after the exit of a process that ran for `ran`.
    pub fn next_delay_after(&mut self, ran: Duration) -> Duration {
        if ran >= HEALTHY_AFTER {
            self.reset();
        }
        self.next_delay()
    }

    /// Resets the delay to `first`, after a success.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_maximum() {
        let mut back_off =
            ProcessBackOff::new(Duration::from_millis(50), Duration::from_millis(300));
        let delays: Vec<_> = (0..5).map(|_| back_off.next_delay().as_millis()).collect();
        assert_eq!(delays, [50, 100, 200, 300, 300]);
        back_off.reset();
        assert_eq!(back_off.next_delay().as_millis(), 50);
    }

    #[test]
    fn only_healthy_run_resets_back_off() {
        let mut back_off = ProcessBackOff::new(Duration::from_millis(50), Duration::from_secs(10));
        let quick = HEALTHY_AFTER - Duration::from_millis(1);
        assert_eq!(back_off.next_delay_after(quick).as_millis(), 50);
        assert_eq!(back_off.next_delay_after(quick).as_millis(), 100);
        assert_eq!(back_off.next_delay_after(HEALTHY_AFTER).as_millis(), 50);
    }
}
