//! Parses and writes frames.
//!
//! Data frames are passed on in parts, as they arrive, so that a frame of 16 MiB needs no buffer.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::SpdyError;

/// Limit for control frames. Clients send a few hundred bytes at most.
pub(super) const MAX_CONTROL_FRAME: usize = 64 * 1024;
/// The length field has 24 bits.
const MAX_FRAME_LENGTH: usize = 0x00ff_ffff;
const HEADER: usize = 8;
const CONTROL: u32 = 0x8000_0000;
const STREAM: u32 = 0x7fff_ffff;
const SPDY_VERSION: u16 = 3;
const FIN: u8 = 1;
const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const RST_STREAM: u16 = 3;
const SETTINGS: u16 = 4;
const PING: u16 = 6;
const GOAWAY: u16 = 7;
const HEADERS: u16 = 8;
const WINDOW_UPDATE: u16 = 9;
const INITIAL_WINDOW_SIZE: u32 = 7;

/// Why a stream is reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum ResetStatus {
    ProtocolError = 1,
    RefusedStream = 3,
    Cancel = 5,
}

/// Why a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum GoAwayStatus {
    Ok = 0,
    ProtocolError = 1,
}

/// A parsed frame. Header blocks are still compressed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    SynStream {
        stream: u32,
        fin: bool,
        block: Bytes,
    },
    SynReply {
        stream: u32,
        fin: bool,
        block: Bytes,
    },
    Reset {
        stream: u32,
    },
    Settings {
        initial_window: Option<u32>,
    },
    Ping(u32),
    GoAway,
    Headers {
        stream: u32,
        fin: bool,
        block: Bytes,
    },
    WindowUpdate {
        stream: u32,
        delta: u32,
    },
    /// A part of a data frame; only its last part can have `fin`.
    Data {
        stream: u32,
        fin: bool,
        bytes: Bytes,
    },
    /// A control frame of an unknown type, to be ignored.
    Unknown,
}

/// Parses a stream of bytes into frames.
#[derive(Debug, Default)]
pub(super) struct Parser {
    data: Option<OpenData>,
}

/// A data frame whose payload is incomplete.
#[derive(Debug)]
struct OpenData {
    stream: u32,
    fin: bool,
    left: usize,
}

impl Parser {
    /// Removes the next frame, or the next part of a data frame, from `input`. `None` if it is incomplete.
    pub(super) fn next(&mut self, input: &mut BytesMut) -> Result<Option<Frame>, SpdyError> {
        if let Some(data) = &mut self.data {
            if input.is_empty() {
                return Ok(None);
            }
            let bytes = input.split_to(data.left.min(input.len())).freeze();
            data.left -= bytes.len();
            let (stream, last) = (data.stream, data.left == 0);
            let fin = last && data.fin;
            if last {
                self.data = None;
            }
            return Ok(Some(Frame::Data { stream, fin, bytes }));
        }

        let Some((&[a, b, c, d, flags, x, y, z], _)) = input.split_first_chunk() else {
            return Ok(None);
        };
        let first = u32::from_be_bytes([a, b, c, d]);
        let length = u32::from_be_bytes([0, x, y, z]) as usize;
        if first & CONTROL == 0 {
            input.advance(HEADER);
            return self.open_data(first, flags & FIN != 0, length);
        }

        let (version, kind) = ((first >> 16) as u16 & 0x7fff, first as u16);
        if version != SPDY_VERSION {
            return Err(SpdyError::Version(version));
        }
        if length > MAX_CONTROL_FRAME {
            return Err(SpdyError::FrameTooLarge(length));
        }
        if input.len() < HEADER + length {
            return Ok(None);
        }
        input.advance(HEADER);
        let payload = input.split_to(length).freeze();
        control(kind, flags, payload).map(Some)
    }

    fn open_data(
        &mut self,
        stream: u32,
        fin: bool,
        left: usize,
    ) -> Result<Option<Frame>, SpdyError> {
        if stream == 0 {
            return Err(SpdyError::StreamZero);
        }
        if left > 0 {
            self.data = Some(OpenData { stream, fin, left });
        }
        // Streams mostly end with an empty frame. For a frame with payload this is an empty first part.
        Ok(Some(Frame::Data {
            stream,
            fin: fin && left == 0,
            bytes: Bytes::new(),
        }))
    }
}

