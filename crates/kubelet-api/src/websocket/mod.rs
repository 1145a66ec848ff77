//! The server side of WebSocket (RFC 6455), which kubectl and browsers use for exec, attach and port-forward.
//!
//! Sans-IO like `spdy`. It is our own implementation because it passes messages on in parts instead of buffering them,
//! and because one driver serves everything that Kubernetes carries in them: channels, channels in base64, and SPDY.
//!
//! `handshake.rs` does the upgrade, `frame.rs` reads and writes frames, `channels.rs` and `tunnel.rs` are the protocols inside of them.

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
    AcceptedUpgrade, HandshakeError, accept, is_websocket, requested_protocols, select_protocol,
};
pub(crate) use tunnel::Tunnel;

/// A violation of the WebSocket protocol by the client. It ends the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WebSocketError {
    #[error("frame with reserved bits")]
    Reserved,
    #[error("frame with unknown opcode {0}")]
    Opcode(u8),
    #[error("unmasked frame")]
    NotMasked,
    #[error("control frame too long or fragmented")]
    Control,
    #[error("unexpected start or continuation of a message")]
    Continuation,
    #[error("frame length out of range")]
    Length,
    #[error("too many pending replies")]
    Flood,
    #[error("invalid close of a channel")]
    CloseSignal,
}
