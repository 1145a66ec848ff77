//! Converts the API's times and durations to those of tokio's timers.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;

/// Converts a time in the past from the wall clock to the monotonic clock. A time in the future becomes the current time.
pub fn instant_of(time: Timestamp) -> Instant {
    let age = Timestamp::now().duration_since(time);
    let age = Duration::try_from(age).unwrap_or_default();
    Instant::now().checked_sub(age).unwrap_or_else(Instant::now)
}

/// Converts seconds of a spec; negative values count as 0.
pub fn seconds(value: i64) -> Duration {
    // At most a year, because adding the largest values to an instant would overflow.
    Duration::from_secs(u64::try_from(value).unwrap_or(0).min(365 * 86_400))
}
