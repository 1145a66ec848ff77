//! Multiplexing of a session's channels over one stream of bytes. Sans-IO.
//!
//! A frame is one byte for its kind, three bytes for its length (big-endian), and a payload of that length.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

/// Length of a frame's header.
const HEADER_SIZE: usize = 4;
/// Limit for frames that are decoded as a whole. The largest are queries with a command: Linux's default limit for those is 2 MiB.
const MAX_WHOLE_PAYLOAD: usize = 4 * 1024 * 1024;
/// The largest value of the length field.
const MAX_PAYLOAD: usize = 0xff_ffff;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// The session's parameters, in JSON; only the first frame.
    Query = 0,
    /// Bytes for the process's standard input.
    Stdin = 1,
    /// End of the standard input.
    StdinEnd = 2,
    /// The terminal's new size.
    Resize = 3,
    /// Bytes from its standard output, or its terminal.
    Stdout = 4,
    /// Bytes from its standard error.
    Stderr = 5,
    /// The end of the session; the last frame.
    Exit = 6,
}

impl FrameKind {
    fn from_byte(byte: u8) -> Option<Self> {
        [
            Self::Query,
            Self::Stdin,
            Self::StdinEnd,
            Self::Resize,
            Self::Stdout,
            Self::Stderr,
            Self::Exit,
        ]
        .into_iter()
        .find(|kind| *kind as u8 == byte)
    }

    /// Whether parts of the payload are passed on before the rest has arrived.
    fn is_streamed(self) -> bool {
        matches!(self, Self::Stdin | Self::Stdout | Self::Stderr)
    }
}

/// The size of a terminal, in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TtySize {
    /// Characters in a line.
    pub columns: u16,
    /// Lines.
    pub rows: u16,
}

impl TtySize {
    /// Encodes it as a frame.
    pub fn to_frame(self) -> Bytes {
        let mut payload = [0; 4];
        payload[..2].copy_from_slice(&self.columns.to_be_bytes());
        payload[2..].copy_from_slice(&self.rows.to_be_bytes());
        encode_frame(FrameKind::Resize, &payload)
    }
}

/// How a session ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SessionEnd {
    /// The process's exit code; 128 plus the signal's number if a signal killed it. 0 for a session without a process of its own.
    Code(i32),
    /// The session was aborted, for this reason.
    Failed(String),
}

impl SessionEnd {
    /// Encodes it as a frame.
    pub fn to_frame(&self) -> Bytes {
        // A number or a string always serializes.
        encode_frame(
            FrameKind::Exit,
            &serde_json::to_vec(self).unwrap_or_default(),
        )
    }
}

/// A decoded frame. A streamed payload may be split into several of these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamFrame {
    /// [`FrameKind::Query`]
    Query(Bytes),
    /// [`FrameKind::Stdin`]
    Stdin(Bytes),
    /// [`FrameKind::StdinEnd`]
    StdinEnd,
    /// [`FrameKind::Resize`]
    Resize(TtySize),
    /// [`FrameKind::Stdout`]
    Stdout(Bytes),
    /// [`FrameKind::Stderr`]
    Stderr(Bytes),
    /// [`FrameKind::Exit`]
    Exit(SessionEnd),
}

/// An invalid frame.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FrameError {
    /// Its kind is unknown.
    #[error("unknown frame kind {0}")]
    UnknownKind(u8),
    /// It is too long for its kind.
    #[error("frame of kind {kind:?} has {length} bytes, more than allowed")]
    TooLong {
        /// The kind.
        kind: FrameKind,
        /// The payload's length.
        length: usize,
    },
    /// Its payload cannot be decoded.
    #[error("invalid payload in frame of kind {0:?}")]
    InvalidPayload(FrameKind),
}

/// A frame with a copy of `payload`, which must be shorter than 16 MiB: the rest is cut off.
pub fn encode_frame(kind: FrameKind, payload: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(HEADER_SIZE + payload.len());
    bytes.put_bytes(0, HEADER_SIZE);
    bytes.extend_from_slice(payload);
    finish_frame(kind, bytes)
}

/// A frame with the payload that `fill` appends to the buffer; `None` if it appends nothing.
pub fn fill_frame<T>(
    kind: FrameKind,
    capacity: usize,
    fill: impl FnOnce(&mut BytesMut) -> T,
) -> (T, Option<Bytes>) {
    let mut bytes = BytesMut::with_capacity(HEADER_SIZE + capacity);
    bytes.put_bytes(0, HEADER_SIZE);
    let filled = fill(&mut bytes);
    let has_payload = bytes.len() > HEADER_SIZE;
    (filled, has_payload.then(|| finish_frame(kind, bytes)))
}

