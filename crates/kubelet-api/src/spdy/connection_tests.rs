//! Whole connections, with valid clients and with garbage.

use bytes::{Bytes, BytesMut};
use proptest::prelude::*;

use super::test_client::{Received, SpdyTestClient};
use super::{SpdyConnection, SpdyError};
use crate::streams::{ProtocolError, StreamCommand, StreamEvent, StreamProtocol};

fn receive(
    connection: &mut SpdyConnection,
    bytes: &[u8],
) -> Result<Vec<StreamEvent>, ProtocolError> {
    let (mut input, mut events) = (BytesMut::from(bytes), Vec::new());
    connection.receive(&mut input, &mut events)?;
    assert!(input.is_empty(), "complete frames are consumed");
    Ok(events)
}

fn replies(connection: &mut SpdyConnection, client: &mut SpdyTestClient) -> Vec<Received> {
    client.receive(&connection.output().split())
}

fn data(stream: u32, bytes: &'static [u8]) -> StreamEvent {
    let bytes = Bytes::from_static(bytes);
    StreamEvent::Data { stream, bytes }
}

/// Recorded output of spdystream 0.5.1: three streams of an exec, one of a port-forward, data with FIN, a reset, a ping
/// and a GOAWAY.
const RECORDED: &[&str] = &[
    "80030001000000290000000100000000000078f9e3c6a7c26260606004a7b392a2d4c45c6851c29a0a0a6800000000ffff",
    "800300010000001700000003000000000000c22e555c92929907000000ffff",
    "800300010000001900000005000000000000c22ac5565c92925f5a02000000ffff",
    "800300010000002f000000070000000000000225630c3950e1940829e78bc059cac2c0c280818181b308922e3241f985d11c000000ffff",
    "000000030000000568656c6c6f",
    "0000000301000000",
    "80030003000000080000000700000005",
    "800300060000000400000001",
    "80030007000000080000000000000000",
];

#[test]
fn parses_recorded_spdystream_output() {
    let hex = RECORDED.concat();
    let digits = (0..hex.len()).step_by(2);
    let bytes: Vec<_> = digits
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
        .collect();
    let (mut connection, mut client) = (SpdyConnection::new(), SpdyTestClient::new());
    let events = receive(&mut connection, &bytes).unwrap();
    let opened: Vec<_> = events
        .iter()
        .filter_map(|event| match event {
            StreamEvent::Opened { stream, headers } => Some((*stream, headers.get("streamType")?)),
            _ => None,
        })
        .collect();
    let expected = [(1, "error"), (3, "stdin"), (5, "stdout"), (7, "data")];
    assert_eq!(opened, expected);
    let StreamEvent::Opened { headers, .. } = &events[3] else {
        panic!("{events:?}");
    };
    assert_eq!(headers.get("port"), Some("8080"));
    assert_eq!(headers.get("requestID"), Some("7"));
    let rest = [
        data(3, b"hello"),
        StreamEvent::Finished(3),
        StreamEvent::Reset(7),
        StreamEvent::Closed,
    ];
    assert_eq!(events[4..], rest);
    assert_eq!(replies(&mut connection, &mut client), [Received::Ping(1)]);
}

#[test]
fn stream_carries_data_and_closes() {
    let (mut client, mut connection) = (SpdyTestClient::new(), SpdyConnection::new());
    let (stream, bytes) = client.open(&[("streamtype", "stdin")]);
    let events = receive(&mut connection, &bytes).unwrap();
    assert!(
        matches!(&events[..], [StreamEvent::Opened { stream: 1, headers }]
        if headers.get("streamType") == Some("stdin"))
    );
    connection.apply(StreamCommand::Accept(stream));
    assert_eq!(replies(&mut connection, &mut client), [Received::Reply(1)]);

    let bytes = [client.data(1, b"hello", false), client.data(1, b"", true)].concat();
    let events = receive(&mut connection, &bytes).unwrap();
    assert_eq!(events, [data(1, b"hello"), StreamEvent::Finished(1)]);
    let late = receive(&mut connection, &client.data(1, b"late", false)).unwrap();
    assert_eq!(late, []);

    connection.apply(StreamCommand::Data(1, Bytes::from_static(b"bye")));
    connection.apply(StreamCommand::Finish(1));
    connection.apply(StreamCommand::Data(1, Bytes::from_static(b"late")));
    let bytes = b"bye".to_vec();
    let expected = [Received::Data { stream: 1, bytes }, Received::Finished(1)];
    assert_eq!(replies(&mut connection, &mut client), expected);
}

#[test]
fn client_can_reset_a_stream() {
    let (mut client, mut connection) = (SpdyTestClient::new(), SpdyConnection::new());
    let (stream, bytes) = client.open(&[]);
    receive(&mut connection, &bytes).unwrap();
    let events = receive(&mut connection, &client.reset(stream)).unwrap();
    assert_eq!(events, [StreamEvent::Reset(1)]);
    connection.apply(StreamCommand::Data(1, Bytes::from_static(b"late")));
    connection.apply(StreamCommand::Accept(1));
    assert_eq!(replies(&mut connection, &mut client), []);
}

#[test]
fn close_resets_open_streams() {
    let (mut client, mut connection) = (SpdyTestClient::new(), SpdyConnection::new());
    for _ in 0..2 {
        let (_, bytes) = client.open(&[]);
        receive(&mut connection, &bytes).unwrap();
    }
    connection.apply(StreamCommand::Finish(1));
    connection.close();
    let expected = [Received::Finished(1), Received::Reset(3), Received::GoAway];
    assert_eq!(replies(&mut connection, &mut client), expected);
}

