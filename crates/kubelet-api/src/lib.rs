//! The kubelet's HTTPS API: the endpoints that the API server and scrapers call on a node (logs, exec, attach, port-forward, stats).
//!
//! Responsible for: the listening socket, TLS, authentication and authorization, the HTTP side of every endpoint, and the protocols that carry
//! streams.
//!
//! Deliberately does not know: how a container runs, nor how the node learns of its pods. It asks a [`PodSource`].
//!
//! Start reading at [`serve`] (`server.rs`: the accept loop), then `routes.rs` (the endpoints).
//!
//! - Access: `auth/`, `tls.rs`; [`client_auth`] bounds the connections of unauthenticated clients.
//! - The interface to the kubelet: `pod_source.rs`, and `stats/` for the node itself.
//! - Streams: `remotecommand/` and `portforward/` are the endpoints, `upgrade.rs` switches from HTTP to the stream protocol, `streams/` is what
//!   all stream protocols share, `spdy/` and `websocket/` are the protocols, without IO.
//! - Metrics: `stats/` and `metrics/`.
//! - The kubelet itself: `health.rs`, `configz.rs`, `checkpoint.rs`, `node_logs/`.
//!
//! Invariant: a handler runs only for a client with a certificate of the client CA and an allowed common name, or
//! with a token that the API server authenticates and authorizes. There is no unauthenticated endpoint, `/healthz` included.

#![warn(unused_crate_dependencies)]

mod auth;
mod checkpoint;
mod configz;
mod error;
#[cfg(test)]
mod fuzz;
mod health;
mod logs;
mod metrics;
mod node_logs;
mod pod_lookup;
mod pod_phase;
mod pod_source;
mod portforward;
mod read_ahead;
mod remotecommand;
mod routes;
mod server;
mod spdy;
pub mod stats;
mod streams;
#[cfg(test)]
mod testing;
mod tls;
mod upgrade;
mod websocket;

pub use auth::{AccessPolicy, AccessRequest, AuthenticatedUser, DelegatedAuth, DelegatedAuthError};
pub use error::ApiError;
pub use pod_lookup::container_status;
pub use pod_phase::PodPhase;
pub use pod_source::{
    AttachOptions, ContainerLogStream, ContainerSession, ExecOptions, LogError, LogOptions,
    LogStream, PodSource, PortConnection, RequestedStreams, SessionError, SessionErrorKind,
    SessionExit, SessionOutput, TerminalSize,
};
// Only the integration tests use it.
#[cfg(test)]
use rcgen as _;
pub use server::serve;
pub use tls::ServerIdentity;

/// Upstream's default of `streamingConnectionIdleTimeout`.
pub const STREAM_IDLE_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(4 * 60 * 60);
