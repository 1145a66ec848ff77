//! How the channels of a session share one stream of bytes. Sans-IO.
//!
//! A frame is a byte that says what it is, three bytes of length (the most significant first), and that many bytes.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

/// Kind and length.
const HEAD: usize = 4;
/// What is not passed on in pieces may be so long: the longest command that Linux takes, in JSON.
const LONGEST_WHOLE: usize = 4 * 1024 * 1024;
/// The most that a length can say.
const LONGEST: usize = 0xff_ffff;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// What is asked; the first frame, and the only one of its kind.
    Question = 0,
    /// To the process's standard input.
    Input = 1,
    /// Nothing more will come there.
    InputEnd = 2,
    /// The terminal's size.
    Resize = 3,
    /// From its standard output, or its terminal.
    Output = 4,
    /// From its standard error.
    Errors = 5,
    /// How it ended; the last frame.
    Ended = 6,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        [
            Self::Question,
            Self::Input,
            Self::InputEnd,
            Self::Resize,
            Self::Output,
            Self::Errors,
            Self::Ended,
        ]
        .into_iter()
        .find(|kind| *kind as u8 == byte)
    }

    /// Its bytes mean something in pieces too.
    fn flows(self) -> bool {
        matches!(self, Self::Input | Self::Output | Self::Errors)
    }
}

/// The size of a terminal, in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Characters in a line.
    pub columns: u16,
    /// Lines.
    pub rows: u16,
}

impl Size {
    /// As a frame.
    pub fn frame(self) -> Bytes {
        let mut payload = [0; 4];
        payload[..2].copy_from_slice(&self.columns.to_be_bytes());
        payload[2..].copy_from_slice(&self.rows.to_be_bytes());
        plain(Kind::Resize, &payload)
    }
}

/// How a session ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ending {
    /// The process ended; 128 and the signal's number if it was killed by one. 0 for a session that had no process of its own.
    Code(i32),
    /// The session could not go on, for this reason.
    Failed(String),
}

impl Ending {
    /// As a frame.
    pub fn frame(&self) -> Bytes {
        // A number or a string: nothing in it can fail to be JSON.
        plain(Kind::Ended, &serde_json::to_vec(self).unwrap_or_default())
    }
}

/// One thing that was said. What flows may come in more pieces than it was sent in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Word {
    /// JSON.
    Question(Bytes),
    /// To standard input.
    Input(Bytes),
    /// The end of standard input.
    InputEnd,
    /// A new size.
    Resize(Size),
    /// From standard output.
    Output(Bytes),
    /// From standard error.
    Errors(Bytes),
    /// The end of the session.
    Ended(Ending),
}

/// What came is no frame of ours.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Garbled {
    /// An unknown kind.
    #[error("a frame of the unknown kind {0}")]
    Kind(u8),
    /// Too long for its kind.
    #[error("a frame of {length} bytes, which is too long for its kind {kind:?}")]
    Long {
        /// The kind.
        kind: Kind,
        /// How long it would be.
        length: usize,
    },
    /// Its content makes no sense.
    #[error("a frame of the kind {0:?} that makes no sense")]
    Content(Kind),
}

/// A frame with a copy of `payload`, which must be shorter than 16 MiB.
pub fn plain(kind: Kind, payload: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(HEAD + payload.len());
    bytes.put_bytes(0, HEAD);
    bytes.extend_from_slice(payload);
    seal(kind, bytes)
}

/// A frame whose payload `fill` puts behind what is there already. `None` if it put nothing.
pub fn frame<T>(
    kind: Kind,
    room: usize,
    fill: impl FnOnce(&mut BytesMut) -> T,
) -> (T, Option<Bytes>) {
    let mut bytes = BytesMut::with_capacity(HEAD + room);
    bytes.put_bytes(0, HEAD);
    let filled = fill(&mut bytes);
    let some = bytes.len() > HEAD;
    (filled, some.then(|| seal(kind, bytes)))
}

