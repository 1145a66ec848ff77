//! The server side of SPDY/3.1, which older clients use for all streams and `kubectl port-forward` still uses.
//!
//! Sans-IO: [`SpdyConnection`] converts bytes into events and commands into bytes. `frame.rs` parses and writes frames, `headers.rs` handles
//! compressed header blocks, `flow.rs` flow control, and `connection.rs` combines them.
//!
//! All Kubernetes clients use the library spdystream, so its behaviour matters more than the specification: it has no flow control, and it
//! disconnects when it receives an unknown frame.

mod connection;
#[cfg(test)]
mod connection_tests;
mod dictionary;
mod flow;
mod frame;
mod headers;
#[cfg(test)]
mod session_fuzz;
#[cfg(test)]
pub(crate) mod test_client;

pub(crate) use connection::SpdyConnection;

/// A violation of SPDY by the client. It ends the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SpdyError {
    #[error("frame of SPDY version {0}, expected 3")]
    Version(u16),
    #[error("control frame of {0} bytes is too large")]
    FrameTooLarge(usize),
    #[error("control frame of type {kind} has the wrong length")]
    FrameLength { kind: u16 },
    #[error("cannot decompress header block")]
    Compression,
    #[error("header block too large")]
    HeadersTooLarge,
    #[error("malformed header block")]
    Headers,
    #[error("frame for stream 0")]
    StreamZero,
    #[error("too many pending replies or window overflow")]
    Flood,
}
