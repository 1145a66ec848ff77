//! Streams into a pod: frames of exec and attach, bytes of port-forward.
//!
//! Each session is one HTTP/2 stream. `frames.rs` multiplexes the channels of a session over it, without IO;
//! `words.rs` reads frames from an HTTP/2 body; `forward.rs` copies a port's bytes unframed. Nothing is read
//! without room for it: HTTP/2's flow control blocks a process whose output the client does not read, and a client
//! whose input the process does not read.

mod forward;
mod frames;
mod words;

use bytes::Bytes;
use futures::stream::LocalBoxStream;

pub(crate) use forward::forward;
pub use frames::{Decoder, Ending, Garbled, Kind, Size, Word, frame, plain};
pub use words::Words;

/// The frames that a session sends to its client; the last one is [`Kind::Ended`].
pub type Frames = LocalBoxStream<'static, Bytes>;

/// Size of the buffers that streams are read into, and so the largest payload of a frame of output.
pub const BLOCK: usize = 64 * 1024;
