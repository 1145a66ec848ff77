//! What Coracle tells its user on standard error: lines, the phases of a command, progress of downloads, and errors with a
//! hint and an exit code. Standard output belongs to data and to the workload.
//!
//! Knows no other crate. Start reading at [`Failure`].

mod downloads;
mod failure;
mod line;
mod phases;

pub use downloads::{DownloadProgress, FileProgress};
pub use failure::{Failure, FailureCode};
pub use line::say;
pub use phases::Phases;
