//! Whether a seed may be used: only if no user other than root, the release's owner and this user can change it. A user who can write
//! the store of a new cluster can make themselves its administrator.

use std::fs::{Metadata, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

/// Writable by the group or by others.
const OTHERS_WRITE: u32 = 0o022;
/// In a sticky directory, users can rename only their own entries.
const STICKY: u32 = 0o1000;

/// The uids that may be able to change a seed.
#[derive(Clone, Copy, Debug)]
pub struct Trusted([u32; 3]);

impl Trusted {
    /// Root, this user, and the owner of the release in `dir`, whose programs we execute.
    pub fn for_release(dir: &Path) -> Self {
        let own = rustix::process::geteuid().as_raw();
        let owner = dir.metadata().map_or(own, |found| found.uid());
        Self([0, own, owner])
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
        let found = dir.symlink_metadata()?;
        self.check_owner(dir, &found)?;
        if !found.is_dir() {
            return refuse(dir, "is not a directory");
        }
        if found.mode() & OTHERS_WRITE != 0 && found.mode() & STICKY == 0 {
            return refuse(dir, "is writable by other users");
        }
        Ok(())
    }

    fn check_tree(self, path: &Path) -> io::Result<()> {
        let found = path.symlink_metadata()?;
        self.check_owner(path, &found)?;
        if !found.is_dir() && !found.is_file() {
            return refuse(path, "is neither a file nor a directory");
        }
        if found.mode() & OTHERS_WRITE != 0 {
            return refuse(path, "is writable by other users");
        }
        if found.is_dir() {
            for entry in path.read_dir()? {
                self.check_tree(&entry?.path())?;
            }
        }
        Ok(())
    }

    fn check_owner(self, path: &Path, found: &Metadata) -> io::Result<()> {
        let owner = found.uid();
        if self.0.contains(&owner) {
            return Ok(());
        }
        refuse(path, &format!("belongs to the user with id {owner}"))
    }
}

/// Removes other users' write permission from a directory of this user: the umask may have allowed it to the group.
pub fn tighten(dir: &Path) {
    let own = rustix::process::geteuid().as_raw();
    if let Ok(found) = dir.symlink_metadata()
        && found.is_dir()
        && found.uid() == own
        && found.mode() & OTHERS_WRITE != 0
        && found.mode() & STICKY == 0
    {
        let mode = found.mode() & 0o7777 & !OTHERS_WRITE;
        let _ = std::fs::set_permissions(dir, Permissions::from_mode(mode));
    }
}

fn refuse(path: &Path, why: &str) -> io::Result<()> {
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!("{} {why}", path.display()),
    ))
}
