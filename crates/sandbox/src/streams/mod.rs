//! Streams into a pod: commands run in its containers, its containers' own streams, connections to its ports.
//!
//! ```text
//!   kubelet ── request body ──► input, its end, sizes   ─┐
//!                                                        ├─ session.rs ── a process, or a container (runtime/streams.rs)
//!   kubelet ◄─ answer's body ── output, errors, the end ─┘
//! ```
//!
//! Each session is one HTTP/2 stream. `frames.rs` is how several channels share it, without any input or output of its
//! own; `forward.rs` carries a port's bytes as they are. Nothing is read that there is no room for: HTTP/2's flow control
//! holds a process up whose output nobody takes, and a client whose input nobody takes.

mod forward;
mod frames;
mod input;
mod session;
mod words;

pub use forward::forward;
pub use frames::{Decoder, Ending, Garbled, Kind, Size, Word, frame, plain};
pub use input::{Input, SharedInput, Stdin};
pub use session::{Frames, Session, run};
pub use words::Words;

/// How much is read at once, and so the largest piece of anything that is under way.
pub const BLOCK: usize = 64 * 1024;
