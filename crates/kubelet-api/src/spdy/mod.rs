//! SPDY/3.1, the server's side: what carries streams for clients older than WebSockets, and `kubectl port-forward` to this day.
//!
//! Sans-IO: [`SpdyConnection`] turns bytes into events and commands into bytes. `frame.rs` cuts frames, `headers.rs` has the
//! compressed header blocks, `flow.rs` the windows, `connection.rs` puts them together.
//!
//! Every client of Kubernetes uses one library, spdystream, and so its dialect is what counts here: it knows no windows, and it
//! gives up when it sees a frame that it doesn't know.

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

/// What a client did that SPDY doesn't allow; the connection can't go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SpdyError {
    #[error("a frame of SPDY version {0}, not 3")]
    Version(u16),
    #[error("a control frame of {0} bytes is more than is allowed")]
    FrameTooLarge(usize),
    #[error("a control frame of type {kind} has the wrong length")]
    FrameLength { kind: u16 },
    #[error("a header block that can't be decompressed")]
    Compression,
    #[error("a header block that is larger than is allowed")]
    HeadersTooLarge,
    #[error("a header block that makes no sense")]
    Headers,
    #[error("a frame for stream 0")]
    StreamZero,
    #[error("more unanswered requests than are allowed")]
    Flood,
}
