//! Sessions of clients with a pod: exec in its containers, and attach to their own streams.
//!
//! ```text
//!   kubelet ── request body ──► input, end of input, terminal sizes ─┐
//!                                                                    ├─ session.rs ── a process, or a container (runtime/streaming.rs)
//!   kubelet ◄─ response body ── output, errors, exit code           ─┘
//! ```
//!
//! The frames in both bodies are those of [`pod_protocol::streams`].

mod input;
mod session;
#[cfg(test)]
mod tests;

pub use input::{Input, SharedInput, Stdin};
pub use session::Session;
