//! Fuzzes sessions over SPDY: valid and some invalid actions of clients and servers, in any order.

use std::collections::{HashMap, HashSet};

use bytes::Bytes;
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;

use super::SpdyConnection;
use super::test_client::{Received, SpdyTestClient};
use crate::fuzz::{FuzzOutcome, FuzzSession, run_for_fuzz_seconds};
use crate::streams::{StreamCommand, StreamEvent, StreamProtocol};

/// An action of the client or the server. Streams are numbered from 0, in the order in which the client opens them.
#[derive(Clone, Debug)]
enum Step {
    Open(Vec<(String, String)>),
    Data(u8, Vec<u8>, bool),
    Reset(u8),
    Window(u8, u32),
    /// A control frame of any type. Types with header blocks mostly end the session.
    Control(u8, u8, Vec<u8>),
    Garbage(Vec<u8>),
    Accept(u8),
    Send(u8, u16),
    Finish(u8),
    ResetByServer(u8),
    Consumed(u8, u16),
    KeepAlive,
    /// The client reads the server's output.
    Read,
    Close,
}

fn step() -> impl Strategy<Value = Step> {
    let stream = || 0..6_u8;
    let bytes = |most| prop::collection::vec(any::<u8>(), 0..most);
    let header = ("[a-z]{1,12}", ".{0,20}");
    let window = prop_oneof![0..100_000_u32, any::<u32>()];
    // Pings, settings, and types to be ignored.
    let harmless = (
        prop_oneof![Just(4_u8), Just(6), Just(5), Just(10)],
        any::<u8>(),
        bytes(20),
    );
    prop_oneof![
        8 => prop::collection::vec(header, 0..5).prop_map(Step::Open),
        8 => (stream(), bytes(600), prop::bool::weighted(0.2)).prop_map(|(s, b, f)| Step::Data(s, b, f)),
        2 => stream().prop_map(Step::Reset),
        3 => (stream(), window).prop_map(|(s, w)| Step::Window(s, w)),
        3 => harmless.prop_map(|(k, f, p)| Step::Control(k, f, p)),
        1 => (0..12_u8, any::<u8>(), bytes(40)).prop_map(|(k, f, p)| Step::Control(k, f, p)),
        1 => bytes(60).prop_map(Step::Garbage),
        6 => stream().prop_map(Step::Accept),
        8 => (stream(), any::<u16>()).prop_map(|(s, n)| Step::Send(s, n)),
        4 => stream().prop_map(Step::Finish),
        2 => stream().prop_map(Step::ResetByServer),
        4 => (stream(), any::<u16>()).prop_map(|(s, n)| Step::Consumed(s, n)),
        1 => Just(Step::KeepAlive),
        4 => Just(Step::Read),
        1 => Just(Step::Close),
    ]
}

/// Runs a session. The input of the server arrives in chunks of these sizes.
fn run_session(steps: &[Step], chunk_sizes: &[usize]) -> FuzzOutcome {
    let (mut client, mut connection) = (SpdyTestClient::new(), SpdyConnection::new());
    let mut session = FuzzSession::with_chunk_sizes(chunk_sizes);
    for step in steps {
        let number = |stream: u8| u32::from(stream) * 2 + 1;
        let sent = match step.clone() {
            Step::Open(headers) => {
                let headers: Vec<_> = headers
                    .iter()
                    .map(|(name, value)| (name.as_str(), value.as_str()))
                    .collect();
                client.open(&headers).1
            }
            Step::Data(stream, bytes, fin) => client.data(number(stream), &bytes, fin),
            Step::Reset(stream) => client.reset(number(stream)),
            // Stream 0 is the window of the connection.
            Step::Window(stream, delta) => client.window_update(u32::from(stream), delta),
            Step::Control(kind, flags, payload) => {
                let length = payload.len() as u8;
                [&[0x80, 3, 0, kind, flags, 0, 0, length][..], &payload].concat()
            }
            Step::Garbage(bytes) => bytes,
            Step::Accept(stream) => {
                connection.apply(StreamCommand::Accept(number(stream)));
                continue;
            }
            Step::Send(stream, length) => {
                // The driver checks this too.
                if connection.is_ready() {
                    let bytes = Bytes::from(vec![stream; length.into()]);
                    connection.apply(StreamCommand::Data(number(stream), bytes));
                }
                continue;
            }
            Step::Finish(stream) => {
                if connection.is_ready() {
                    connection.apply(StreamCommand::Finish(number(stream)));
                }
                continue;
            }
            Step::ResetByServer(stream) => {
                connection.apply(StreamCommand::Reset(number(stream)));
                continue;
            }
            Step::Consumed(stream, length) => {
                StreamProtocol::consumed(&mut connection, number(stream), length.into());
                continue;
            }
            Step::KeepAlive => {
                connection.keep_alive();
                continue;
            }
            Step::Read => {
                session.read(&mut connection);
                continue;
            }
            Step::Close => {
                connection.close();
                break;
            }
        };
        if !session.send(&mut connection, &sent) {
            break;
        }
    }
    session.end(&mut connection)
}