#[test]
fn streams_over_the_limit_are_refused() {
    let (mut client, mut connection) = (SpdyTestClient::new(), SpdyConnection::new());
    for number in 0..1025 {
        let (_, bytes) = client.open(&[("port", "80")]);
        let opened = receive(&mut connection, &bytes).unwrap().len();
        assert_eq!(opened, usize::from(number < 1024));
    }
    assert_eq!(
        replies(&mut connection, &mut client),
        [Received::Reset(2049)]
    );
}

#[test]
fn reused_stream_id_is_reset() {
    let (mut client, mut connection) = (SpdyTestClient::new(), SpdyConnection::new());
    let (_, first) = client.open(&[]);
    receive(&mut connection, &first).unwrap();
    let (_, mut second) = client.open(&[]);
    // Byte 11 is the last byte of the stream id.
    second[11] = 1;
    assert_eq!(receive(&mut connection, &second).unwrap(), []);
    assert_eq!(replies(&mut connection, &mut client), [Received::Reset(1)]);
}

#[test]
fn pings_are_answered_up_to_a_limit() {
    let (mut client, mut connection) = (SpdyTestClient::new(), SpdyConnection::new());
    let ping = [0x80, 3, 0, 6, 0, 0, 0, 4, 0, 0, 0, 1];
    receive(&mut connection, &ping).unwrap();
    assert_eq!(replies(&mut connection, &mut client), [Received::Ping(1)]);
    let mut input = BytesMut::from(&ping.repeat(100_000)[..]);
    let flood = connection.receive(&mut input, &mut Vec::new());
    assert_eq!(flood, Err(SpdyError::Flood.into()));
    assert_eq!(replies(&mut connection, &mut client), [Received::GoAway]);
}

#[test]
fn flow_control_of_the_client_is_respected() {
    let (mut client, mut connection) = (SpdyTestClient::new(), SpdyConnection::new());
    let (stream, bytes) = client.open(&[]);
    receive(&mut connection, &bytes).unwrap();
    receive(&mut connection, &client.window_update(stream, 1)).unwrap();
    connection.apply(StreamCommand::Data(1, Bytes::from(vec![7; 100_000])));
    connection.apply(StreamCommand::Finish(1));
    assert!(!connection.is_ready());
    let sent = |received: &[Received]| -> usize {
        let lengths = received.iter().map(|received| match received {
            Received::Data { bytes, .. } => bytes.len(),
            _ => 0,
        });
        lengths.sum()
    };
    assert_eq!(sent(&replies(&mut connection, &mut client)), 64 * 1024);
    receive(&mut connection, &client.window_update(0, 100_000)).unwrap();
    receive(&mut connection, &client.window_update(1, 100_000)).unwrap();
    assert!(connection.is_ready());
    let rest = replies(&mut connection, &mut client);
    assert_eq!(sent(&rest), 100_000 - 64 * 1024);
    assert_eq!(rest.last(), Some(&Received::Finished(1)));

    StreamProtocol::consumed(&mut connection, 1, 40_000);
    let update = |stream| Received::WindowUpdate {
        stream,
        delta: 40_000,
    };
    let updates = [update(0), update(1)];
    assert_eq!(replies(&mut connection, &mut client), updates);
}

proptest! {
    #[test]
    fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        let mut connection = SpdyConnection::new();
        let _ = connection.receive(&mut BytesMut::from(&bytes[..]), &mut Vec::new());
    }

    #[test]
    fn garbage_in_frames_never_panics(
        frames in prop::collection::vec((0_u16..12, any::<u8>(), prop::collection::vec(any::<u8>(), 0..64)), 0..20)
    ) {
        let mut bytes = BytesMut::new();
        for (kind, flags, payload) in &frames {
            bytes.extend_from_slice(&[0x80, 3, 0, *kind as u8, *flags, 0, 0, payload.len() as u8]);
            bytes.extend_from_slice(payload);
        }
        let mut connection = SpdyConnection::new();
        let _ = connection.receive(&mut bytes, &mut Vec::new());
    }

    #[test]
    fn corrupted_byte_never_panics(
        at in any::<prop::sample::Index>(), wrong in any::<u8>()
    ) {
        let (mut client, mut connection) = (SpdyTestClient::new(), SpdyConnection::new());
        let (_, mut bytes) = client.open(&[("streamtype", "error"), ("port", "80")]);
        bytes.extend(client.data(1, b"hello", true));
        let (_, second) = client.open(&[("streamtype", "data"), ("port", "80")]);
        bytes.extend(second);
        let at = at.index(bytes.len());
        bytes[at] = wrong;
        let mut input = BytesMut::from(&bytes[..]);
        let _ = connection.receive(&mut input, &mut Vec::new());
        connection.apply(StreamCommand::Accept(1));
        connection.close();
    }

    #[test]
    fn chunk_boundaries_do_not_matter(
        messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 1..10),
        cuts in prop::collection::vec(1_usize..50, 1..20),
    ) {
        let mut client = SpdyTestClient::new();
        let (_, mut bytes) = client.open(&[("streamtype", "stdin")]);
        for message in &messages {
            bytes.extend(client.data(1, message, false));
        }
        bytes.extend(client.data(1, b"", true));

        let (mut connection, mut events) = (SpdyConnection::new(), Vec::new());
        let (mut input, mut rest) = (BytesMut::new(), &bytes[..]);
        for cut in cuts.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (now, later) = rest.split_at((*cut).min(rest.len()));
            input.extend_from_slice(now);
            rest = later;
            connection.receive(&mut input, &mut events).unwrap();
        }
        let mut received = Vec::new();
        for event in &events {
            if let StreamEvent::Data { bytes, .. } = event {
                received.extend_from_slice(bytes);
            }
        }
        prop_assert_eq!(received, messages.concat());
        prop_assert_eq!(events.last(), Some(&StreamEvent::Finished(1)));
    }
}