fn control(kind: u16, flags: u8, mut payload: Bytes) -> Result<Frame, SpdyError> {
    let fin = flags & FIN != 0;
    let wrong_length = SpdyError::FrameLength { kind };
    let read_u32 = |payload: &mut Bytes| payload.try_get_u32().map_err(|_| wrong_length);
    let stream = |payload: &mut Bytes| match read_u32(payload)? & STREAM {
        0 => Err(SpdyError::StreamZero),
        stream => Ok(stream),
    };
    match kind {
        SYN_STREAM => {
            let stream = stream(&mut payload)?;
            // Skip associated stream, priority and slot.
            if payload.len() < 6 {
                return Err(wrong_length);
            }
            let block = payload.split_off(6);
            Ok(Frame::SynStream { stream, fin, block })
        }
        SYN_REPLY | HEADERS => {
            let stream = stream(&mut payload)?;
            let block = payload;
            Ok(match kind {
                SYN_REPLY => Frame::SynReply { stream, fin, block },
                _ => Frame::Headers { stream, fin, block },
            })
        }
        RST_STREAM => Ok(Frame::Reset {
            stream: stream(&mut payload)?,
        }),
        SETTINGS => {
            let count = read_u32(&mut payload)?;
            if u64::from(count) * 8 != payload.len() as u64 {
                return Err(wrong_length);
            }
            let mut initial_window = None;
            while !payload.is_empty() {
                let id = read_u32(&mut payload)? & 0x00ff_ffff;
                let value = read_u32(&mut payload)?;
                if id == INITIAL_WINDOW_SIZE {
                    initial_window = Some(value & STREAM);
                }
            }
            Ok(Frame::Settings { initial_window })
        }
        PING => Ok(Frame::Ping(read_u32(&mut payload)?)),
        GOAWAY => Ok(Frame::GoAway),
        WINDOW_UPDATE => {
            let stream = read_u32(&mut payload)? & STREAM;
            let delta = read_u32(&mut payload)? & STREAM;
            Ok(Frame::WindowUpdate { stream, delta })
        }
        _ => Ok(Frame::Unknown),
    }
}

/// Writes a SYN_STREAM, for tests with a client.
#[cfg(test)]
pub(super) fn syn_stream(output: &mut BytesMut, stream: u32, fin: bool, block: &[u8]) {
    control_header(output, SYN_STREAM, u8::from(fin), block.len() + 10);
    output.put_u32(stream);
    output.put_slice(&[0; 6]);
    output.put_slice(block);
}

pub(super) fn syn_reply(output: &mut BytesMut, stream: u32, block: &[u8]) {
    control_header(output, SYN_REPLY, 0, block.len() + 4);
    output.put_u32(stream);
    output.put_slice(block);
}

pub(super) fn reset(output: &mut BytesMut, stream: u32, status: ResetStatus) {
    control_header(output, RST_STREAM, 0, 8);
    output.put_u32(stream);
    output.put_u32(status as u32);
}

pub(super) fn ping(output: &mut BytesMut, id: u32) {
    control_header(output, PING, 0, 4);
    output.put_u32(id);
}

pub(super) fn go_away(output: &mut BytesMut, last_stream: u32, status: GoAwayStatus) {
    control_header(output, GOAWAY, 0, 8);
    output.put_u32(last_stream);
    output.put_u32(status as u32);
}

pub(super) fn window_update(output: &mut BytesMut, stream: u32, delta: u32) {
    control_header(output, WINDOW_UPDATE, 0, 8);
    output.put_u32(stream);
    output.put_u32(delta);
}

/// Writes data, in several frames if necessary.
pub(super) fn data(output: &mut BytesMut, stream: u32, fin: bool, bytes: &[u8]) {
    let mut parts = bytes.chunks(MAX_FRAME_LENGTH).peekable();
    if parts.peek().is_none() {
        data_frame(output, stream, fin, &[]);
    }
    while let Some(part) = parts.next() {
        data_frame(output, stream, fin && parts.peek().is_none(), part);
    }
}

