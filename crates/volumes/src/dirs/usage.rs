//! Disk usage of a volume.

use std::collections::HashSet;
use std::path::Path;

use linux::file_id::FileId;
use linux::walk::{Unreadable, WalkOutcome, walk};

/// Limits the walk, because a container may create entries as fast as they are counted.
const MAX_ENTRIES: u64 = 10_000_000;

/// The allocated bytes of all files in `dir`; hard links count once. Unreadable directories are skipped, so this is a lower
/// bound.
pub fn of_directory(dir: &Path) -> u64 {
    let mut seen = HashSet::new();
    let mut blocks: u64 = 0;
    let walked = walk(dir, MAX_ENTRIES, Unreadable::Skip, &mut |_, status| {
        if status.st_nlink < 2 || seen.insert(FileId::from(status)) {
            blocks = blocks.saturating_add(u64::try_from(status.st_blocks).unwrap_or_default());
        }
        Ok(())
    });
    match walked {
        Ok(WalkOutcome::Complete) => {}
        Ok(outcome) => tracing::debug!(dir = %dir.display(), ?outcome, "usage is a lower bound"),
        Err(error) => tracing::debug!(dir = %dir.display(), %error, "usage is a lower bound"),
    }
    blocks.saturating_mul(512)
}

/// The used bytes of the file system that is mounted at `dir`.
pub(super) fn of_file_system(dir: &Path) -> u64 {
    rustix::fs::statvfs(dir).map_or(0, |status| {
        let blocks = status.f_blocks.saturating_sub(status.f_bfree);
        blocks.saturating_mul(status.f_frsize)
    })
}
