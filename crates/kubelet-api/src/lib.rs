//! The kubelet's HTTPS API: what the API server asks of a node (logs, exec, attach, port-forward, stats).
//!
//! Responsible for: the listening socket, TLS, who may call, the HTTP side of every endpoint, and the protocols that carry
//! streams.
//!
//! Deliberately does not know: how a container runs, nor how the node learns of its pods. It asks a [`PodSource`].
//!
//! Start reading at [`serve`] (`server.rs`: the accept loop), then `routes.rs` (the endpoints). `auth/` and `tls.rs` hold
//! who is let in, `unauthenticated.rs` how many others may be connected, `peer.rs` how a caller is named, `seam.rs` what is asked of the kubelet. Streams: `remotecommand/` and
//! `portforward/` are the endpoints, `upgrade.rs` the way out of HTTP, `streams/` what they share, `spdy/` and `websocket/` the
//! protocols, without IO. Figures: `stats/` and `metrics/`; of the node itself: `about.rs` and `node_logs/`.
//!
//! Invariant: a handler runs only for a caller with a certificate of the client CA and a common name on the allow-list, or
//! with a token whose owner the API server knows and allows. There is no unauthenticated endpoint, `/healthz` included.

mod about;
mod auth;
mod error;
#[cfg(test)]
mod fuzz;
mod logs;
mod lookup;
mod metrics;
mod node_logs;
mod peer;
mod portforward;
mod remotecommand;
mod routes;
mod seam;
mod server;
mod spdy;
pub mod stats;
mod streams;
#[cfg(test)]
mod testing;
mod tls;
mod unauthenticated;
mod upgrade;
mod websocket;
mod wide;

pub use auth::{Access, Authority, NoJudgement, Question, User};
pub use error::ApiError;
pub use peer::{Peer, peer_of};
pub use seam::{
    AttachOptions, ByteReader, ByteWriter, Connection, Duplex, ExecOptions, Exit, LogBytes,
    LogOptions, LogStream, NoLogs, NoSession, NoSessionClass, PodSource, Session, Streams,
    TerminalSize,
};
pub use server::serve;
pub use tls::ServerIdentity;
pub use unauthenticated::{UnauthenticatedConnections, UnauthenticatedSlot};

/// Upstream's default of `streamingConnectionIdleTimeout`.
pub const STREAM_IDLE_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(4 * 60 * 60);
