//! Two clocks: the one on the wall that the API shows, and the one that timers go by.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;

/// A time of the past on the clock that timers go by.
pub fn instant_of(time: Timestamp) -> Instant {
    let age = Timestamp::now().duration_since(time);
    let age = Duration::try_from(age).unwrap_or_default();
    Instant::now().checked_sub(age).unwrap_or_else(Instant::now)
}
