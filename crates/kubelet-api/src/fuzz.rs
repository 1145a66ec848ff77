//! Properties that are tried for as long as one likes: `FUZZ_SECONDS=600 cargo nextest run --package kubelet-api fuzz`, or `make fuzz`.
//!
//! Inputs are sessions made of steps that make sense, and now and then of one that doesn't: what a coverage-guided fuzzer would
//! have to find out about frames and compressed headers is known here. What fails is made as small as possible.

use std::time::{Duration, Instant};

use bytes::BytesMut;
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestCaseResult, TestRunner};

use crate::streams::{StreamEvent, StreamProtocol};

/// Tries as many cases as any other property has, and more while there is time.
pub(crate) fn run_for_fuzz_seconds<S: Strategy>(
    strategy: &S,
    check: impl Fn(S::Value) -> TestCaseResult,
) {
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

/// What came of a session.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct FuzzOutcome {
    /// Data that came in pieces is put together.
    pub events: Vec<StreamEvent>,
    pub output: Vec<u8>,
    pub failed: bool,
}

/// A server that is spoken to, in pieces of given sizes, over and over.
pub(crate) struct FuzzSession<'a> {
    pieces: std::iter::Cycle<std::slice::Iter<'a, usize>>,
    input: BytesMut,
    outcome: FuzzOutcome,
}

impl<'a> FuzzSession<'a> {
    pub fn in_pieces(pieces: &'a [usize]) -> Self {
        Self {
            pieces: pieces.iter().cycle(),
            input: BytesMut::new(),
            outcome: FuzzOutcome::default(),
        }
    }

    /// The client says this. False if the server can't go on.
    pub fn send(&mut self, server: &mut (impl StreamProtocol + ?Sized), sent: &[u8]) -> bool {
        let mut rest = sent;
        while !rest.is_empty() && !self.outcome.failed {
            let piece = self.pieces.next().copied().unwrap_or(usize::MAX);
            let (now, later) = rest.split_at(piece.min(rest.len()));
            self.input.extend_from_slice(now);
            rest = later;
            let received = server.receive(&mut self.input, &mut self.outcome.events);
            self.outcome.failed = received.is_err();
        }
        !self.outcome.failed
    }

    /// The client reads what the server has for it.
    pub fn read(&mut self, server: &mut (impl StreamProtocol + ?Sized)) {
        self.outcome.output.extend(server.output().split());
    }

    pub fn end(mut self, server: &mut (impl StreamProtocol + ?Sized)) -> FuzzOutcome {
        self.read(server);
        self.outcome.events = put_together(self.outcome.events);
        self.outcome
    }
}

/// Pieces of data that follow each other are one.
fn put_together(events: Vec<StreamEvent>) -> Vec<StreamEvent> {
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
