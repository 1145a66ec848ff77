//! The connection between a kubelet and the sandbox of one of its pods.
//!
//! The sandbox dials, because a compute node often can't be dialled, and says who it is in one line ([`Hello`]). From
//! then on it *serves* HTTP/2 on that connection and the kubelet is its client: every call is a stream with its own
//! flow control, and nothing here multiplexes by itself.
//!
//! ```text
//!   sandbox: server.rs                           kubelet: client.rs
//!   stay_connected ── dial ───────────────────►  (its own listener)
//!   serve          ── Hello, one line ────────►  accept ── who is it? ──► SandboxClient
//!   SandboxService ◄─ HTTP/2 requests ─────────  put_bundle, stop, dismiss, retire, states, logs, exec, attach, port_forward
//! ```
//!
//! `hello.rs` is the line, `state_lines.rs` the framing of states, `lingering.rs` the end, `sessions.rs` the calls that speak
//! both ways at once. A sandbox is everything on one thread and may use
//! two megabytes in all, hence the small buffers on its side; an agent is many tasks on many threads.
//!
//! [`Hello`]: crate::Hello

mod client;
mod client_sessions;
mod hello;
mod lingering;
mod server;
mod sessions;
mod state_lines;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use client::{ConnectionError, SandboxClient, accept};
pub use client_sessions::{Conversation, Forwarded};
pub use hello::HelloError;
pub use server::{Ended, LogBytes, Parting, SandboxService, serve, stay_connected};

/// How many calls may be under way at once on one connection; people run hundreds of commands in one pod.
const MAX_STREAMS: u32 = 512;
/// How much of one answer the kubelet takes in before its reader has read it: enough for a fast log, and no more.
const ANSWER_WINDOW: u32 = 128 * 1024;
/// Together they never fill the connection: a reader of logs who dawdles does not hold up the pod's state.
const CONNECTION_WINDOW: u32 = MAX_STREAMS * ANSWER_WINDOW;
/// How large a piece of a question or an answer may be: a block of a stream and its header, so that it is one piece and not two.
const FRAME: u32 = 64 * 1024 + 64;
/// How often each side asks whether the other is still there; a peer that is dead is known without asking if it was on
/// the same machine, for its sockets die with it.
const PING_EVERY: Duration = Duration::from_secs(30);
/// How long the other side may take to answer that.
const PING_PATIENCE: Duration = Duration::from_secs(20);
