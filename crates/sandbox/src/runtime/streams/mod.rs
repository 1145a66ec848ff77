//! Exec and attach sessions: the streams between a client and a process of a container.
//!
//! ```text
//!   kubelet ── request body ──► stdin, end of stdin, terminal sizes ─┐
//!                                                                    ├─ session.rs ── a command, or a container (runtime/streaming.rs)
//!   kubelet ◄─ response body ── stdout, stderr, exit code           ─┘
//! ```
//!
//! The frames in both bodies are those of [`pod_protocol::streams`].

mod session;
mod stdin;
#[cfg(test)]
mod tests;

pub use session::ClientSession;
pub use stdin::{ContainerStdin, SessionInput, SharedStdin};
