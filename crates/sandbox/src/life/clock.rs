//! Conversion from wall-clock time, which the API uses, to the monotonic clock, which timers use.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;

/// Converts a time in the past.
pub fn instant_of(time: Timestamp) -> Instant {
    let age = Timestamp::now().duration_since(time);
    let age = Duration::try_from(age).unwrap_or_default();
    Instant::now().checked_sub(age).unwrap_or_else(Instant::now)
}
