//! Removing trees that somebody else made, an image or a container: no symlink is followed, no depth is too deep, and
//! directories without permissions are no obstacle to their owner.
//!
//! `std::fs::remove_dir_all` holds a descriptor, and a part of the stack, for every level: a thousand nested directories are
//! enough for it to fail, or to end the process.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, openat, renameat, unlinkat};
use rustix::io::Errno;

/// One descriptor is open for each level; what lies deeper is moved up first.
const DEEPEST: usize = 64;

/// Removes what is at `path`, whatever it is. It is no error if nothing is. The path up to its last name is trusted.
pub fn tree(path: &Path) -> io::Result<()> {
    let Some(name) = path.file_name() else {
        let message = format!("{} has no name to be removed by", path.display());
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

/// Removes `name` in `dir`, whatever it is. It is no error if it isn't there.
pub fn tree_in(dir: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
    let mut moved = Vec::new();
    remove(dir, dir, name, 0, &mut moved)?;
    while let Some(next) = moved.pop() {
        remove(dir, dir, &next, 0, &mut moved)?;
    }
    Ok(())
}

fn remove(
    top: BorrowedFd<'_>,
    dir: BorrowedFd<'_>,
    name: &CStr,
    depth: usize,
    moved: &mut Vec<CString>,
) -> io::Result<()> {
    match unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR | Errno::PERM | Errno::ACCESS) => {}
        Err(error) => return Err(error.into()),
    }
    if unlinkat(dir, name, AtFlags::REMOVEDIR).is_ok() {
        return Ok(());
    }
    if depth >= DEEPEST {
        let to = CString::new(format!(".gone-{:016x}", random()?))?;
        // Its `..` changes, which its own permissions may forbid.
        allow(dir, name)?;
        renameat(dir, name, top, &to)?;
        moved.push(to);
        return Ok(());
    }
    // Some file systems lose their place when a directory changes while it is listed.
    for _ in 0..16 {
        let inner = open(dir, name)?;
        for entry in Dir::read_from(&inner)? {
            let entry = entry?;
            let name = entry.file_name();
            if name.to_bytes() != b"." && name.to_bytes() != b".." {
                remove(top, inner.as_fd(), name, depth + 1, moved)?;
            }
        }
        match unlinkat(dir, name, AtFlags::REMOVEDIR) {
            Err(Errno::NOTEMPTY | Errno::EXIST) => {}
            done => return Ok(done?),
        }
    }
    Err(Errno::NOTEMPTY.into())
}

/// Opens a directory to empty it; its owner may have to allow that first.
fn open(dir: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    allow(dir, name)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(dir, name, flags, Mode::empty())?)
}

/// Gives its owner all rights on a directory.
fn allow(dir: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let path = openat(dir, name, flags, Mode::empty())?;
    let mode = rustix::fs::fstat(&path)?.st_mode;
    if FileType::from_raw_mode(mode) == FileType::Directory && mode & 0o700 != 0o700 {
        let wanted = Mode::from_raw_mode((mode & 0o7777) | 0o700);
        // The descriptor can't be changed itself, but what it stands for can, and nothing else.
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

    /// Directories within each other, beyond what any path can name.
    fn nested(top: &Path, levels: usize) {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut at = openat(CWD, top, flags, Mode::empty()).unwrap();
        for _ in 0..levels {
            rustix::fs::mkdirat(&at, c"d", Mode::RWXU).unwrap();
            at = openat(&at, c"d", flags, Mode::empty()).unwrap();
        }
    }

    #[test]
    fn no_depth_is_too_deep() {
        let home = tempfile::tempdir().unwrap();
        let top = home.path().join("top");
        std::fs::create_dir(&top).unwrap();
        nested(&top, 20_000);
        tree(&top).unwrap();
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0);
    }

    #[test]
    fn links_are_not_followed_and_permissions_are_no_obstacle() {
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
    fn anything_or_nothing_may_be_there() {
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
}
