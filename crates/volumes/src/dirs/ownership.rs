//! fsGroup: sets group and permissions of a volume's files like upstream.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use linux::walk::{Unreadable, walk};
use rustix::fs::FileType;

use super::opath;
use super::{VolumeError, failed};

const READ_WRITE: u32 = 0o660;
const READ_ONLY: u32 = 0o440;
const SEARCH: u32 = 0o110;
const SET_GROUP_ID: u32 = 0o2000;

/// Sets the group of all files in `dir`, and grants the group access. New files inherit the group (setgid bit).
///
/// Files that cannot be changed are skipped, as upstream does.
pub(super) fn apply(dir: &Path, group: i64, read_only: bool) -> Result<(), VolumeError> {
    let access = if read_only { READ_ONLY } else { READ_WRITE };
    let walked = walk(dir, u64::MAX, Unreadable::Fail, &mut |file, status| {
        let mut changed = opath::chown(file, None, Some(group));
        let kind = FileType::from_raw_mode(status.st_mode);
        // Symlinks have no mode, and chmod would follow them.
        if kind != FileType::Symlink {
            let directory = match kind {
                FileType::Directory => SET_GROUP_ID | SEARCH,
                _ => 0,
            };
            // After chown, which clears the set-id bits.
            changed = changed.and(opath::chmod(file, status.st_mode | access | directory));
        }
        match changed {
            Err(error) if is_ignored(&error) => Ok(()),
            changed => changed,
        }
    });
    walked.map(drop).map_err(failed("set the group of", dir))
}

/// Errors for another user's file, and for a file system without owners and modes.
fn is_ignored(error: &io::Error) -> bool {
    use io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem, Unsupported};
    matches!(
        error.kind(),
        PermissionDenied | ReadOnlyFilesystem | Unsupported
    )
}

/// Whether the volume's root has the right group and mode already.
pub(super) fn root_matches(dir: &Path, group: i64) -> bool {
    let required = READ_WRITE | SEARCH | SET_GROUP_ID;
    std::fs::metadata(dir).is_ok_and(|status| {
        i64::from(status.gid()) == group && status.mode() & required == required
    })
}
