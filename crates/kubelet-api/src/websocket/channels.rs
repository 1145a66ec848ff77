//! Channels: the first byte of each message says which stream the rest belongs to.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::{Bytes, BytesMut};

use super::WebSocketError;
use super::frame::{Framing, MessagePiece, MessageType};
use crate::streams::{ProtocolError, StreamCommand, StreamEvent, StreamId, StreamProtocol};

/// In version 5 a message of this channel names another one that its sender is done with.
const CLOSE_SIGNAL: u8 = 255;

/// How messages hold bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    /// As they are, after the channel's number.
    Binary,
    /// As text, after the channel's digit.
    Base64,
}

/// Channels in a WebSocket.
pub(crate) struct Channels {
    framing: Framing,
    encoding: Encoding,
    /// How many channels there are, if the client can close them one by one.
    closable: Option<u8>,
    message: Message,
}

/// The message that is being read.
enum Message {
    /// Its channel is not known yet.
    Begins,
    /// The rest is for a channel; in base64 up to three letters wait for their fourth.
    For { channel: StreamId, waiting: Vec<u8> },
    /// The rest is one byte, the number of a channel.
    Closes(Option<u8>),
    /// The rest makes no sense, as upstream would notice too, and go on.
    Ignored,
}

impl Channels {
    pub(crate) fn new(encoding: Encoding) -> Self {
        Self {
            framing: Framing::default(),
            encoding,
            closable: None,
            message: Message::Begins,
        }
    }

    /// Lets the client close each of its `count` channels, as version 5 does.
    pub(crate) fn closable(mut self, count: u8) -> Self {
        self.closable = Some(count);
        self
    }

    fn pieces(
        &mut self,
        input: &mut BytesMut,
        events: &mut Vec<StreamEvent>,
    ) -> Result<(), WebSocketError> {
        while let Some(piece) = self.framing.next(input)? {
            match piece {
                MessagePiece::Begin => self.message = Message::Begins,
                MessagePiece::Part(bytes) => self.part(bytes.freeze(), events)?,
                MessagePiece::End => self.end(events)?,
                MessagePiece::Close => events.push(StreamEvent::Closed),
            }
        }
        Ok(())
    }

    fn part(
        &mut self,
        mut bytes: Bytes,
        events: &mut Vec<StreamEvent>,
    ) -> Result<(), WebSocketError> {
        if let Message::Begins = self.message {
            let first = bytes.split_to(1);
            self.message = self.begin(first[0]);
        }
        if bytes.is_empty() {
            return Ok(());
        }
        match &mut self.message {
            Message::For { channel, waiting } => {
                let stream = *channel;
                let decoded = match self.encoding {
                    Encoding::Binary => Some(bytes),
                    Encoding::Base64 => decode(waiting, &bytes),
                };
                match decoded {
                    Some(bytes) if bytes.is_empty() => {}
                    Some(bytes) => events.push(StreamEvent::Data { stream, bytes }),
                    None => self.message = Message::Ignored,
                }
            }
            Message::Closes(channel @ None) if bytes.len() == 1 => *channel = Some(bytes[0]),
            Message::Closes(_) => return Err(WebSocketError::CloseSignal),
            Message::Begins | Message::Ignored => {}
        }
        Ok(())
    }

    fn begin(&self, first: u8) -> Message {
        let channel = match self.encoding {
            Encoding::Binary if self.closable.is_some() && first == CLOSE_SIGNAL => {
                return Message::Closes(None);
            }
            Encoding::Binary => first,
            Encoding::Base64 => first.wrapping_sub(b'0'),
        };
        Message::For {
            channel: channel.into(),
            waiting: Vec::new(),
        }
    }

    fn end(&mut self, events: &mut Vec<StreamEvent>) -> Result<(), WebSocketError> {
        if let Message::Closes(channel) = self.message {
            let closed = channel.filter(|channel| self.closable.is_some_and(|all| *channel < all));
            let channel = closed.ok_or(WebSocketError::CloseSignal)?;
            events.push(StreamEvent::Finished(channel.into()));
        }
        self.message = Message::Begins;
        Ok(())
    }

    fn send(&mut self, stream: StreamId, bytes: &[u8]) {
        // There are never more than a few channels.
        let channel = stream as u8;
        match self.encoding {
            Encoding::Binary => self
                .framing
                .message(MessageType::Binary, &[&[channel], bytes]),
            Encoding::Base64 => {
                let text = STANDARD.encode(bytes);
                let digit = channel.wrapping_add(b'0');
                self.framing
                    .message(MessageType::Text, &[&[digit], text.as_bytes()]);
            }
        }
    }
}

