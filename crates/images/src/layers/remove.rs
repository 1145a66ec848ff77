//! Removing trees that somebody else made: no symlink is followed, no depth is too deep, and
//! directories without permissions are no obstacle to their owner.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, openat, renameat, unlinkat};
use rustix::io::Errno;

/// One descriptor is open for each level; what lies deeper is moved up first.
const DEEPEST: usize = 64;

/// Removes `name` in `dir`, whatever it is. It is no error if it isn't there.
pub fn remove_all(dir: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
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
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let path = openat(dir, name, flags | OFlags::PATH, Mode::empty())?;
    let mode = rustix::fs::fstat(&path)?.st_mode;
    if FileType::from_raw_mode(mode) == FileType::Directory && mode & 0o700 != 0o700 {
        let wanted = Mode::from_raw_mode((mode & 0o7777) | 0o700);
        // The descriptor can't be changed itself, but what it stands for can, and nothing else.
        use std::os::fd::AsRawFd;
        let _ = rustix::fs::chmod(format!("/proc/self/fd/{}", path.as_raw_fd()), wanted);
    }
    Ok(openat(dir, name, flags | OFlags::RDONLY, Mode::empty())?)
}

fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())?;
    Ok(u64::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn deep_closed_and_linked_trees_go() {
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("file"), "stays").unwrap();
        let tree = dir.path().join("tree");
        fs::create_dir(&tree).unwrap();
        std::os::unix::fs::symlink(&outside, tree.join("link")).unwrap();
        fs::create_dir(tree.join("closed")).unwrap();
        fs::write(tree.join("closed/file"), "").unwrap();
        fs::set_permissions(tree.join("closed"), fs::Permissions::from_mode(0o000)).unwrap();
        // Deeper than PATH_MAX and than there are descriptors.
        let mut at: OwnedFd = File::open(&tree).unwrap().into();
        for _ in 0..3000 {
            rustix::fs::mkdirat(&at, "deep", Mode::RWXU).unwrap();
            let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
            at = openat(&at, "deep", flags, Mode::empty()).unwrap();
        }
        let top = File::open(dir.path()).unwrap();
        remove_all(top.as_fd(), c"tree").unwrap();
        remove_all(top.as_fd(), c"tree").unwrap();
        assert!(!tree.exists());
        assert_eq!(fs::read(outside.join("file")).unwrap(), b"stays");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
