//! Frames: the messages on a link. The content of the TLS records is a stream of them.
//!
//! ```text
//!   length (24 bits, big endian)   kind (8 bits)   payload of that length
//! ```
//!
//! This module has no input or output. [`FrameBuffer`] opens the records that were received, in place, and finds the frames in
//! their content.

use std::collections::VecDeque;
use std::ops::Range;

use super::records::{Opener, RecordError};

/// The length of a frame's header.
pub(super) const FRAME_HEADER: usize = 4;
/// The maximum length of a payload: a packet with its header.
pub(super) const MAX_PAYLOAD: usize = linux::tun::MAX_PACKET;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FrameKind {
    /// The first frame of each side: a `LinkHello` in JSON.
    Hello = 1,
    /// A packet of a TUN device.
    Packet = 2,
    /// A request for a [`FrameKind::Pong`] with the same payload.
    Ping = 3,
    /// The response.
    Pong = 4,
}

/// Encodes a frame's header. The payload must not be longer than [`MAX_PAYLOAD`].
pub(super) fn encode_header(kind: FrameKind, length: usize) -> [u8; FRAME_HEADER] {
    let [_, high, middle, low] = (length as u32).to_be_bytes();
    [high, middle, low, kind as u8]
}

fn decode_header(header: [u8; FRAME_HEADER]) -> Result<(FrameKind, usize), FrameError> {
    let [high, middle, low, kind] = header;
    let length = u32::from_be_bytes([0, high, middle, low]) as usize;
    let kind = match kind {
        1 => FrameKind::Hello,
        2 => FrameKind::Packet,
        3 => FrameKind::Ping,
        4 => FrameKind::Pong,
        _ => return Err(FrameError::Malformed),
    };
    match length <= MAX_PAYLOAD {
        true => Ok((kind, length)),
        false => Err(FrameError::Malformed),
    }
}

/// Why a link can't go on.
#[derive(Debug, thiserror::Error)]
pub(super) enum FrameError {
    /// A frame has no valid header.
    #[error("malformed frame")]
    Malformed,
    /// A record is invalid.
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// The received bytes of a link.
///
/// ```text
///   | consumed | opened records, whose content is in `contents` | received, not opened | free |
///              ^                                                ^                      ^
///              contents[0].start                                opened                 received
/// ```
pub(super) struct FrameBuffer {
    opener: Opener,
    bytes: Vec<u8>,
    /// The content of opened records that no frame has consumed yet.
    contents: VecDeque<Range<usize>>,
    opened: usize,
    received: usize,
}

/// A frame: the pieces of its payload, in the buffer.
#[derive(Debug, Default)]
pub(super) struct FramePieces {
    pieces: Vec<Range<usize>>,
}

impl FrameBuffer {
    /// The size of the buffer: a few packets of maximum length with all that surrounds them.
    const SIZE: usize = 4 * (MAX_PAYLOAD + 1024);

    pub(super) fn new(opener: Opener) -> Self {
        Self {
            opener,
            bytes: vec![0; Self::SIZE],
            contents: VecDeque::new(),
            opened: 0,
            received: 0,
        }
    }

    /// The free part of the buffer, to receive into. It is never empty after [`FrameBuffer::next_frame`] has returned `None`.
    pub(super) fn free(&mut self) -> &mut [u8] {
        self.make_room();
        &mut self.bytes[self.received..]
    }

    /// Bytes were received into the free part.
    pub(super) fn received(&mut self, count: usize) {
        self.received += count;
        debug_assert!(self.received <= self.bytes.len());
    }

    /// Finds the next frame, and opens records for it; `None` if more bytes have to be received. `pieces` receives the payload,
    /// which is valid until the next call.
    pub(super) fn next_frame(
        &mut self,
        pieces: &mut FramePieces,
    ) -> Result<Option<FrameKind>, FrameError> {
        loop {
            if let Some(kind) = self.take_frame(pieces)? {
                return Ok(Some(kind));
            }
            let unopened = &mut self.bytes[self.opened..self.received];
            let Some(record) = self.opener.open(unopened)? else {
                return Ok(None);
            };
            let Range { start, end } = record.content;
            if start < end {
                self.contents
                    .push_back(self.opened + start..self.opened + end);
            }
            self.opened += record.length;
        }
    }

    /// The bytes of a piece of a frame.
    pub(super) fn pieces<'a>(&'a self, pieces: &'a FramePieces) -> impl Iterator<Item = &'a [u8]> {
        pieces.pieces.iter().map(|piece| &self.bytes[piece.clone()])
    }