/// Each stream opens once, closes once per direction, and has no events before or after.
fn check_events(events: &[StreamEvent]) -> TestCaseResult {
    let mut last = 0;
    let mut open = HashSet::new();
    for event in events {
        match event {
            StreamEvent::Opened { stream, .. } => {
                prop_assert!(*stream > last && stream % 2 == 1, "{events:?}");
                last = *stream;
                open.insert(*stream);
            }
            StreamEvent::Data { stream, bytes } => {
                prop_assert!(open.contains(stream) && !bytes.is_empty(), "{events:?}");
            }
            StreamEvent::Finished(stream) => prop_assert!(open.remove(stream), "{events:?}"),
            // A client may reset a stream after its FIN, since we may still send.
            StreamEvent::Reset(stream) => {
                prop_assert!(*stream <= last, "{events:?}");
                open.remove(stream);
            }
            StreamEvent::Closed => {}
        }
    }
    Ok(())
}

/// The output is valid, each stream has only its own data, and no data follows the end of a stream.
fn check_output(outcome: &FuzzOutcome) -> TestCaseResult {
    let mut ended = HashMap::new();
    for received in SpdyTestClient::new().receive(&outcome.output) {
        match received {
            Received::Data { stream, bytes } => {
                prop_assert!(
                    !ended.contains_key(&stream),
                    "data after the end of {stream}"
                );
                let own = ((stream - 1) / 2) as u8;
                prop_assert!(
                    bytes.iter().all(|byte| *byte == own),
                    "data of another stream"
                );
            }
            Received::Finished(stream) => {
                prop_assert_eq!(ended.insert(stream, "finished"), None);
            }
            Received::Reset(stream) => {
                ended.insert(stream, "reset");
            }
            _ => {}
        }
    }
    Ok(())
}

/// The server's output without window updates, which depend on how the input is split.
fn without_window_updates(output: &[u8]) -> Vec<Received> {
    let mut received = SpdyTestClient::new().receive(output);
    received.retain(|received| !matches!(received, Received::WindowUpdate { .. }));
    received
}

#[test]
fn fuzz_spdy_sessions() {
    let sessions = (
        prop::collection::vec(step(), 0..40),
        prop::collection::vec(1..50_usize, 1..10),
    );
    run_for_fuzz_seconds(&sessions, |(steps, chunk_sizes)| {
        let whole = run_session(&steps, &[usize::MAX]);
        check_events(&whole.events)?;
        check_output(&whole)?;
        // Chunk boundaries must not matter.
        let cut = run_session(&steps, &chunk_sizes);
        prop_assert_eq!(
            without_window_updates(&cut.output),
            without_window_updates(&whole.output)
        );
        prop_assert_eq!((cut.events, cut.failed), (whole.events, whole.failed));
        Ok(())
    });
}

#[test]
fn fuzz_header_blocks() {
    // The decompressed size is bounded.
    let blocks = prop::collection::vec(any::<u8>(), 0..300);
    run_for_fuzz_seconds(&blocks, |block| {
        let _ = super::headers::HeaderReader::new().read(&block);
        // With a valid zlib header and dictionary id the input gets further.
        let begun = [&[0x78, 0xf9, 0xe3, 0xc6, 0xa7, 0xc2][..], &block].concat();
        let _ = super::headers::HeaderReader::new().read(&begun);
        let mut compressor = flate2::Compress::new(flate2::Compression::fast(), true);
        let mut honest = Vec::with_capacity(1024);
        let _ = compressor.compress_vec(&block, &mut honest, flate2::FlushCompress::Sync);
        let _ = super::headers::HeaderReader::new().read(&honest);
        Ok(())
    });
    // A decompression bomb: zeros compress about a thousandfold.
    let mut compressor = flate2::Compress::new(flate2::Compression::best(), true);
    let mut bomb = Vec::with_capacity(64 * 1024);
    let nothing = vec![0; 16 << 20];
    let _ = compressor.compress_vec(&nothing, &mut bomb, flate2::FlushCompress::Sync);
    let read = super::headers::HeaderReader::new().read(&bomb);
    assert_eq!(read, Err(super::SpdyError::HeadersTooLarge));
}
