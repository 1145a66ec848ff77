//! How long to wait before something that ended or failed is started again.

use std::time::Duration;

/// A process that ran for so long was healthy: its end says nothing about the next.
const HEALTHY_AFTER: Duration = Duration::from_secs(20);

/// Waits that double from the first to the longest, and begin anew after a success. There is no last one: to give up would be the end
/// of what the process looks after.
#[derive(Clone, Debug)]
pub struct BackOff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl BackOff {
    /// Waits from `first` to `longest`.
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

    /// The wait after the end of a process that ran for `ran`.
    pub fn wait_after(&mut self, ran: Duration) -> Duration {
        if ran >= HEALTHY_AFTER {
            self.reset();
        }
        self.wait()
    }

    /// Begins anew, after a success.
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
    fn only_healthy_runs_begin_the_waits_anew() {
        let mut back_off = BackOff::new(Duration::from_millis(50), Duration::from_secs(10));
        let quick = HEALTHY_AFTER - Duration::from_millis(1);
        assert_eq!(back_off.wait_after(quick).as_millis(), 50);
        assert_eq!(back_off.wait_after(quick).as_millis(), 100);
        assert_eq!(back_off.wait_after(HEALTHY_AFTER).as_millis(), 50);
    }
}