fn seal(kind: Kind, mut bytes: BytesMut) -> Bytes {
    let length = (bytes.len() - HEAD).min(LONGEST);
    bytes.truncate(HEAD + length);
    let [_, head @ ..] = u32::try_from(length).unwrap_or_default().to_be_bytes();
    bytes[0] = kind as u8;
    bytes[1..HEAD].copy_from_slice(&head);
    fitting(bytes)
}

/// What was read, without the room that was made for more: it may wait long for a client, and many of its kind with it.
pub(super) fn fitting(bytes: BytesMut) -> Bytes {
    if bytes.len() * 2 < bytes.capacity() {
        return Bytes::copy_from_slice(&bytes);
    }
    bytes.freeze()
}

/// Takes frames apart as their bytes come.
#[derive(Debug, Default)]
pub struct Decoder {
    /// What has come and is not understood yet.
    here: BytesMut,
    /// What has come and needs no copying: the rest of the piece that was pushed last.
    piece: Bytes,
    /// Of the frame that is under way: its kind, and how much of it is still to come.
    under_way: Option<(Kind, usize)>,
}

impl Decoder {
    /// Something came. Everything before it must have been taken.
    pub fn push(&mut self, bytes: Bytes) {
        debug_assert!(self.piece.is_empty(), "a piece was not taken");
        self.piece = bytes;
    }

    /// What has been said, if anything more.
    pub fn take(&mut self) -> Result<Option<Word>, Garbled> {
        loop {
            let (kind, left) = match self.under_way {
                Some(under_way) => under_way,
                None => {
                    if !self.gather(HEAD) {
                        return Ok(None);
                    }
                    let head = self.here.split_to(HEAD);
                    let length = u32::from_be_bytes([0, head[1], head[2], head[3]]) as usize;
                    let kind = Kind::from_byte(head[0]).ok_or(Garbled::Kind(head[0]))?;
                    if !kind.flows() && length > LONGEST_WHOLE {
                        return Err(Garbled::Long { kind, length });
                    }
                    (kind, length)
                }
            };
            if kind.flows() {
                let some = self.piece.split_to(left.min(self.piece.len()));
                let left = left - some.len();
                self.under_way = (left > 0).then_some((kind, left));
                if !some.is_empty() {
                    return Ok(Some(flowing(kind, some)));
                }
                if left > 0 {
                    return Ok(None);
                }
            } else {
                self.under_way = Some((kind, left));
                if !self.gather(left) {
                    return Ok(None);
                }
                self.under_way = None;
                return whole(kind, self.here.split_to(left).freeze()).map(Some);
            }
        }
    }

    /// Whether everything that was begun has been said to its end.
    pub fn is_between_frames(&self) -> bool {
        self.under_way.is_none() && self.here.is_empty() && self.piece.is_empty()
    }

    /// Moves bytes here until there are `wanted`.
    fn gather(&mut self, wanted: usize) -> bool {
        let missing = wanted.saturating_sub(self.here.len());
        let taken = missing.min(self.piece.len());
        self.here.extend_from_slice(&self.piece[..taken]);
        self.piece.advance(taken);
        self.here.len() >= wanted
    }
}

fn flowing(kind: Kind, bytes: Bytes) -> Word {
    match kind {
        Kind::Input => Word::Input(bytes),
        Kind::Output => Word::Output(bytes),
        _ => Word::Errors(bytes),
    }
}

