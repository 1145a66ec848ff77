//! What goes through the pipes of a process that pulls an image for a pod: one line of JSON in, many out.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::progress::Event;
use crate::pull::{Image, PullRequest};

/// The line that it reads.
#[derive(Debug, Serialize, Deserialize)]
pub struct Command {
    /// The store's directory.
    pub store: PathBuf,
    /// The directory of unpacked layers.
    pub layers: PathBuf,
    /// What to pull.
    pub request: PullRequest,
}

/// A line that it writes. The last one is either `Done` or `Failed`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub enum Line {
    /// It goes on.
    Progress(Event),
    /// The image is ready.
    Done(Box<Image>),
    /// It isn't.
    Failed {
        /// As [`ImageError::reason`](crate::ImageError::reason) has it.
        reason: String,
        /// What the user reads.
        message: String,
    },
}
