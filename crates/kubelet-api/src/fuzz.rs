//! Properties that are tried for as long as one likes: `FUZZ_SECONDS=600 cargo nextest run --package kubelet-api fuzz`, or `make fuzz`.
//!
//! Inputs are sessions made of steps that make sense, and now and then of one that doesn't: what a coverage-guided fuzzer would
//! have to find out about frames and compressed headers is known here. What fails is made as small as possible.

use std::time::{Duration, Instant};

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestCaseResult, TestRunner};

/// Tries as many cases as any other property has, and more while there is time.
pub(crate) fn for_a_while<S: Strategy>(strategy: &S, check: impl Fn(S::Value) -> TestCaseResult) {
    let seconds = std::env::var("FUZZ_SECONDS").ok();
    let seconds = seconds.and_then(|text| text.parse().ok()).unwrap_or(0);
    let end = Instant::now() + Duration::from_secs(seconds);
    loop {
        // Seeded by chance each time.
        let mut runner = TestRunner::new(Config {
            failure_persistence: None,
            ..Config::default()
        });
        if let Err(failure) = runner.run(strategy, &check) {
            panic!("{failure}");
        }
        if Instant::now() >= end {
            return;
        }
    }
}
