//! Channels: the first byte of each message is the number of its stream.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::{Bytes, BytesMut};

use super::WebSocketError;
use super::frame::{Framing, MessagePiece, MessageType};
use crate::streams::{ProtocolError, StreamCommand, StreamEvent, StreamId, StreamProtocol};

/// In version 5 a message on this channel closes the channel whose number it contains.
const CLOSE_SIGNAL: u8 = 255;

/// The encoding of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    /// The channel's number, then the raw bytes.
    Binary,
    /// The channel's number as a digit, then base64.
    Base64,
}

/// The channel protocol in a WebSocket.
pub(crate) struct Channels {
    framing: Framing,
    encoding: Encoding,
    /// The number of channels, if the client can close single ones.
    closable: Option<u8>,
    message: Message,
}

/// State of the message that is being read.
enum Message {
    /// The channel is not known yet.
    Start,
    /// The rest is data of a channel. `waiting` holds up to three characters of an incomplete base64 group.
    Data { channel: StreamId, waiting: Vec<u8> },
    /// The rest is one byte: the channel to close.
    CloseChannel(Option<u8>),
    /// The rest is invalid base64 and ignored, as upstream does.
    Ignored,
}

impl Channels {
    pub(crate) fn new(encoding: Encoding) -> Self {
        Self {
            framing: Framing::default(),
            encoding,
            closable: None,
            message: Message::Start,
        }
    }

    /// Lets the client close single channels below `count`, as in version 5.
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
                MessagePiece::Begin => self.message = Message::Start,
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
        if let Message::Start = self.message {
            let first = bytes.split_to(1);
            self.message = self.begin(first[0]);
        }
        if bytes.is_empty() {
            return Ok(());
        }
        match &mut self.message {
            Message::Data { channel, waiting } => {
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
            Message::CloseChannel(channel @ None) if bytes.len() == 1 => *channel = Some(bytes[0]),
            Message::CloseChannel(_) => return Err(WebSocketError::CloseSignal),
            Message::Start | Message::Ignored => {}
        }
        Ok(())
    }

    fn begin(&self, first: u8) -> Message {
        let channel = match self.encoding {
            Encoding::Binary if self.closable.is_some() && first == CLOSE_SIGNAL => {
                return Message::CloseChannel(None);
            }
            Encoding::Binary => first,
            Encoding::Base64 => first.wrapping_sub(b'0'),
        };
        Message::Data {
            channel: channel.into(),
            waiting: Vec::new(),
        }
    }

    fn end(&mut self, events: &mut Vec<StreamEvent>) -> Result<(), WebSocketError> {
        if let Message::CloseChannel(channel) = self.message {
            let closed = channel.filter(|channel| self.closable.is_some_and(|all| *channel < all));
            let channel = closed.ok_or(WebSocketError::CloseSignal)?;
            events.push(StreamEvent::Finished(channel.into()));
        }
        self.message = Message::Start;
        Ok(())
    }

    fn send(&mut self, stream: StreamId, bytes: &[u8]) {
        // Channel numbers fit into one byte.
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

/// Decodes all complete base64 groups. The rest stays in `waiting`.
fn decode(waiting: &mut Vec<u8>, bytes: &[u8]) -> Option<Bytes> {
    waiting.extend_from_slice(bytes);
    let rest = waiting.split_off(waiting.len() - waiting.len() % 4);
    let groups = std::mem::replace(waiting, rest);
    STANDARD.decode(groups).ok().map(Bytes::from)
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
        // The server cannot accept, close or reset channels, only send data.
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
    fn binary_channels_work_both_ways() {
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
    fn base64_channels_work_both_ways() {
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
    fn base64_is_decoded_across_chunks() {
        let mut channels = Channels::new(Encoding::Base64);
        let (mut input, mut read) = (BytesMut::new(), Vec::new());
        for byte in test_frames::client_frame(0x81, b"0Zm9vCg==") {
            input.extend_from_slice(&[byte]);
            channels.receive(&mut input, &mut read).unwrap();
        }
        assert_eq!(read, [data(0, b"foo"), data(0, b"\n")]);
    }

    #[test]
    fn invalid_base64_is_ignored() {
        let mut channels = Channels::new(Encoding::Base64);
        let bytes = [
            test_frames::client_frame(0x81, b"0%%%%"),
            test_frames::client_frame(0x81, b"0Zm9v"),
        ];
        let read = received(&mut channels, &bytes.concat());
        assert_eq!(read, Ok(vec![data(0, b"foo")]));
    }

    #[test]
    fn empty_messages_are_ignored() {
        let mut channels = Channels::new(Encoding::Binary);
        let bytes = [
            test_frames::client_frame(0x82, b""),
            test_frames::client_frame(0x82, b"\x00"),
        ];
        assert_eq!(received(&mut channels, &bytes.concat()), Ok(vec![]));
    }

    #[test]
    fn v5_closes_single_channels() {
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