/// Decodes all whole groups of four letters; what is left waits for the next part.
fn decode(waiting: &mut Vec<u8>, bytes: &[u8]) -> Option<Bytes> {
    waiting.extend_from_slice(bytes);
    let rest = waiting.split_off(waiting.len() - waiting.len() % 4);
    let letters = std::mem::replace(waiting, rest);
    STANDARD.decode(letters).ok().map(Bytes::from)
}

impl StreamProtocol for Channels {
    fn receive(
        &mut self,
        input: &mut BytesMut,
        events: &mut Vec<StreamEvent>,
    ) -> Result<(), ProtocolError> {
        self.pieces(input, events).map_err(|error| {
            self.framing.output.clear();
            self.framing.fail();
            error.into()
        })
    }

    fn apply(&mut self, command: StreamCommand) {
        // Only clients can say that a channel is closed, and nobody can refuse one.
        if let StreamCommand::Data(stream, bytes) = command {
            self.send(stream, &bytes);
        }
    }

    fn keep_alive(&mut self) {
        self.framing.keep_alive();
    }

    fn close(&mut self) {
        self.framing.close();
    }

    fn output(&mut self) -> &mut BytesMut {
        &mut self.framing.output
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_frames;
    use super::*;

    fn received(channels: &mut Channels, bytes: &[u8]) -> Result<Vec<StreamEvent>, ProtocolError> {
        let (mut input, mut events) = (BytesMut::from(bytes), Vec::new());
        channels.receive(&mut input, &mut events)?;
        Ok(events)
    }

    fn data(stream: StreamId, bytes: &'static [u8]) -> StreamEvent {
        let bytes = Bytes::from_static(bytes);
        StreamEvent::Data { stream, bytes }
    }

    #[test]
    fn binary_channels_go_both_ways() {
        let mut channels = Channels::new(Encoding::Binary);
        let read = received(
            &mut channels,
            &test_frames::client_frame(0x82, b"\x00foo\n"),
        );
        assert_eq!(read, Ok(vec![data(0, b"foo\n")]));
        channels.apply(StreamCommand::Data(1, Bytes::from_static(b"\n")));
        channels.apply(StreamCommand::Data(1, Bytes::new()));
        assert_eq!(channels.output()[..], [0x82, 2, 1, 10, 0x82, 1, 1]);
    }

    #[test]
    fn base64_channels_go_both_ways() {
        let mut channels = Channels::new(Encoding::Base64);
        let read = received(
            &mut channels,
            &test_frames::client_frame(0x81, b"0Zm9vCg=="),
        );
        assert_eq!(read, Ok(vec![data(0, b"foo\n")]));
        channels.apply(StreamCommand::Data(1, Bytes::from_static(b"\n")));
        assert_eq!(channels.output()[..], *b"\x81\x051Cg==");
    }

    #[test]
    fn base64_in_parts_is_put_together() {
        let mut channels = Channels::new(Encoding::Base64);
        let (mut input, mut read) = (BytesMut::new(), Vec::new());
        for byte in test_frames::client_frame(0x81, b"0Zm9vCg==") {
            input.extend_from_slice(&[byte]);
            channels.receive(&mut input, &mut read).unwrap();
        }
        assert_eq!(read, [data(0, b"foo"), data(0, b"\n")]);
    }

    #[test]
    fn what_is_no_base64_is_ignored() {
        let mut channels = Channels::new(Encoding::Base64);
        let bytes = [
            test_frames::client_frame(0x81, b"0%%%%"),
            test_frames::client_frame(0x81, b"0Zm9v"),
        ];
        let read = received(&mut channels, &bytes.concat());
        assert_eq!(read, Ok(vec![data(0, b"foo")]));
    }

    #[test]
    fn an_empty_message_means_nothing() {
        let mut channels = Channels::new(Encoding::Binary);
        let bytes = [
            test_frames::client_frame(0x82, b""),
            test_frames::client_frame(0x82, b"\x00"),
        ];
        assert_eq!(received(&mut channels, &bytes.concat()), Ok(vec![]));
    }

    #[test]
    fn version_5_closes_single_channels() {
        let close = test_frames::client_frame(0x82, &[255, 0]);
        let mut v5 = Channels::new(Encoding::Binary).closable(5);
        assert_eq!(
            received(&mut v5, &close),
            Ok(vec![StreamEvent::Finished(0)])
        );
        let mut v4 = Channels::new(Encoding::Binary);
        assert_eq!(received(&mut v4, &close), Ok(vec![data(255, b"\0")]));
        for wrong in [&[255][..], &[255, 5], &[255, 0, 0]] {
            let mut v5 = Channels::new(Encoding::Binary).closable(5);
            let error = received(&mut v5, &test_frames::client_frame(0x82, wrong)).unwrap_err();
            assert_eq!(error, WebSocketError::CloseSignal.into());
            assert_eq!(v5.output()[..], [0x88, 2, 3, 0xea]);
        }
    }
}
