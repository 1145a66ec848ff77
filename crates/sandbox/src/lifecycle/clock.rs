//! Converts times and durations of the API to those of timers.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;

/// Converts a time in the past from the wall clock to the monotonic clock.
pub fn instant_of(time: Timestamp) -> Instant {
    let age = Timestamp::now().duration_since(time);
    let age = Duration::try_from(age).unwrap_or_default();
    Instant::now().checked_sub(age).unwrap_or_else(Instant::now)
}

/// Converts seconds of a spec; negative values count as 0.
pub fn seconds(value: i64) -> Duration {
    // The cap of a year keeps sums of instants from overflowing.
    Duration::from_secs(u64::try_from(value).unwrap_or(0).min(365 * 86_400))
}
