//! Current CPU usage, computed from successive values of CPU time.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};

use k8s_openapi::jiff::Timestamp;

/// A shorter interval gives no meaningful rate.
const MIN_INTERVAL_SECONDS: f64 = 1.0;
/// A rate is not computed again within this time.
const REUSE_SECONDS: f64 = 5.0;
/// A rate over a longer interval says nothing about current usage.
const MAX_INTERVAL_SECONDS: f64 = 300.0;

/// The last sample of each container, pod and system container, by name.
#[derive(Default)]
pub(super) struct CpuRates(Mutex<HashMap<String, CpuSample>>);

#[derive(Clone, Copy)]
struct CpuSample {
    at: Timestamp,
    used: u64,
    rate: Option<u64>,
}

/// One round of measurements. Names that are not recorded in it are dropped at its end.
pub(super) struct RatesRound<'a> {
    before: MutexGuard<'a, HashMap<String, CpuSample>>,
    now: HashMap<String, CpuSample>,
}

impl CpuRates {
    pub(super) fn begin_round(&self) -> RatesRound<'_> {
        RatesRound {
            before: self.0.lock().unwrap(),
            now: HashMap::new(),
        }
    }
}

impl RatesRound<'_> {
    /// Records that `name`, which runs since `started`, has used `used` nanoseconds of CPU time until `at`. Returns its current
    /// usage in nanocores, if it can be computed.
    pub(super) fn record(
        &mut self,
        name: &str,
        at: Timestamp,
        used: u64,
        started: Timestamp,
    ) -> Option<u64> {
        let last = self.before.get(name).copied();
        let sample = match last {
            Some(last) if seconds(last.at, at) < REUSE_SECONDS && last.rate.is_some() => last,
            Some(last) => CpuSample {
                at,
                used,
                rate: rate(last.at, last.used, at, used),
            },
            None => CpuSample {
                at,
                used,
                rate: rate(started, 0, at, used),
            },
        };
        self.now.insert(name.to_owned(), sample);
        sample.rate
    }
}

impl Drop for RatesRound<'_> {
    fn drop(&mut self) {
        *self.before = std::mem::take(&mut self.now);
    }
}

fn rate(from: Timestamp, before: u64, to: Timestamp, after: u64) -> Option<u64> {
    let seconds = seconds(from, to);
    let used = after.saturating_sub(before);
    // Cannot overflow: at most the nanoseconds of all CPUs in one second.
    (MIN_INTERVAL_SECONDS..=MAX_INTERVAL_SECONDS)
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
    fn rate_covers_only_recent_usage() {
        let at = |second: i64| Timestamp::from_second(1_000_000 + second).unwrap();
        let rates = CpuRates::default();
        let record = |second, used: u64| {
            rates
                .begin_round()
                .record("x", at(second), used * 1_000_000_000, at(0))
        };
        assert_eq!(record(10, 5), Some(500_000_000));
        // Too soon for a new rate.
        assert_eq!(record(12, 7), Some(500_000_000));
        assert_eq!(record(20, 25), Some(2_000_000_000));
        // The last sample is an hour old.
        assert_eq!(record(3620, 26), None);
        assert_eq!(record(3621, 27), Some(1_000_000_000));
        drop(rates.begin_round());
        assert_eq!(record(3630, 27), None);
    }
}
