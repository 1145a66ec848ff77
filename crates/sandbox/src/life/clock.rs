//! Two clocks: the one on the wall that the API shows, and the one that timers go by.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;

/// The time on the wall.
pub fn now() -> Timestamp {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let seconds = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
    let nanos = i32::try_from(since.subsec_nanos()).unwrap_or(0);
    Timestamp::new(seconds, nanos).unwrap_or(Timestamp::UNIX_EPOCH)
}

/// A time of the past on the clock that timers go by.
pub fn instant_of(time: Timestamp) -> Instant {
    let age = Duration::try_from(now().duration_since(time)).unwrap_or_default();
    Instant::now().checked_sub(age).unwrap_or_else(Instant::now)
}
