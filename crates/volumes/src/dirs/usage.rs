//! Usage of a volume in memory.

use std::path::Path;

/// The used bytes of the file system that is mounted at `dir`.
pub(super) fn of_file_system(dir: &Path) -> u64 {
    rustix::fs::statvfs(dir).map_or(0, |status| {
        let blocks = status.f_blocks.saturating_sub(status.f_bfree);
        blocks.saturating_mul(status.f_frsize)
    })
}