fn finish_frame(kind: FrameKind, mut bytes: BytesMut) -> Bytes {
    let length = (bytes.len() - HEADER_SIZE).min(MAX_PAYLOAD);
    bytes.truncate(HEADER_SIZE + length);
    let [_, length @ ..] = u32::try_from(length).unwrap_or_default().to_be_bytes();
    bytes[0] = kind as u8;
    bytes[1..HEADER_SIZE].copy_from_slice(&length);
    shrink(bytes)
}

/// Frees the unused capacity if it is more than half: many frames may be queued for slow clients.
pub(super) fn shrink(bytes: BytesMut) -> Bytes {
    if bytes.len() * 2 < bytes.capacity() {
        return Bytes::copy_from_slice(&bytes);
    }
    bytes.freeze()
}

/// Decodes frames from chunks of bytes.
#[derive(Debug, Default)]
pub struct FrameDecoder {
    /// Bytes of an incomplete header or payload.
    buffer: BytesMut,
    /// The rest of the chunk that was pushed last; not copied if it is part of a streamed payload.
    chunk: Bytes,
    /// The kind of the current frame, and how much of its payload is still missing.
    current: Option<(FrameKind, usize)>,
}

impl FrameDecoder {
    /// Adds a chunk. Call [`take`](Self::take) until it returns `None` before adding the next one.
    pub fn push(&mut self, bytes: Bytes) {
        debug_assert!(self.chunk.is_empty(), "the chunk before was not taken");
        self.chunk = bytes;
    }

    /// The next frame, or the next part of one; `None` if more bytes are needed.
    pub fn take(&mut self) -> Result<Option<StreamFrame>, FrameError> {
        loop {
            let (kind, missing) = match self.current {
                Some(current) => current,
                None => {
                    if !self.gather(HEADER_SIZE) {
                        return Ok(None);
                    }
                    let header = self.buffer.split_to(HEADER_SIZE);
                    let length = u32::from_be_bytes([0, header[1], header[2], header[3]]) as usize;
                    let kind = FrameKind::from_byte(header[0])
                        .ok_or(FrameError::UnknownKind(header[0]))?;
                    if !kind.is_streamed() && length > MAX_WHOLE_PAYLOAD {
                        return Err(FrameError::TooLong { kind, length });
                    }
                    (kind, length)
                }
            };
            if kind.is_streamed() {
                let part = self.chunk.split_to(missing.min(self.chunk.len()));
                let missing = missing - part.len();
                self.current = (missing > 0).then_some((kind, missing));
                if !part.is_empty() {
                    return Ok(Some(streamed(kind, part)));
                }
                if missing > 0 {
                    return Ok(None);
                }
            } else {
                self.current = Some((kind, missing));
                if !self.gather(missing) {
                    return Ok(None);
                }
                self.current = None;
                return whole(kind, self.buffer.split_to(missing).freeze()).map(Some);
            }
        }
    }

    /// Whether the bytes so far end with a complete frame.
    pub fn is_between_frames(&self) -> bool {
        self.current.is_none() && self.buffer.is_empty() && self.chunk.is_empty()
    }

    /// Moves bytes from the chunk to the buffer until it holds `wanted`; returns whether it does.
    fn gather(&mut self, wanted: usize) -> bool {
        let missing = wanted.saturating_sub(self.buffer.len());
        let taken = missing.min(self.chunk.len());
        self.buffer.extend_from_slice(&self.chunk[..taken]);
        self.chunk.advance(taken);
        self.buffer.len() >= wanted
    }
}

fn streamed(kind: FrameKind, bytes: Bytes) -> StreamFrame {
    match kind {
        FrameKind::Stdin => StreamFrame::Stdin(bytes),
        FrameKind::Stdout => StreamFrame::Stdout(bytes),
        _ => StreamFrame::Stderr(bytes),
    }
}

