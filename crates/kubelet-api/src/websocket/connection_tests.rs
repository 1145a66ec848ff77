//! Whole connections, with valid clients and with garbage.

use bytes::{Bytes, BytesMut};
use proptest::prelude::*;

use super::test_frames::{client_frame, server_frame};
use super::{Channels, Encoding, Tunnel};
use crate::spdy::SpdyConnection;
use crate::spdy::test_client::{Received, SpdyTestClient};
use crate::streams::{StreamCommand, StreamEvent, StreamProtocol};

#[test]
fn spdy_is_tunnelled_across_message_boundaries() {
    let (mut client, mut tunnel) = (SpdyTestClient::new(), Tunnel::new(SpdyConnection::new()));
    let (stream, mut bytes) = client.open(&[("streamtype", "data"), ("port", "80")]);
    bytes.extend(client.data(stream, b"hello", true));
    let messages: Vec<_> = bytes
        .chunks(3)
        .map(|part| client_frame(0x82, part))
        .collect();
    let (mut input, mut events) = (BytesMut::from(&messages.concat()[..]), Vec::new());
    tunnel.receive(&mut input, &mut events).unwrap();
    let received = events.iter().filter_map(|event| match event {
        StreamEvent::Data { bytes, .. } => Some(&bytes[..]),
        _ => None,
    });
    let received: Vec<_> = received.collect();
    assert_eq!(received.concat(), b"hello");
    assert_eq!(events.last(), Some(&StreamEvent::Finished(1)));

    tunnel.apply(StreamCommand::Accept(1));
    tunnel.close();
    let output = tunnel.output().split();
    let (first, reply) = server_frame(&output).unwrap();
    assert_eq!(first, 0x82);
    assert_eq!(client.receive(&reply), [Received::Reply(1)]);
    assert!(output.ends_with(&[0x88, 2, 3, 0xe8]), "a normal closure");
}

fn protocols() -> [Box<dyn StreamProtocol>; 4] {
    [
        Box::new(Channels::new(Encoding::Binary)),
        Box::new(Channels::new(Encoding::Binary).closable(5)),
        Box::new(Channels::new(Encoding::Base64)),
        Box::new(Tunnel::new(SpdyConnection::new())),
    ]
}

proptest! {
    #[test]
    fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        for mut protocol in protocols() {
            let _ = protocol.receive(&mut BytesMut::from(&bytes[..]), &mut Vec::new());
        }
    }

    #[test]
    fn garbage_in_frames_never_panics(
        frames in prop::collection::vec((any::<u8>(), prop::collection::vec(any::<u8>(), 0..200)), 0..20)
    ) {
        let bytes: Vec<_> = frames.iter().flat_map(|(first, payload)| client_frame(*first & 0x8f, payload)).collect();
        for mut protocol in protocols() {
            let _ = protocol.receive(&mut BytesMut::from(&bytes[..]), &mut Vec::new());
            protocol.keep_alive();
            protocol.close();
        }
    }

    #[test]
    fn chunk_boundaries_do_not_matter(
        messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 1..10),
        cuts in prop::collection::vec(1_usize..50, 1..20),
        base64 in any::<bool>(),
    ) {
        let encoding = if base64 { Encoding::Base64 } else { Encoding::Binary };
        // Turn the server's messages into a client's by masking them.
        let mut writer = Channels::new(encoding);
        let mut bytes = Vec::new();
        for message in &messages {
            writer.apply(StreamCommand::Data(0, Bytes::copy_from_slice(message)));
            let (first, payload) = server_frame(&writer.output().split()).unwrap();
            bytes.extend(client_frame(first, &payload));
        }
        let (mut reader, mut events) = (Channels::new(encoding), Vec::new());
        let (mut input, mut rest) = (BytesMut::new(), &bytes[..]);
        for cut in cuts.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (now, later) = rest.split_at((*cut).min(rest.len()));
            input.extend_from_slice(now);
            rest = later;
            reader.receive(&mut input, &mut events).unwrap();
        }
        let mut received = Vec::new();
        for event in &events {
            if let StreamEvent::Data { stream: 0, bytes } = event {
                received.extend_from_slice(bytes);
            }
        }
        prop_assert_eq!(received, messages.concat());
    }
}
