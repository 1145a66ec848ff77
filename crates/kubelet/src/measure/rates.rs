//! How much of processors is used *now*, from how much was used ever.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use k8s_openapi::jiff::Timestamp;

/// A rate over less is noise.
const LEAST_SECONDS: f64 = 1.0;
/// Figures that are asked for again this soon are told with the same rate.
const FRESH_SECONDS: f64 = 5.0;
/// A rate over more is no news.
const MOST_SECONDS: f64 = 300.0;

/// The last figure of everything that was measured.
#[derive(Default)]
pub(super) struct Rates(Mutex<HashMap<String, Last>>);

#[derive(Clone, Copy)]
struct Last {
    at: Timestamp,
    used: u64,
    rate: Option<u64>,
}

/// One round of figures; what is not noted in it is forgotten at its end.
pub(super) struct Round<'a> {
    before: MutexGuard<'a, HashMap<String, Last>>,
    now: HashMap<String, Last>,
}

impl Rates {
    pub(super) fn begin(&self) -> Round<'_> {
        Round {
            before: self.0.lock().unwrap_or_else(PoisonError::into_inner),
            now: HashMap::new(),
        }
    }
}

impl Round<'_> {
    /// Takes note of nanoseconds that `what`, which began at `started`, has used until `at`: billionths of a processor that it
    /// uses now, if that can be told.
    pub(super) fn note(
        &mut self,
        what: &str,
        at: Timestamp,
        used: u64,
        started: Timestamp,
    ) -> Option<u64> {
        let last = self.before.get(what).copied();
        let noted = match last {
            Some(last) if seconds(last.at, at) < FRESH_SECONDS && last.rate.is_some() => last,
            Some(last) => Last {
                at,
                used,
                rate: rate(last.at, last.used, at, used),
            },
            None => Last {
                at,
                used,
                rate: rate(started, 0, at, used),
            },
        };
        self.now.insert(what.to_owned(), noted);
        noted.rate
    }
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        *self.before = std::mem::take(&mut self.now);
    }
}

fn rate(from: Timestamp, before: u64, to: Timestamp, after: u64) -> Option<u64> {
    let seconds = seconds(from, to);
    let used = after.saturating_sub(before);
    // Far below the largest number: nanoseconds of all processors in a second.
    (LEAST_SECONDS..=MOST_SECONDS)
        .contains(&seconds)
        .then(|| (used as f64 / seconds) as u64)
}

fn seconds(from: Timestamp, to: Timestamp) -> f64 {
    to.duration_since(from).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_late() {
        let at = |second: i64| Timestamp::from_second(1_000_000 + second).unwrap();
        let rates = Rates::default();
        let note = |second, used: u64| {
            rates
                .begin()
                .note("x", at(second), used * 1_000_000_000, at(0))
        };
        assert_eq!(note(10, 5), Some(500_000_000));
        // Too soon for another.
        assert_eq!(note(12, 7), Some(500_000_000));
        assert_eq!(note(20, 25), Some(2_000_000_000));
        // Nobody asked for an hour.
        assert_eq!(note(3620, 26), None);
        assert_eq!(note(3621, 27), Some(1_000_000_000));
        drop(rates.begin());
        assert_eq!(note(3630, 27), None);
    }
}