    /// Takes a frame from the opened contents, if it is complete.
    fn take_frame(&mut self, pieces: &mut FramePieces) -> Result<Option<FrameKind>, FrameError> {
        let available: usize = self.contents.iter().map(Range::len).sum();
        let mut header = [0; FRAME_HEADER];
        if available < header.len() {
            return Ok(None);
        }
        let bytes = self.contents.iter().cloned().flatten();
        for (to, from) in header.iter_mut().zip(bytes) {
            *to = self.bytes[from];
        }
        let (kind, length) = decode_header(header)?;
        if available < FRAME_HEADER + length {
            return Ok(None);
        }
        self.consume(FRAME_HEADER, |_| {});
        pieces.pieces.clear();
        self.consume(length, |piece| pieces.pieces.push(piece));
        Ok(Some(kind))
    }

    fn consume(&mut self, mut length: usize, mut each: impl FnMut(Range<usize>)) {
        while length > 0
            && let Some(content) = self.contents.front_mut()
        {
            let end = content.start + length.min(content.len());
            each(content.start..end);
            length -= end - content.start;
            content.start = end;
            if content.is_empty() {
                self.contents.pop_front();
            }
        }
    }

    /// Moves the bytes that are still needed to the beginning.
    fn make_room(&mut self) {
        let start = self.contents.front().map_or(self.opened, |content| content.start);
        if start == 0 {
            return;
        }
        self.bytes.copy_within(start..self.received, 0);
        for content in &mut self.contents {
            *content = content.start - start..content.end - start;
        }
        self.opened -= start;
        self.received -= start;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::records::{self, HEADER, TRAILER, tests::pair};
    use super::*;

    /// Seals a stream of bytes into records of these lengths.
    fn seal(stream: &[u8], sealer: &mut records::Sealer, lengths: &[usize]) -> Vec<u8> {
        let mut sealed = Vec::new();
        let mut rest = stream;
        let mut lengths = lengths.iter().cycle();
        while !rest.is_empty() {
            let length = rest.len().min(*lengths.next().unwrap());
            let (content, after) = rest.split_at(length);
            let mut record = vec![0; HEADER + length + TRAILER];
            record[HEADER..HEADER + length].copy_from_slice(content);
            sealer.seal(&mut record, length).unwrap();
            sealed.extend(record);
            rest = after;
        }
        sealed
    }

    /// Feeds bytes in chunks, and returns the frames.
    fn receive(
        buffer: &mut FrameBuffer,
        bytes: &[u8],
        chunk: usize,
    ) -> Result<Vec<(FrameKind, Vec<u8>)>, FrameError> {
        let mut frames = Vec::new();
        let mut pieces = FramePieces::default();
        for chunk in bytes.chunks(chunk) {
            let mut chunk = chunk;
            while !chunk.is_empty() {
                let free = buffer.free();
                let count = chunk.len().min(free.len());
                assert!(count > 0);
                free[..count].copy_from_slice(&chunk[..count]);
                buffer.received(count);
                chunk = &chunk[count..];
                while let Some(kind) = buffer.next_frame(&mut pieces)? {
                    frames.push((kind, buffer.pieces(&pieces).collect::<Vec<_>>().concat()));
                }
            }
        }
        Ok(frames)
    }

    fn kind() -> impl Strategy<Value = FrameKind> {
        prop::sample::select(vec![
            FrameKind::Hello,
            FrameKind::Packet,
            FrameKind::Ping,
            FrameKind::Pong,
        ])
    }

    proptest! {
        #[test]
        fn frames_arrive_whatever_the_records_and_chunks(
            frames in prop::collection::vec((kind(), 0..70_000_usize), 0..6),
            records in prop::collection::vec(1..=records::MAX_CONTENT, 1..5),
            chunk in 1..100_000_usize,
        ) {
            let frames: Vec<_> = frames
                .into_iter()
                .map(|(kind, length)| (kind, vec![length as u8; length.min(MAX_PAYLOAD)]))
                .collect();
            let stream: Vec<u8> = frames
                .iter()
                .flat_map(|(kind, payload)| [&encode_header(*kind, payload.len())[..], payload].concat())
                .collect();
            let (mut sealer, opener) = pair();
            let sealed = seal(&stream, &mut sealer, &records);
            let received = receive(&mut FrameBuffer::new(opener), &sealed, chunk).unwrap();
            prop_assert_eq!(received, frames);
        }

        #[test]
        fn random_frames_do_not_panic(stream: Vec<u8>, record in 1..100_usize) {
            let (mut sealer, opener) = pair();
            let sealed = seal(&stream, &mut sealer, &[record]);
            let _ = receive(&mut FrameBuffer::new(opener), &sealed, 64);
        }

        #[test]
        fn random_records_do_not_panic(bytes: Vec<u8>) {
            let _ = receive(&mut FrameBuffer::new(pair().1), &bytes, 64);
        }
    }

    #[test]
    fn frame_longer_than_a_packet_is_rejected() {
        let (mut sealer, opener) = pair();
        let header = encode_header(FrameKind::Packet, MAX_PAYLOAD + 1);
        let sealed = seal(&header, &mut sealer, &[4]);
        let received = receive(&mut FrameBuffer::new(opener), &sealed, 64);
        assert!(matches!(received, Err(FrameError::Malformed)));
    }
}
