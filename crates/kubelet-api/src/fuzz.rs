//! Property tests that can run for a given time: `FUZZ_SECONDS=600 cargo nextest run --package kubelet-api fuzz`, or `make fuzz`.
//!
//! The inputs are sessions of mostly valid steps, with an invalid one now and then. The generators know frames and compressed
//! headers, which a coverage-guided fuzzer would have to discover. proptest shrinks failing inputs.

use std::time::{Duration, Instant};

use bytes::BytesMut;
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestCaseResult, TestRunner};

use crate::streams::{StreamEvent, StreamProtocol};

/// Runs the usual number of cases, and repeats that for `FUZZ_SECONDS`.
pub(crate) fn run_for_fuzz_seconds<S: Strategy>(
    strategy: &S,
    check: impl Fn(S::Value) -> TestCaseResult,
) {
    let seconds = std::env::var("FUZZ_SECONDS").ok();
    let seconds = seconds.and_then(|text| text.parse().ok()).unwrap_or(0);
    let end = Instant::now() + Duration::from_secs(seconds);
    loop {
        // Each runner has a new random seed.
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

/// The result of a session.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct FuzzOutcome {
    /// Consecutive data events of one stream are merged.
    pub events: Vec<StreamEvent>,
    pub output: Vec<u8>,
    pub failed: bool,
}

/// Feeds a server with input in chunks of the given sizes, repeated as needed.
pub(crate) struct FuzzSession<'a> {
    chunk_sizes: std::iter::Cycle<std::slice::Iter<'a, usize>>,
    input: BytesMut,
    outcome: FuzzOutcome,
}

impl<'a> FuzzSession<'a> {
    pub fn with_chunk_sizes(chunk_sizes: &'a [usize]) -> Self {
        Self {
            chunk_sizes: chunk_sizes.iter().cycle(),
            input: BytesMut::new(),
            outcome: FuzzOutcome::default(),
        }
    }

    /// The client sends this. Returns false if the server has failed.
    pub fn send(&mut self, server: &mut (impl StreamProtocol + ?Sized), sent: &[u8]) -> bool {
        let mut rest = sent;
        while !rest.is_empty() && !self.outcome.failed {
            let size = self.chunk_sizes.next().copied().unwrap_or(usize::MAX);
            let (now, later) = rest.split_at(size.min(rest.len()));
            self.input.extend_from_slice(now);
            rest = later;
            let received = server.receive(&mut self.input, &mut self.outcome.events);
            self.outcome.failed = received.is_err();
        }
        !self.outcome.failed
    }

    /// The client reads the server's output.
    pub fn read(&mut self, server: &mut (impl StreamProtocol + ?Sized)) {
        self.outcome.output.extend(server.output().split());
    }

    pub fn end(mut self, server: &mut (impl StreamProtocol + ?Sized)) -> FuzzOutcome {
        self.read(server);
        self.outcome.events = merge_data(self.outcome.events);
        self.outcome
    }
}

/// Merges consecutive data events of one stream.
fn merge_data(events: Vec<StreamEvent>) -> Vec<StreamEvent> {
    let mut whole: Vec<StreamEvent> = Vec::new();
    for event in events {
        if let (
            Some(StreamEvent::Data {
                stream: before,
                bytes: begun,
            }),
            StreamEvent::Data { stream, bytes },
        ) = (whole.last_mut(), &event)
            && before == stream
        {
            *begun = [&begun[..], bytes].concat().into();
        } else {
            whole.push(event);
        }
    }
    whole
}
