//! The connection between a kubelet and the sandbox of one of its pods.
//!
//! The sandbox connects, because compute nodes often accept no connections, and sends one line ([`SandboxHello`]) to
//! authenticate. Then it *serves* HTTP/2 on that connection and the kubelet is its client: each request is a
//! stream with its own flow control, so no multiplexer of our own is needed.
//!
//! ```text
//!   sandbox: server.rs                           kubelet: client.rs
//!   stay_connected ── KubeletEndpoint ────────►  TransportListener
//!   serve          ── SandboxHello, one line ─►  accept ── authenticate
//!                  ◄─ SandboxWelcome, one line         └─► SandboxClient
//!   SandboxService ◄─ HTTP/2 requests ─────────  put_bundle, stop, dismiss, retire, states, logs, exec, attach, port_forward
//! ```
//!
//! The first connection shows the launch token, which is valid once. The kubelet then sends the sandbox a key of its own, which it
//! shows on every later connection: the launch token is useless afterwards.
//!
//! `transport.rs` is the Unix socket or TLS below, `hello.rs` the first line of each end, `state_lines.rs` the framing of states, `shared_socket.rs` the shutdown, `server_streams.rs`
//! and `client_streams.rs` are the two ends of bidirectional requests. A sandbox runs on one thread and may use two
//! megabytes in all, hence the small buffers on its side; an agent serves many sandboxes.
//!
//! [`SandboxHello`]: crate::SandboxHello

mod client;
mod client_streams;
mod hello;
mod server;
mod server_streams;
mod shared_socket;
mod state_lines;
#[cfg(test)]
mod tests;
mod transport;

use std::time::Duration;

pub use client::{ConnectionError, SandboxClient, accept};
pub use client_streams::SandboxSession;
pub use hello::HelloError;
pub use server::{
    LogByteStream, SandboxService, ServeEnd, StayConnectedEnd, serve, stay_connected,
};
pub use transport::{
    AsyncStream, KubeletEndpoint, PendingStream, TransportIdentity, TransportListener,
    TransportStream,
};

/// Limit of concurrent requests on one connection; users run hundreds of commands in one pod.
const MAX_STREAMS: u32 = 512;
/// Flow control window of one response: enough for a fast log.
const RESPONSE_WINDOW: u32 = 128 * 1024;
/// All responses together cannot exhaust it: a slow reader of logs does not delay the pod's state.
const CONNECTION_WINDOW: u32 = MAX_STREAMS * RESPONSE_WINDOW;
/// Limit of an HTTP/2 frame: a block of a stream and its header, so that it needs only one.
const MAX_FRAME_SIZE: u32 = 64 * 1024 + 64;
/// How often each side pings the other. Needed only between machines: on one machine, a dead peer's sockets close.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// The connection is lost if a ping is not acknowledged within this time.
const PING_TIMEOUT: Duration = Duration::from_secs(20);
