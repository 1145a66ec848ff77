//! fsGroup: a volume that a group may use, as upstream makes it.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use linux::walk::{Unreadable, walk};
use rustix::fs::FileType;

use super::tree;
use super::{VolumeError, failed};

const READ_WRITE: u32 = 0o660;
const READ_ONLY: u32 = 0o440;
const SEARCH: u32 = 0o110;
const SET_GROUP_ID: u32 = 0o2000;

/// Gives everything in `dir` to `group`, and the group the rights to use it. New files in it will belong to the group too.
///
/// A file that can't be changed stays as it is, as upstream has it.
pub(super) fn apply(dir: &Path, group: i64, read_only: bool) -> Result<(), VolumeError> {
    let rights = if read_only { READ_ONLY } else { READ_WRITE };
    let walked = walk(dir, u64::MAX, Unreadable::Fail, &mut |file, status| {
        let mut changed = tree::chown(file, None, Some(group));
        let kind = FileType::from_raw_mode(status.st_mode);
        // A link has no rights of its own, and those of its target are not meant.
        if kind != FileType::Symlink {
            let directory = match kind {
                FileType::Directory => SET_GROUP_ID | SEARCH,
                _ => 0,
            };
            // After chown, which takes the set-id bits away.
            changed = changed.and(tree::chmod(file, status.st_mode | rights | directory));
        }
        match changed {
            Err(error) if tolerable(&error) => Ok(()),
            changed => changed,
        }
    });
    walked.map(drop).map_err(failed("set the group of", dir))
}

/// Not our file, or on a file system that can't.
fn tolerable(error: &io::Error) -> bool {
    use io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem, Unsupported};
    matches!(
        error.kind(),
        PermissionDenied | ReadOnlyFilesystem | Unsupported
    )
}

/// Whether the root of a volume has been given to the group already.
pub(super) fn root_matches(dir: &Path, group: i64) -> bool {
    let needed = READ_WRITE | SEARCH | SET_GROUP_ID;
    std::fs::metadata(dir)
        .is_ok_and(|status| i64::from(status.gid()) == group && status.mode() & needed == needed)
}
