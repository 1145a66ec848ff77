//! Frames: parses bytes into parts of messages, and writes messages.

use bytes::{Buf, BufMut, BytesMut};

use super::WebSocketError;

const FIN: u8 = 0x80;
const RESERVED: u8 = 0x70;
const OPCODE: u8 = 0x0f;
const OPCODE_CONTINUATION: u8 = 0;
const OPCODE_CONTROL_BIT: u8 = 8;
const OPCODE_CLOSE: u8 = 8;
const OPCODE_PING: u8 = 9;
const OPCODE_PONG: u8 = 10;
const MASKED: u8 = 0x80;
const LENGTH: u8 = 0x7f;
/// Maximum payload of a control frame.
const MAX_CONTROL: usize = 125;
/// The longest header: two bytes, eight of length, four of mask.
const MAX_HEADER: usize = 14;
/// Limit for unsent output while a client sends frames that need replies and does not read them.
pub(super) const MAX_PENDING_REPLIES: usize = 1 << 20;
/// Close codes.
const CLOSE_NORMAL: u16 = 1000;
const CLOSE_PROTOCOL_ERROR: u16 = 1002;

/// The type of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum MessageType {
    Text = 1,
    Binary = 2,
}

/// Parsed input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum MessagePiece {
    /// A message begins.
    Begin,
    /// A part of the payload, never empty.
    Part(BytesMut),
    /// The message ends.
    End,
    /// The client closed the connection. Nothing follows.
    Close,
}

/// Framing state of one connection.
#[derive(Debug, Default)]
pub(super) struct Framing {
    /// The current data frame, if its payload is incomplete.
    payload: Option<Payload>,
    in_message: bool,
    closed: bool,
    pub(super) output: BytesMut,
}

#[derive(Debug)]
struct Payload {
    left: u64,
    mask: [u8; 4],
    /// The frame is the last of its message.
    fin: bool,
}

/// The result of a control frame.
enum Control {
    Handled,
    Close,
}

struct Header {
    fin: bool,
    opcode: u8,
    length: u64,
    mask: [u8; 4],
    /// Size of the header, in bytes.
    size: usize,
}

impl Framing {
    /// Removes the next piece from `input`. Answers pings.
    pub(super) fn next(
        &mut self,
        input: &mut BytesMut,
    ) -> Result<Option<MessagePiece>, WebSocketError> {
        loop {
            if self.closed {
                input.clear();
                return Ok(None);
            }
            if let Some(payload) = &mut self.payload {
                if payload.left > 0 {
                    return Ok(payload.part(input).map(MessagePiece::Part));
                }
                let fin = payload.fin;
                self.payload = None;
                if fin {
                    self.in_message = false;
                    return Ok(Some(MessagePiece::End));
                }
            }
            let Some(header) = Header::parse(input)? else {
                return Ok(None);
            };
            if header.opcode & OPCODE_CONTROL_BIT != 0 {
                match self.control(&header, input)? {
                    None => return Ok(None),
                    Some(Control::Handled) => continue,
                    Some(Control::Close) => return Ok(Some(MessagePiece::Close)),
                }
            }
            input.advance(header.size);
            let begins = header.opcode != OPCODE_CONTINUATION;
            if begins == self.in_message {
                return Err(WebSocketError::Continuation);
            }
            self.in_message = true;
            self.payload = Some(Payload {
                left: header.length,
                mask: header.mask,
                fin: header.fin,
            });
            if begins {
                return Ok(Some(MessagePiece::Begin));
            }
        }
    }

    /// Handles a control frame and removes it from `input`. `None` if it is incomplete.
    fn control(
        &mut self,
        header: &Header,
        input: &mut BytesMut,
    ) -> Result<Option<Control>, WebSocketError> {
        let length = usize::try_from(header.length).unwrap_or(usize::MAX);
        if !header.fin || length > MAX_CONTROL {
            return Err(WebSocketError::Control);
        }
        if input.len() < header.size + length {
            return Ok(None);
        }
        input.advance(header.size);
        let mut payload = input.split_to(length);
        unmask(&mut payload, header.mask);
        match header.opcode {
            OPCODE_CLOSE => {
                self.close_with(CLOSE_NORMAL);
                return Ok(Some(Control::Close));
            }
            OPCODE_PING => self.write(OPCODE_PONG, &[&payload]),
            _ => {}
        }
        if self.output.len() > MAX_PENDING_REPLIES {
            return Err(WebSocketError::Flood);
        }
        Ok(Some(Control::Handled))
    }