fn data_frame(output: &mut BytesMut, stream: u32, fin: bool, bytes: &[u8]) {
    output.reserve(HEADER + bytes.len());
    output.put_u32(stream);
    length_word(output, u8::from(fin), bytes.len());
    output.put_slice(bytes);
}

fn control_header(output: &mut BytesMut, kind: u16, flags: u8, length: usize) {
    output.reserve(HEADER + length);
    output.put_u16(0x8000 | SPDY_VERSION);
    output.put_u16(kind);
    length_word(output, flags, length);
}

/// Flags and length. Callers keep the length below 24 bits.
fn length_word(output: &mut BytesMut, flags: u8, length: usize) {
    output.put_u32((u32::from(flags) << 24) | (length & MAX_FRAME_LENGTH) as u32);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(bytes: &[u8]) -> Result<Vec<Frame>, SpdyError> {
        let (mut parser, mut input, mut frames) =
            (Parser::default(), BytesMut::from(bytes), Vec::new());
        while let Some(frame) = parser.next(&mut input)? {
            frames.push(frame);
        }
        Ok(frames)
    }

    #[test]
    fn ping_matches_spdystream() {
        let ping = [0x80, 3, 0, 6, 0, 0, 0, 4, 0, 0, 0, 1];
        assert_eq!(frames(&ping), Ok(vec![Frame::Ping(1)]));
        let mut written = BytesMut::new();
        super::ping(&mut written, 1);
        assert_eq!(written[..], ping);
    }

    #[test]
    fn data_frames_are_parsed_in_parts() {
        let mut written = BytesMut::new();
        data(&mut written, 5, true, b"hello");
        assert_eq!(written[..8], [0, 0, 0, 5, 1, 0, 0, 5]);
        let (mut parser, mut input) = (Parser::default(), BytesMut::from(&written[..10]));
        let part = |fin, bytes: &'static [u8]| {
            let bytes = Bytes::from_static(bytes);
            Ok(Some(Frame::Data {
                stream: 5,
                fin,
                bytes,
            }))
        };
        assert_eq!(parser.next(&mut input), part(false, b""));
        assert_eq!(parser.next(&mut input), part(false, b"he"));
        assert_eq!(parser.next(&mut input), Ok(None));
        input.extend_from_slice(&written[10..]);
        assert_eq!(parser.next(&mut input), part(true, b"llo"));
    }

    #[test]
    fn empty_data_frame_ends_the_stream() {
        let end = [0, 0, 0, 5, 1, 0, 0, 0];
        let frame = Frame::Data {
            stream: 5,
            fin: true,
            bytes: Bytes::new(),
        };
        assert_eq!(frames(&end), Ok(vec![frame]));
    }

    #[test]
    fn parses_initial_window_in_settings() {
        let settings = [
            0x80, 3, 0, 4, 0, 0, 0, 12, 0, 0, 0, 1, 0, 0, 0, 7, 0, 1, 0, 0,
        ];
        let initial_window = Some(65536);
        assert_eq!(
            frames(&settings),
            Ok(vec![Frame::Settings { initial_window }])
        );
    }

    #[test]
    fn invalid_frames_are_rejected() {
        let version_2 = [0x80, 2, 0, 1, 0, 0, 0, 0];
        assert_eq!(frames(&version_2), Err(SpdyError::Version(2)));
        let large = [0x80, 3, 0, 1, 0, 0xff, 0xff, 0xff];
        assert_eq!(frames(&large), Err(SpdyError::FrameTooLarge(0xff_ffff)));
        let short = [0x80, 3, 0, 1, 0, 0, 0, 5, 0, 0, 0, 1, 0];
        assert_eq!(frames(&short), Err(SpdyError::FrameLength { kind: 1 }));
        let zero = [0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(frames(&zero), Err(SpdyError::StreamZero));
        let wrong_count = [0x80, 3, 0, 4, 0, 0, 0, 4, 0xff, 0xff, 0xff, 0xff];
        assert_eq!(
            frames(&wrong_count),
            Err(SpdyError::FrameLength { kind: 4 })
        );
    }
}
