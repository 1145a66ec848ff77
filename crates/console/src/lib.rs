//! Coracle's messages to the user on standard error: lines, the phases of a command, progress of downloads, and errors with a
//! hint and an exit code. Standard output is for data and the workload.
//!
//! Uses no other crate of ours. Start reading at [`Failure`].

mod downloads;
mod failure;
mod line;
mod phases;

pub use downloads::{DownloadProgress, FileProgress};
pub use failure::{Failure, FailureCode};
pub use line::say;
pub use phases::Phases;
