//! Removes directory trees made by an image or a container. It follows no symlink, enters no mount, and handles any depth and
//! directories without permissions.
//!
//! `std::fs::remove_dir_all` uses a descriptor and a stack frame for every level: a thousand nested directories make it fail or
//! crash the process.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, openat, openat2, renameat, unlinkat,
};
use rustix::io::Errno;

/// One descriptor is open per level. Deeper directories are first moved into the directory that holds the tree.
const MAX_DEPTH: usize = 64;

/// Removes the file or directory tree at `path`. A missing path is not an error. The path up to its last component is trusted.
pub fn tree(path: &Path) -> io::Result<()> {
    let Some(name) = path.file_name() else {
        let message = format!("{} has no file name", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    };
    let parent = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = match openat(CWD, parent.unwrap_or(Path::new(".")), flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(()),
        dir => dir?,
    };
    tree_in(dir.as_fd(), &CString::new(name.as_bytes())?)
}

/// Removes the file or directory tree `name` in `dir`. A missing entry is not an error.
///
/// Mount points stay, with everything mounted there. Everything else is removed, and the error reports the mount point.
pub fn tree_in(dir: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
    let mut removal = Removal {
        top: dir,
        moved: Vec::new(),
        mounted: None,
    };
    removal.remove(dir, name, 0)?;
    while let Some(next) = removal.moved.pop() {
        removal.remove(dir, &next, 0)?;
    }
    match removal.mounted {
        None => Ok(()),
        Some(name) => {
            let name = name.to_string_lossy();
            let message = format!("{name} is a mount point and was not removed");
            Err(io::Error::new(io::ErrorKind::ResourceBusy, message))
        }
    }
}

struct Removal<'a> {
    top: BorrowedFd<'a>,
    /// Names in `top` of directories that were too deep.
    moved: Vec<CString>,
    /// The name of the first mount point that was found.
    mounted: Option<CString>,
}

impl Removal<'_> {
    /// Returns whether the entry was removed.
    fn remove(&mut self, dir: BorrowedFd<'_>, name: &CStr, depth: usize) -> io::Result<bool> {
        match unlinkat(dir, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => return Ok(true),
            Err(Errno::BUSY) => return Ok(self.record_mount_point(name)),
            Err(Errno::ISDIR | Errno::PERM | Errno::ACCESS) => {}
            Err(error) => return Err(error.into()),
        }
        if unlinkat(dir, name, AtFlags::REMOVEDIR).is_ok() {
            return Ok(true);
        }
        match grant_owner_permissions(dir, name) {
            Err(Errno::XDEV) => return Ok(self.record_mount_point(name)),
            granted => granted?,
        }
        if depth >= MAX_DEPTH {
            let to = CString::new(format!(".gone-{:016x}", random()?))?;
            renameat(dir, name, self.top, &to)?;
            self.moved.push(to);
            return Ok(true);
        }
        // Some file systems skip entries when a directory changes during the listing.
        for _ in 0..16 {
            let inner = open(dir, name)?;
            let mut is_empty = true;
            for entry in Dir::read_from(&inner)? {
                let entry = entry?;
                let name = entry.file_name();
                if name.to_bytes() != b"." && name.to_bytes() != b".." {
                    is_empty &= self.remove(inner.as_fd(), name, depth + 1)?;
                }
            }
            if !is_empty {
                return Ok(false);
            }
            match unlinkat(dir, name, AtFlags::REMOVEDIR) {
                Err(Errno::NOTEMPTY | Errno::EXIST) => {}
                Err(Errno::BUSY) => return Ok(self.record_mount_point(name)),
                done => return Ok(done.map(|()| true)?),
            }
        }
        Err(Errno::NOTEMPTY.into())
    }

    fn record_mount_point(&mut self, name: &CStr) -> bool {
        self.mounted.get_or_insert_with(|| name.to_owned());
        false
    }
}

/// Opens a directory for listing.
fn open(dir: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat2(dir, name, flags, Mode::empty(), ResolveFlags::NO_XDEV)
}

/// Gives the owner all permissions on a directory. They are needed to empty it, and to move it, which changes its `..`.
fn grant_owner_permissions(dir: BorrowedFd<'_>, name: &CStr) -> Result<(), Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // NO_XDEV rejects mount points, also bind mounts of the same device: the chmod and the listing must not reach mounted trees.
    let path = openat2(dir, name, flags, Mode::empty(), ResolveFlags::NO_XDEV)?;
    let mode = rustix::fs::fstat(&path)?.st_mode;
    if FileType::from_raw_mode(mode) == FileType::Directory && mode & 0o700 != 0o700 {
        let wanted = Mode::from_raw_mode((mode & 0o7777) | 0o700);
        // fchmod rejects O_PATH descriptors; the /proc path refers to the same inode.
        use std::os::fd::AsRawFd;
        let _ = rustix::fs::chmod(format!("/proc/self/fd/{}", path.as_raw_fd()), wanted);
    }
    Ok(())
}

fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())?;
    Ok(u64::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    /// Creates nested directories, deeper than any path can express.
    fn nested(top: &Path, levels: usize) {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut at = openat(CWD, top, flags, Mode::empty()).unwrap();
        for _ in 0..levels {
            rustix::fs::mkdirat(&at, c"d", Mode::RWXU).unwrap();
            at = openat(&at, c"d", flags, Mode::empty()).unwrap();
        }
    }

    #[test]
    fn deeply_nested_trees_are_removed() {
        let home = tempfile::tempdir().unwrap();
        let top = home.path().join("top");
        std::fs::create_dir(&top).unwrap();
        nested(&top, 20_000);
        tree(&top).unwrap();
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
    }

    #[test]
    fn links_stay_unfollowed_and_permissions_are_overridden() {
        let home = tempfile::tempdir().unwrap();
        let (top, kept) = (home.path().join("top"), home.path().join("kept"));
        std::fs::create_dir_all(top.join("locked/below")).unwrap();
        std::fs::create_dir(&kept).unwrap();
        std::fs::write(kept.join("file"), "").unwrap();
        symlink(&kept, top.join("locked/below/link")).unwrap();
        let lock = |path: &str, mode| {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(top.join(path), mode).unwrap();
        };
        lock("locked/below", 0);
        lock("locked", 0o500);
        tree(&top).unwrap();
        assert!(!top.exists() && kept.join("file").exists());
    }

    #[test]
    fn files_links_and_missing_paths_are_accepted() {
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join("file");
        std::fs::write(&file, "").unwrap();
        tree(&file).unwrap();
        tree(&file).unwrap();
        tree(&home.path().join("no/where")).unwrap();
        symlink("nowhere", &file).unwrap();
        tree(&file).unwrap();
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
        assert!(tree(Path::new("/")).is_err());
    }

    #[test]
    fn mount_points_stay_and_the_rest_is_removed() {
        let done = crate::testing::in_a_child(|| {
            crate::namespace::enter_as_root(rustix::thread::UnshareFlags::NEWNS).unwrap();
            let home = tempfile::tempdir().unwrap();
            let at = |path: &str| home.path().join(path);
            for dir in ["outside/dir", "tree/a/bound", "tree/b", "tree/memory"] {
                std::fs::create_dir_all(at(dir)).unwrap();
            }
            for file in [
                "outside/file",
                "tree/a/file",
                "tree/bound-file",
                "tree/b/file",
            ] {
                std::fs::write(at(file), "kept").unwrap();
            }
            std::fs::set_permissions(at("outside"), PermissionsExt::from_mode(0o500)).unwrap();
            // A bind mount of the same device: only the mount id differs.
            crate::mount::bind(&at("outside"), &at("tree/a/bound")).unwrap();
            crate::mount::bind(&at("outside/file"), &at("tree/bound-file")).unwrap();
            crate::mount::tmpfs(&at("tree/memory"), 1 << 20).unwrap();
            std::fs::write(at("tree/memory/file"), "kept").unwrap();

            let error = tree(&at("tree")).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ResourceBusy, "{error}");
            let kept =
                |path: &str| std::fs::read_to_string(at(path)).is_ok_and(|text| text == "kept");
            assert!(kept("outside/file") && at("outside/dir").is_dir() && kept("tree/memory/file"));
            assert!(!at("tree/b").exists() && !at("tree/a/file").exists());
            let mode = std::fs::metadata(at("outside"))
                .unwrap()
                .permissions()
                .mode();
            assert_eq!(mode & 0o777, 0o500);

            for mount_point in ["tree/a/bound", "tree/bound-file", "tree/memory"] {
                crate::mount::detach(&at(mount_point)).unwrap();
            }
            tree(&at("tree")).unwrap();
            !at("tree").exists() && kept("outside/file")
        });
        assert!(done);
    }

    #[test]
    fn tree_that_is_a_mount_point_stays() {
        let done = crate::testing::in_a_child(|| {
            crate::namespace::enter_as_root(rustix::thread::UnshareFlags::NEWNS).unwrap();
            let home = tempfile::tempdir().unwrap();
            let at = |path: &str| home.path().join(path);
            std::fs::create_dir(at("outside")).unwrap();
            std::fs::create_dir(at("tree")).unwrap();
            std::fs::write(at("outside/file"), "").unwrap();
            crate::mount::bind(&at("outside"), &at("tree")).unwrap();
            tree(&at("tree")).unwrap_err();
            crate::mount::detach(&at("tree")).unwrap();
            at("outside/file").exists()
        });
        assert!(done);
    }
}
