//! Waiting longer after each failure.
//!
//! The figures are upstream's: the first failure costs nothing, then 10 s, doubled each time up to 5 minutes.

use std::time::Duration;

use tokio::time::Instant;

const FIRST: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_secs(300);
/// What went well for so long starts again with the shortest delay.
const FORGET: Duration = Duration::from_secs(600);

/// The delay before something is tried again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackOff {
    current: Option<Current>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Current {
    delay: Duration,
    since: Instant,
}

impl BackOff {
    /// When a thing that failed at `failed` may be tried again, if it has to wait at all.
    pub fn until(&self, failed: Instant) -> Option<Instant> {
        let current = self.current?;
        (failed.saturating_duration_since(current.since) <= FORGET).then(|| failed + current.delay)
    }

    /// The delay in force.
    pub fn delay(&self) -> Duration {
        self.current.map_or(Duration::ZERO, |current| current.delay)
    }

    /// It is tried again at `now` after a failure at `failed`; the next failure waits longer.
    pub fn step(&mut self, failed: Instant, now: Instant) {
        let delay = match self.current {
            Some(current) if failed.saturating_duration_since(current.since) <= FORGET => {
                (current.delay * 2).min(LONGEST)
            }
            _ => FIRST,
        };
        self.current = Some(Current { delay, since: now });
    }

    /// Past failures are forgiven.
    pub fn clear(&mut self) {
        self.current = None;
    }
}

/// A duration as Go prints it, which is how messages show it.
pub fn go_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (hours, minutes, rest) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let millis = duration.subsec_millis();
    if seconds == 0 && duration.is_zero() {
        return "0s".to_owned();
    }
    if seconds == 0 {
        return format!("{millis}ms");
    }
    let fraction = if millis == 0 {
        String::new()
    } else {
        format!(".{millis:03}").trim_end_matches('0').to_owned()
    };
    match (hours, minutes) {
        (0, 0) => format!("{rest}{fraction}s"),
        (0, _) => format!("{minutes}m{rest}{fraction}s"),
        _ => format!("{hours}h{minutes}m{rest}{fraction}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_up_to_five_minutes() {
        let mut back_off = BackOff::default();
        let mut now = Instant::now();
        assert_eq!(back_off.until(now), None);
        let mut delays = Vec::new();
        for _ in 0..8 {
            back_off.step(now, now);
            delays.push(back_off.delay().as_secs());
            now = back_off.until(now).expect("it has to wait");
        }
        assert_eq!(delays, [10, 20, 40, 80, 160, 300, 300, 300]);
    }

    #[test]
    fn ten_good_minutes_are_a_new_start() {
        let mut back_off = BackOff::default();
        let start = Instant::now();
        back_off.step(start, start);
        back_off.step(start, start);
        let failed = start + Duration::from_secs(601);
        assert_eq!(back_off.until(failed), None);
        back_off.step(failed, failed);
        assert_eq!(back_off.delay(), FIRST);
    }

    #[test]
    fn durations_look_like_those_of_go() {
        for (millis, text) in [
            (0, "0s"),
            (250, "250ms"),
            (10_000, "10s"),
            (1_500, "1.5s"),
            (80_000, "1m20s"),
            (300_000, "5m0s"),
            (3_600_000, "1h0m0s"),
        ] {
            assert_eq!(go_duration(Duration::from_millis(millis)), text);
        }
    }
}
