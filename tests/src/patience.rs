//! Waiting for conditions by polling, never by a fixed sleep.

use std::time::{Duration, Instant};

const LOOK_EVERY: Duration = Duration::from_millis(30);

/// Polls `look` until it returns a value; `None` after the time-out.
pub fn eventually<T>(patience: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + patience;
    loop {
        if let Some(found) = look() {
            return Some(found);
        }
        if Instant::now() >= end {
            return None;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Polls until `holds` returns true. Fails the test after `seconds`.
#[track_caller]
pub fn wait_until(seconds: u64, what: &str, mut holds: impl FnMut() -> bool) {
    let held = eventually(Duration::from_secs(seconds), || holds().then_some(()));
    assert!(held.is_some(), "waited {seconds} s in vain: {what}");
}