fn whole(kind: Kind, bytes: Bytes) -> Result<Word, Garbled> {
    match kind {
        Kind::Question => Ok(Word::Question(bytes)),
        Kind::InputEnd => Ok(Word::InputEnd),
        Kind::Resize => match bytes[..] {
            [c0, c1, r0, r1] => Ok(Word::Resize(Size {
                columns: u16::from_be_bytes([c0, c1]),
                rows: u16::from_be_bytes([r0, r1]),
            })),
            _ => Err(Garbled::Content(kind)),
        },
        _ => match serde_json::from_slice(&bytes) {
            Ok(ending) => Ok(Word::Ended(ending)),
            Err(_) => Err(Garbled::Content(kind)),
        },
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(decoder: &mut Decoder, bytes: &[u8], piece: usize) -> Result<Vec<Word>, Garbled> {
        let mut words = Vec::new();
        for piece in bytes.chunks(piece) {
            decoder.push(Bytes::copy_from_slice(piece));
            while let Some(word) = decoder.take()? {
                words.push(word);
            }
        }
        Ok(words)
    }

    /// Pieces of one channel that follow each other are one again.
    fn joined(words: Vec<Word>) -> Vec<Word> {
        let mut joined: Vec<Word> = Vec::new();
        for word in words {
            match (joined.last_mut(), word) {
                (Some(Word::Input(before)), Word::Input(more))
                | (Some(Word::Output(before)), Word::Output(more))
                | (Some(Word::Errors(before)), Word::Errors(more)) => {
                    *before = [&before[..], &more[..]].concat().into();
                }
                (_, word) => joined.push(word),
            }
        }
        joined
    }

    fn said() -> (Vec<Word>, Vec<u8>) {
        let size = Size {
            columns: 300,
            rows: 24,
        };
        let text = Bytes::from(vec![7; 1000]);
        let words = vec![
            Word::Question(Bytes::from_static(b"{}")),
            Word::Input(text.clone()),
            Word::Resize(size),
            Word::InputEnd,
            Word::Output(text.clone()),
            Word::Errors(text.clone()),
            Word::Ended(Ending::Code(137)),
            Word::Ended(Ending::Failed("why".to_owned())),
        ];
        let bytes = [
            plain(Kind::Question, b"{}"),
            plain(Kind::Input, &text),
            plain(Kind::Output, b""),
            size.frame(),
            plain(Kind::InputEnd, b""),
            plain(Kind::Output, &text),
            plain(Kind::Errors, &text),
            Ending::Code(137).frame(),
            Ending::Failed("why".to_owned()).frame(),
        ];
        (words, bytes.concat())
    }

    #[test]
    fn what_is_said_is_heard_in_pieces_of_any_size() {
        let (words, bytes) = said();
        for piece in [1, 2, 3, 4, 5, 7, 64, 1003, 1004, 1005, 100_000] {
            let mut decoder = Decoder::default();
            let heard = all(&mut decoder, &bytes, piece).unwrap();
            assert_eq!(joined(heard), words, "in pieces of {piece}");
            assert!(decoder.is_between_frames());
        }
    }

    #[test]
    fn a_frame_is_filled_in_place() {
        let (read, none) = frame(Kind::Output, 10, |_| 0);
        assert_eq!((read, none), (0, None));
        let (_, some) = frame(Kind::Output, 10, |bytes| bytes.extend_from_slice(b"hello"));
        assert_eq!(some.unwrap(), plain(Kind::Output, b"hello"));
    }

    #[test]
    fn nonsense_is_refused() {
        let hear = |bytes: &[u8]| all(&mut Decoder::default(), bytes, 1000).unwrap_err();
        assert_eq!(hear(&[9, 0, 0, 0]), Garbled::Kind(9));
        assert_eq!(
            hear(&[0, 255, 255, 255]),
            Garbled::Long {
                kind: Kind::Question,
                length: LONGEST
            }
        );
        assert_eq!(hear(&[3, 0, 0, 1, 0]), Garbled::Content(Kind::Resize));
        assert_eq!(hear(&[6, 0, 0, 1, b'{']), Garbled::Content(Kind::Ended));
    }

    proptest! {
        #[test]
        fn anything_may_come(bytes: Vec<u8>, piece in 1..50_usize) {
            let _ = all(&mut Decoder::default(), &bytes, piece);
        }

        #[test]
        fn broken_frames_are_no_danger(at in 0..3000_usize, byte: u8, piece in 1..2000_usize) {
            let (_, mut bytes) = said();
            let at = at % bytes.len();
            bytes[at] = byte;
            let _ = all(&mut Decoder::default(), &bytes, piece);
        }
    }
}
