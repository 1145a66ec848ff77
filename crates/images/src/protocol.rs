//! The protocol of a process that pulls an image for a pod: one line of JSON on stdin, many lines on stdout.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::progress::PullEvent;
use crate::pull::{LocalImage, PullRequest};

/// The line on stdin.
#[derive(Debug, Serialize, Deserialize)]
pub struct PullCommand {
    /// The store's directory.
    pub store: PathBuf,
    /// The directory of unpacked layers.
    pub layers: PathBuf,
    /// The image to pull.
    pub request: PullRequest,
}

/// A line on stdout. The last one is either `Done` or `Failed`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub enum PullOutput {
    /// A progress event.
    Progress(PullEvent),
    /// The image is ready.
    Done(Box<LocalImage>),
    /// The pull failed.
    Failed {
        /// From [`ImageError::reason`](crate::ImageError::reason).
        reason: String,
        /// The message for the user.
        message: String,
    },
}