    /// Writes a message of one frame.
    pub(super) fn message(&mut self, kind: MessageType, parts: &[&[u8]]) {
        if !self.closed {
            self.write(kind as u8, parts);
        }
    }

    /// Writes an unsolicited pong, which shows the client that the server is alive.
    pub(super) fn keep_alive(&mut self) {
        if !self.closed {
            self.write(OPCODE_PONG, &[]);
        }
    }

    /// Writes a close frame for a normal closure.
    pub(super) fn close(&mut self) {
        self.close_with(CLOSE_NORMAL);
    }

    /// Writes a close frame for a protocol error.
    pub(super) fn fail(&mut self) {
        self.close_with(CLOSE_PROTOCOL_ERROR);
    }

    fn close_with(&mut self, code: u16) {
        if !self.closed {
            self.write(OPCODE_CLOSE, &[&code.to_be_bytes()]);
            self.closed = true;
        }
    }

    fn write(&mut self, opcode: u8, parts: &[&[u8]]) {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        self.output.reserve(MAX_HEADER + length);
        self.output.put_u8(FIN | opcode);
        match length {
            0..=125 => self.output.put_u8(length as u8),
            126..=0xffff => {
                self.output.put_u8(126);
                self.output.put_u16(length as u16);
            }
            _ => {
                self.output.put_u8(127);
                self.output.put_u64(length as u64);
            }
        }
        for part in parts {
            self.output.put_slice(part);
        }
    }
}

impl Payload {
    /// Removes the available part of the payload from `input`.
    fn part(&mut self, input: &mut BytesMut) -> Option<BytesMut> {
        if input.is_empty() {
            return None;
        }
        let left = usize::try_from(self.left).unwrap_or(usize::MAX);
        let mut bytes = input.split_to(left.min(input.len()));
        unmask(&mut bytes, self.mask);
        self.mask.rotate_left(bytes.len() % 4);
        self.left -= bytes.len() as u64;
        Some(bytes)
    }
}

impl Header {
    fn parse(input: &[u8]) -> Result<Option<Self>, WebSocketError> {
        let &[first, second, ref rest @ ..] = input else {
            return Ok(None);
        };
        let opcode = first & OPCODE;
        if first & RESERVED != 0 {
            return Err(WebSocketError::Reserved);
        }
        if !matches!(opcode, 0..=2 | 8..=10) {
            return Err(WebSocketError::Opcode(opcode));
        }
        if second & MASKED == 0 {
            return Err(WebSocketError::NotMasked);
        }
        let (length, rest) = match second & LENGTH {
            126 => match rest.split_first_chunk() {
                Some((length, rest)) => (u64::from(u16::from_be_bytes(*length)), rest),
                None => return Ok(None),
            },
            127 => match rest.split_first_chunk() {
                Some((length, rest)) => (u64::from_be_bytes(*length), rest),
                None => return Ok(None),
            },
            length => (u64::from(length), rest),
        };
        if length > u64::MAX >> 1 {
            return Err(WebSocketError::Length);
        }
        let Some((&mask, rest)) = rest.split_first_chunk() else {
            return Ok(None);
        };
        Ok(Some(Self {
            fin: first & FIN != 0,
            opcode,
            length,
            mask,
            size: input.len() - rest.len(),
        }))
    }
}

