//! Checks that only root, the release's owner and this user can change a seed. New clusters start from the seed, so a user with
//! write access to it could become their administrator.

use std::fs::{Metadata, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

/// Writable by the group or by others.
const OTHERS_WRITE: u32 = 0o022;
/// In a sticky directory, users can rename and remove only their own entries.
const STICKY: u32 = 0o1000;

/// The uids that may own a seed and its parent directory.
#[derive(Clone, Copy, Debug)]
pub struct TrustedUids([u32; 3]);

impl TrustedUids {
    /// Root, this user, and the owner of the release in `dir`, whose programs we execute.
    pub fn for_release(dir: &Path) -> Self {
        let own_uid = rustix::process::geteuid().as_raw();
        let owner = dir.metadata().map_or(own_uid, |metadata| metadata.uid());
        Self([0, own_uid, owner])
    }

    /// Fails if another user can change or replace the seed in `dir`.
    pub fn check(self, dir: &Path) -> io::Result<()> {
        if let Some(parent) = dir.parent() {
            self.check_parent(parent)?;
        }
        self.check_tree(dir)
    }

    /// Fails if another user can rename entries that this user creates in `dir`.
    pub fn check_parent(self, dir: &Path) -> io::Result<()> {
        let metadata = dir.symlink_metadata()?;
        self.check_owner(dir, &metadata)?;
        if !metadata.is_dir() {
            return refuse(dir, "is not a directory");
        }
        if metadata.mode() & OTHERS_WRITE != 0 && metadata.mode() & STICKY == 0 {
            return refuse(dir, "is writable by other users");
        }
        Ok(())
    }

    fn check_tree(self, path: &Path) -> io::Result<()> {
        let metadata = path.symlink_metadata()?;
        self.check_owner(path, &metadata)?;
        if !metadata.is_dir() && !metadata.is_file() {
            return refuse(path, "is neither a file nor a directory");
        }
        if metadata.mode() & OTHERS_WRITE != 0 {
            return refuse(path, "is writable by other users");
        }
        if metadata.is_dir() {
            for entry in path.read_dir()? {
                self.check_tree(&entry?.path())?;
            }
        }
        Ok(())
    }

    fn check_owner(self, path: &Path, metadata: &Metadata) -> io::Result<()> {
        let owner = metadata.uid();
        if self.0.contains(&owner) {
            return Ok(());
        }
        refuse(path, &format!("belongs to the user with id {owner}"))
    }
}

/// Removes the write permission of group and others from a directory of this user: a umask of 002 allows it to the group.
pub fn remove_write_of_others(dir: &Path) {
    let own_uid = rustix::process::geteuid().as_raw();
    if let Ok(metadata) = dir.symlink_metadata()
        && metadata.is_dir()
        && metadata.uid() == own_uid
        && metadata.mode() & OTHERS_WRITE != 0
        && metadata.mode() & STICKY == 0
    {
        let mode = metadata.mode() & 0o7777 & !OTHERS_WRITE;
        let _ = std::fs::set_permissions(dir, Permissions::from_mode(mode));
    }
}

fn refuse(path: &Path, reason: &str) -> io::Result<()> {
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!("{} {reason}", path.display()),
    ))
}
