//! The protocol of a process that pulls an image: one line of JSON on stdin, many lines on stdout.

use std::path::PathBuf;

use download::error_chain;
use serde::{Deserialize, Serialize};

use crate::layers::ImageLimits;
use crate::progress::PullEvent;
use crate::pull::{LocalImage, PullRequest};

/// The line on stdin.
#[derive(Debug, Serialize, Deserialize)]
pub struct PullCommand {
    /// The store's directory.
    pub store: PathBuf,
    /// The directory of unpacked layers.
    pub layers: PathBuf,
    /// Limits for the unpacked size of the image.
    pub limits: ImageLimits,
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
    Failed(PullFailure),
}

/// Why an image cannot be pulled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullFailure {
    /// From [`ImageError::reason`](crate::ImageError::reason).
    pub reason: String,
    /// The message for the user.
    pub message: String,
}

impl PullFailure {
    /// A failure on this machine.
    pub(super) fn local(error: &(dyn std::error::Error + 'static)) -> Self {
        Self::pull_error(error_chain(error))
    }

    /// A failure with reason `ErrImagePull`.
    pub fn pull_error(message: String) -> Self {
        let reason = "ErrImagePull".to_owned();
        Self { reason, message }
    }
}