/// Removes the mask that clients must apply to payloads.
pub(super) fn unmask(bytes: &mut [u8], mask: [u8; 4]) {
    let mask_word = u64::from_ne_bytes([
        mask[0], mask[1], mask[2], mask[3], mask[0], mask[1], mask[2], mask[3],
    ]);
    let (chunks, rest) = bytes.as_chunks_mut::<8>();
    for bytes in chunks {
        *bytes = (u64::from_ne_bytes(*bytes) ^ mask_word).to_ne_bytes();
    }
    for (byte, mask) in rest.iter_mut().zip(mask.into_iter().cycle()) {
        *byte ^= mask;
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_frames;
    use super::*;

    fn pieces(framing: &mut Framing, bytes: &[u8]) -> Result<Vec<MessagePiece>, WebSocketError> {
        let (mut input, mut pieces) = (BytesMut::from(bytes), Vec::new());
        while let Some(piece) = framing.next(&mut input)? {
            pieces.push(piece);
        }
        Ok(pieces)
    }

    fn part(bytes: &'static [u8]) -> MessagePiece {
        MessagePiece::Part(BytesMut::from(bytes))
    }

    #[test]
    fn parses_the_example_of_the_rfc() {
        let hello = [
            0x81, 0x85, 0x37, 0xfa, 0x21, 0x3d, 0x7f, 0x9f, 0x4d, 0x51, 0x58,
        ];
        let read = pieces(&mut Framing::default(), &hello);
        assert_eq!(
            read,
            Ok(vec![MessagePiece::Begin, part(b"Hello"), MessagePiece::End])
        );
    }

    #[test]
    fn all_length_encodings_round_trip() {
        for length in [0, 1, 125, 126, 127, 65535, 65536, 70000] {
            let bytes = vec![7; length];
            let mut framing = Framing::default();
            framing.message(
                MessageType::Binary,
                &[&bytes[..length / 2], &bytes[length / 2..]],
            );
            let (header, written) = test_frames::server_frame(&framing.output).unwrap();
            assert_eq!(header, 0x82);
            assert_eq!(written, bytes);

            let read = pieces(&mut framing, &test_frames::client_frame(0x82, &bytes)).unwrap();
            let expected = if length == 0 {
                vec![MessagePiece::Begin, MessagePiece::End]
            } else {
                vec![
                    MessagePiece::Begin,
                    MessagePiece::Part(BytesMut::from(&bytes[..])),
                    MessagePiece::End,
                ]
            };
            assert_eq!(read, expected);
        }
    }

    #[test]
    fn pings_within_a_fragmented_message_are_answered() {
        let bytes = [
            test_frames::client_frame(0x02, b"one"),
            test_frames::client_frame(0x89, b"alive?"),
            test_frames::client_frame(0x80, b"two"),
        ];
        let mut framing = Framing::default();
        let read = pieces(&mut framing, &bytes.concat());
        assert_eq!(
            read,
            Ok(vec![
                MessagePiece::Begin,
                part(b"one"),
                part(b"two"),
                MessagePiece::End
            ])
        );
        assert_eq!(framing.output[..], *b"\x8a\x06alive?");
    }

    #[test]
    fn close_is_answered_and_ends_the_connection() {
        let bytes = [
            test_frames::client_frame(0x88, &[3, 0xe8]),
            test_frames::client_frame(0x82, b"late"),
        ];
        let mut framing = Framing::default();
        assert_eq!(
            pieces(&mut framing, &bytes.concat()),
            Ok(vec![MessagePiece::Close])
        );
        assert_eq!(framing.output[..], [0x88, 2, 3, 0xe8]);
        framing.close();
        framing.message(MessageType::Binary, &[b"late"]);
        assert_eq!(framing.output.len(), 4);
    }

    #[test]
    fn invalid_frames_are_rejected() {
        let error_of = |bytes: &[u8]| pieces(&mut Framing::default(), bytes).unwrap_err();
        assert_eq!(error_of(&[0xc2, 0x80]), WebSocketError::Reserved);
        assert_eq!(error_of(&[0x83, 0x80]), WebSocketError::Opcode(3));
        assert_eq!(error_of(&[0x82, 0x00]), WebSocketError::NotMasked);
        assert_eq!(
            error_of(&test_frames::client_frame(0x09, b"")),
            WebSocketError::Control
        );
        assert_eq!(
            error_of(&test_frames::client_frame(0x89, &[0; 126])),
            WebSocketError::Control
        );
        assert_eq!(
            error_of(&test_frames::client_frame(0x80, b"")),
            WebSocketError::Continuation
        );
        let twice = [
            test_frames::client_frame(0x02, b""),
            test_frames::client_frame(0x82, b""),
        ]
        .concat();
        assert_eq!(error_of(&twice), WebSocketError::Continuation);
        let long = [0x82, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(error_of(&long), WebSocketError::Length);
        let pings = test_frames::client_frame(0x89, &[0; 125]).repeat(10_000);
        assert_eq!(error_of(&pings), WebSocketError::Flood);
    }
}
