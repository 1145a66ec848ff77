//! Waiting for conditions by polling, never by a fixed sleep.

use std::time::{Duration, Instant};

const POLL_INTERVAL: Duration = Duration::from_millis(30);

/// Polls until `poll` returns a value; `None` after the time-out.
pub fn eventually<T>(timeout: Duration, mut poll: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(found) = poll() {
            return Some(found);
        }
        if Instant::now() >= deadline {
            return None;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Polls until `holds` returns true. Fails the test after `seconds`.
#[track_caller]
pub fn wait_until(seconds: u64, condition: &str, mut holds: impl FnMut() -> bool) {
    let held = eventually(Duration::from_secs(seconds), || holds().then_some(()));
    assert!(held.is_some(), "timed out after {seconds} s: {condition}");
}
