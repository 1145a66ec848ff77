//! Progress events of a pull.

use serde::{Deserialize, Serialize};

use download::Digest;

/// A progress event of a pull.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum PullEvent {
    /// Another process downloads this blob, and this pull waits for it.
    Waiting {
        /// The blob.
        blob: Digest,
    },
    /// A download starts, or resumes at `at` bytes.
    Begin {
        /// The blob.
        blob: Digest,
        /// Bytes downloaded so far.
        at: u64,
        /// Size of the blob in bytes.
        total: u64,
    },
    /// More bytes arrived.
    Advance {
        /// The blob.
        blob: Digest,
        /// Bytes downloaded so far.
        at: u64,
    },
    /// The blob is complete and verified.
    Downloaded {
        /// The blob.
        blob: Digest,
        /// Its size in bytes.
        size: u64,
    },
    /// Unpacking of a layer starts.
    Unpacking {
        /// The layer's blob.
        blob: Digest,
    },
    /// A layer is unpacked.
    Unpacked {
        /// The layer's blob.
        blob: Digest,
    },
    /// A message for the user.
    Note {
        /// The message.
        text: String,
    },
}

/// Receives progress events.
pub trait PullProgress: Send + Sync {
    /// Called for each event.
    fn event(&self, event: PullEvent);
}

/// Discards progress events.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProgress;

impl PullProgress for NoProgress {
    fn event(&self, _: PullEvent) {}
}
