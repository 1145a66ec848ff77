//! Coracle's messages to the user on standard error: lines, the phases of a command, progress of downloads, and errors with a
//! hint and an exit code. Standard output is for data and the workload.
//!
//! Knows neither the commands that print nor the errors of other crates: the binary converts those. Start reading at [`Failure`].

#![warn(unused_crate_dependencies)]

mod download_progress;
mod failure;
mod phases;
mod stderr;

pub use download_progress::{DownloadProgress, FileProgress};
pub use failure::{Failure, FailureCode};
pub use phases::Phases;
pub use stderr::print_stderr;
