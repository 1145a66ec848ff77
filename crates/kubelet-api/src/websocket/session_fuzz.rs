//! Fuzzes sessions over WebSocket: fragmented messages, control frames between fragments, and sometimes invalid input.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use proptest::prelude::*;

use super::test_frames::{client_frame, server_frame};
use super::{Channels, Encoding, Tunnel};
use crate::fuzz::{FuzzOutcome, FuzzSession, run_for_fuzz_seconds};
use crate::spdy::SpdyConnection;
use crate::streams::{StreamCommand, StreamProtocol};

/// An action of the client or the server.
#[derive(Clone, Debug)]
enum Step {
    /// A fragmented message, with a ping after each fragment if the flag is set.
    Message(Vec<Vec<u8>>, bool),
    Control(u8, Vec<u8>),
    /// A frame with an arbitrary first byte.
    Frame(u8, Vec<u8>),
    Garbage(Vec<u8>),
    Send(u8, Vec<u8>),
    Read,
    Close,
}

fn step() -> impl Strategy<Value = Step> {
    let bytes = |most| prop::collection::vec(any::<u8>(), 0..most);
    let fragments = prop::collection::vec(bytes(200), 1..4);
    prop_oneof![
        12 => (fragments, any::<bool>()).prop_map(|(f, p)| Step::Message(f, p)),
        4 => (prop_oneof![Just(9_u8), Just(10)], bytes(125)).prop_map(|(o, p)| Step::Control(o, p)),
        1 => (any::<u8>(), bytes(140)).prop_map(|(f, p)| Step::Frame(f, p)),
        1 => bytes(60).prop_map(Step::Garbage),
        6 => (0..5_u8, bytes(200)).prop_map(|(c, b)| Step::Send(c, b)),
        3 => Just(Step::Read),
        1 => Just(Step::Close),
    ]
}

/// Encodes a message as a client does. With an encoding, it is a valid message of a channel.
fn message(fragments: &[Vec<u8>], pings: bool, encoding: Option<Encoding>) -> Vec<u8> {
    let mut fragments = fragments.to_vec();
    if let (Some(encoding), Some(first)) = (encoding, fragments.first_mut()) {
        let channel = first.first().map_or(0, |byte| byte % 5);
        match encoding {
            Encoding::Binary => first.insert(0, channel),
            Encoding::Base64 => {
                let text = STANDARD.encode(fragments.concat());
                let text = [&[b'0' + channel], text.as_bytes()].concat();
                fragments = text.chunks(7).map(<[u8]>::to_vec).collect();
            }
        }
    }
    let last = fragments.len() - 1;
    let mut sent = Vec::new();
    for (index, fragment) in fragments.iter().enumerate() {
        let opcode = if index == 0 { 2 } else { 0 };
        let fin = if index == last { 0x80 } else { 0 };
        sent.extend(client_frame(fin | opcode, fragment));
        if pings {
            sent.extend(client_frame(0x89, b"?"));
        }
    }
    sent
}

fn run_session(
    mut protocol: Box<dyn StreamProtocol>,
    encoding: Option<Encoding>,
    steps: &[Step],
    chunk_sizes: &[usize],
) -> FuzzOutcome {
    let mut session = FuzzSession::with_chunk_sizes(chunk_sizes);
    for step in steps {
        let sent = match step {
            Step::Message(fragments, pings) => message(fragments, *pings, encoding),
            Step::Control(opcode, payload) => client_frame(0x80 | opcode, payload),
            Step::Frame(first, payload) => client_frame(*first, payload),
            Step::Garbage(bytes) => bytes.clone(),
            Step::Send(channel, bytes) => {
                protocol.apply(StreamCommand::Data(
                    (*channel).into(),
                    Bytes::copy_from_slice(bytes),
                ));
                continue;
            }
            Step::Read => {
                session.read(&mut *protocol);
                continue;
            }
            Step::Close => {
                protocol.close();
                break;
            }
        };
        if !session.send(&mut *protocol, &sent) {
            break;
        }
    }
    session.end(&mut *protocol)
}

/// Creates a new protocol for each run.
type New = fn() -> Box<dyn StreamProtocol>;

#[test]
fn fuzz_websocket_sessions() {
    let sessions = (
        prop::collection::vec(step(), 0..25),
        prop::collection::vec(1..50_usize, 1..10),
    );
    run_for_fuzz_seconds(&sessions, |(steps, chunk_sizes)| {
        let channels: [(New, Encoding); 3] = [
            (
                || Box::new(Channels::new(Encoding::Binary)),
                Encoding::Binary,
            ),
            (
                || Box::new(Channels::new(Encoding::Binary).closable(5)),
                Encoding::Binary,
            ),
            (
                || Box::new(Channels::new(Encoding::Base64)),
                Encoding::Base64,
            ),
        ];
        for (new, encoding) in channels {
            let whole = run_session(new(), Some(encoding), &steps, &[usize::MAX]);
            check_frames(&whole.output)?;
            // Where invalid base64 is noticed depends on the chunks.
            let odd = |step: &Step| matches!(step, Step::Frame(..) | Step::Garbage(_));
            if encoding == Encoding::Binary || !steps.iter().any(odd) {
                prop_assert_eq!(
                    run_session(new(), Some(encoding), &steps, &chunk_sizes),
                    whole
                );
            }
        }
        let new = || Box::new(Tunnel::new(SpdyConnection::new()));
        let whole = run_session(new(), None, &steps, &[usize::MAX]);
        check_frames(&whole.output)?;
        let cut = run_session(new(), None, &steps, &chunk_sizes);
        // The output may differ: it is split into messages by how the input arrives.
        prop_assert_eq!((cut.events, cut.failed), (whole.events, whole.failed));
        Ok(())
    });
}

/// The output consists of complete frames, and nothing follows a close frame.
fn check_frames(mut output: &[u8]) -> proptest::test_runner::TestCaseResult {
    let mut closed = false;
    while !output.is_empty() {
        prop_assert!(!closed, "output after the close frame");
        let Some((first, payload)) = server_frame(output) else {
            return Err(TestCaseError::fail("incomplete frame"));
        };
        closed = first & 0x0f == 8;
        let header = match payload.len() {
            0..=125 => 2,
            126..=0xffff => 4,
            _ => 10,
        };
        output = &output[header + payload.len()..];
    }
    Ok(())
}