fn whole(kind: FrameKind, bytes: Bytes) -> Result<StreamFrame, FrameError> {
    match kind {
        FrameKind::Query => Ok(StreamFrame::Query(bytes)),
        FrameKind::StdinEnd => Ok(StreamFrame::StdinEnd),
        FrameKind::Resize => match bytes[..] {
            [c0, c1, r0, r1] => Ok(StreamFrame::Resize(TtySize {
                columns: u16::from_be_bytes([c0, c1]),
                rows: u16::from_be_bytes([r0, r1]),
            })),
            _ => Err(FrameError::InvalidPayload(kind)),
        },
        _ => match serde_json::from_slice(&bytes) {
            Ok(end) => Ok(StreamFrame::Exit(end)),
            Err(_) => Err(FrameError::InvalidPayload(kind)),
        },
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode_all(
        decoder: &mut FrameDecoder,
        bytes: &[u8],
        chunk: usize,
    ) -> Result<Vec<StreamFrame>, FrameError> {
        let mut frames = Vec::new();
        for chunk in bytes.chunks(chunk) {
            decoder.push(Bytes::copy_from_slice(chunk));
            while let Some(frame) = decoder.take()? {
                frames.push(frame);
            }
        }
        Ok(frames)
    }

    /// Joins consecutive payloads of the same channel.
    fn joined(frames: Vec<StreamFrame>) -> Vec<StreamFrame> {
        let mut joined: Vec<StreamFrame> = Vec::new();
        for frame in frames {
            match (joined.last_mut(), frame) {
                (Some(StreamFrame::Stdin(before)), StreamFrame::Stdin(more))
                | (Some(StreamFrame::Stdout(before)), StreamFrame::Stdout(more))
                | (Some(StreamFrame::Stderr(before)), StreamFrame::Stderr(more)) => {
                    *before = [&before[..], &more[..]].concat().into();
                }
                (_, frame) => joined.push(frame),
            }
        }
        joined
    }

    fn session() -> (Vec<StreamFrame>, Vec<u8>) {
        let size = TtySize {
            columns: 300,
            rows: 24,
        };
        let text = Bytes::from(vec![7; 1000]);
        let frames = vec![
            StreamFrame::Query(Bytes::from_static(b"{}")),
            StreamFrame::Stdin(text.clone()),
            StreamFrame::Resize(size),
            StreamFrame::StdinEnd,
            StreamFrame::Stdout(text.clone()),
            StreamFrame::Stderr(text.clone()),
            StreamFrame::Exit(SessionEnd::Code(137)),
            StreamFrame::Exit(SessionEnd::Failed("why".to_owned())),
        ];
        let bytes = [
            encode_frame(FrameKind::Query, b"{}"),
            encode_frame(FrameKind::Stdin, &text),
            encode_frame(FrameKind::Stdout, b""),
            size.to_frame(),
            encode_frame(FrameKind::StdinEnd, b""),
            encode_frame(FrameKind::Stdout, &text),
            encode_frame(FrameKind::Stderr, &text),
            SessionEnd::Code(137).to_frame(),
            SessionEnd::Failed("why".to_owned()).to_frame(),
        ];
        (frames, bytes.concat())
    }

    #[test]
    fn chunks_of_any_size_decode_to_same_frames() {
        let (frames, bytes) = session();
        for chunk in [1, 2, 3, 4, 5, 7, 64, 1003, 1004, 1005, 100_000] {
            let mut decoder = FrameDecoder::default();
            let decoded = decode_all(&mut decoder, &bytes, chunk).unwrap();
            assert_eq!(joined(decoded), frames, "chunks of {chunk} bytes");
            assert!(decoder.is_between_frames());
        }
    }

    #[test]
    fn fill_frame_returns_no_empty_frame() {
        let (read, none) = fill_frame(FrameKind::Stdout, 10, |_| 0);
        assert_eq!((read, none), (0, None));
        let (_, some) = fill_frame(FrameKind::Stdout, 10, |bytes| {
            bytes.extend_from_slice(b"hello")
        });
        assert_eq!(some.unwrap(), encode_frame(FrameKind::Stdout, b"hello"));
    }

    #[test]
    fn invalid_frames_are_rejected() {
        let error =
            |bytes: &[u8]| decode_all(&mut FrameDecoder::default(), bytes, 1000).unwrap_err();
        assert_eq!(error(&[9, 0, 0, 0]), FrameError::UnknownKind(9));
        assert_eq!(
            error(&[0, 255, 255, 255]),
            FrameError::TooLong {
                kind: FrameKind::Query,
                length: MAX_PAYLOAD
            }
        );
        assert_eq!(
            error(&[3, 0, 0, 1, 0]),
            FrameError::InvalidPayload(FrameKind::Resize)
        );
        assert_eq!(
            error(&[6, 0, 0, 1, b'{']),
            FrameError::InvalidPayload(FrameKind::Exit)
        );
    }

    proptest! {
        #[test]
        fn random_bytes_do_not_panic(bytes: Vec<u8>, chunk in 1..50_usize) {
            let _ = decode_all(&mut FrameDecoder::default(), &bytes, chunk);
        }

        #[test]
        fn corrupted_frames_do_not_panic(at in 0..3000_usize, byte: u8, chunk in 1..2000_usize) {
            let (_, mut bytes) = session();
            let at = at % bytes.len();
            bytes[at] = byte;
            let _ = decode_all(&mut FrameDecoder::default(), &bytes, chunk);
        }
    }
}
