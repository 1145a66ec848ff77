//! What a pull tells of itself while it goes on.

use serde::{Deserialize, Serialize};

use crate::digest::Digest;

/// Something happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// Somebody else downloads this blob, and is waited for.
    Waiting {
        /// Which one.
        blob: Digest,
    },
    /// A download begins, or goes on at `at` after a break.
    Begin {
        /// Which one.
        blob: Digest,
        /// How much is there.
        at: u64,
        /// Its whole size.
        total: u64,
    },
    /// It has grown.
    Advance {
        /// Which one.
        blob: Digest,
        /// How much is there.
        at: u64,
    },
    /// It is here, and is what it should be.
    Downloaded {
        /// Which one.
        blob: Digest,
        /// Its size.
        size: u64,
    },
    /// A layer is being unpacked.
    Unpacking {
        /// Which blob.
        blob: Digest,
    },
    /// A layer has been unpacked.
    Unpacked {
        /// Which blob.
        blob: Digest,
    },
    /// Something that a user may want to know.
    Note {
        /// In words.
        text: String,
    },
}

/// Somebody who is told.
pub trait Progress: Send + Sync {
    /// Something happened.
    fn event(&self, event: Event);
}

/// Nobody is told.
#[derive(Debug, Clone, Copy, Default)]
pub struct Quiet;

impl Progress for Quiet {
    fn event(&self, _: Event) {}
}
