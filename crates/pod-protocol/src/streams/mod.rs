//! Streams into a pod: frames of exec and attach, bytes of port-forward.
//!
//! Each session is one HTTP/2 stream. `frames.rs` multiplexes the channels of a session over it, without IO;
//! `frame_reader.rs` reads frames from an HTTP/2 body; `forward.rs` copies the bytes of a forwarded port unframed.
//! Nothing is read before there is room for it: HTTP/2's flow control blocks a process whose output the client does
//! not read, and a client whose input the process does not read.

mod forward;
mod frame_reader;
mod frames;

use bytes::Bytes;
use futures::stream::LocalBoxStream;

pub(crate) use forward::forward;
pub use frame_reader::FrameReader;
pub use frames::{
    FrameDecoder, FrameError, FrameKind, SessionEnd, StreamFrame, TtySize, encode_frame, fill_frame,
};

/// The encoded frames that a session sends to its client; the last one is [`FrameKind::Exit`].
pub type FrameStream = LocalBoxStream<'static, Bytes>;

/// Size of the buffers that streams are read into, and so the largest payload of a frame of output.
pub const STREAM_BLOCK_SIZE: usize = 64 * 1024;
