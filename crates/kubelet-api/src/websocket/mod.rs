//! WebSocket (RFC 6455), the server's side: what kubectl and browsers use for exec, attach and port-forward.
//!
//! Sans-IO like `spdy`, and ours rather than a library's: messages are handed on as they come instead of being held whole,
//! and the three things that Kubernetes carries in them, channels, channels in base64 and SPDY, run in one driver.
//!
//! `handshake.rs` answers the request, `frame.rs` cuts and writes frames, `channels.rs` and `tunnel.rs` are what they carry.

mod channels;
#[cfg(test)]
mod connection_tests;
mod frame;
mod handshake;
#[cfg(test)]
mod session_fuzz;
#[cfg(test)]
pub(crate) mod test_frames;
mod tunnel;

pub(crate) use channels::{Channels, Encoding};
pub(crate) use handshake::{
    AcceptedUpgrade, HandshakeError, accept, is_websocket, requested_protocols,
};
pub(crate) use tunnel::Tunnel;

/// What a client did that WebSocket doesn't allow; the connection can't go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WebSocketError {
    #[error("a frame with bits that were not agreed upon")]
    Reserved,
    #[error("a frame with the unknown opcode {0}")]
    Opcode(u8),
    #[error("a frame of a client that is not masked")]
    NotMasked,
    #[error("a control frame that is too long or in parts")]
    Control,
    #[error("a message that begins within another, or goes on without having begun")]
    Continuation,
    #[error("a frame that is longer than lengths go")]
    Length,
    #[error("more unanswered requests than are allowed")]
    Flood,
    #[error("the end of a channel that there is not")]
    CloseSignal,
}
