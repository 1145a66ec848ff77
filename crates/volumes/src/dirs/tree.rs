//! Walking a directory that a container may be changing: never through a symbolic link, never onto another mount.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

/// How deep to go: a descriptor is held for every level.
const DEEPEST: usize = 512;

/// Calls `visit` for everything below `root`, and for `root` itself last; what is no directory is opened as `O_PATH`.
///
/// What vanishes meanwhile is passed over.
pub(super) fn walk(
    root: &Path,
    visit: &mut dyn FnMut(BorrowedFd<'_>, &Stat) -> io::Result<()>,
) -> io::Result<()> {
    let root = rustix::fs::openat(CWD, root, path_only() | OFlags::DIRECTORY, Mode::empty())?;
    let status = rustix::fs::fstat(&root)?;
    let device = status.st_dev;
    let mut levels = vec![Level::new(root, status)?];
    while let Some(level) = levels.last_mut() {
        let Some(found) = level.entries.read() else {
            if let Some(done) = levels.pop() {
                visit(done.entries.fd()?, &done.status)?;
            }
            continue;
        };
        let found = found?;
        let name = found.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let entry = match rustix::fs::openat(level.entries.fd()?, name, path_only(), Mode::empty())
        {
            Err(Errno::NOENT) => continue,
            entry => entry?,
        };
        let status = rustix::fs::fstat(&entry)?;
        if FileType::from_raw_mode(status.st_mode) != FileType::Directory {
            visit(entry.as_fd(), &status)?;
        } else if status.st_dev == device && levels.len() < DEEPEST {
            levels.push(Level::new(entry, status)?);
        }
    }
    Ok(())
}

/// A directory on the way, and what is still to be seen in it.
struct Level {
    status: Stat,
    entries: Dir,
}

impl Level {
    fn new(dir: OwnedFd, status: Stat) -> io::Result<Self> {
        let readable = rustix::fs::openat(
            &dir,
            c".",
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        Ok(Self {
            status,
            entries: Dir::new(readable)?,
        })
    }
}

fn path_only() -> OFlags {
    OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC
}

/// Changes the permission bits of what `fd` (opened as `O_PATH`, no symbolic link) stands for.
pub(crate) fn chmod(fd: BorrowedFd<'_>, mode: u32) -> io::Result<()> {
    use std::os::fd::AsRawFd;

    // fchmod refuses O_PATH descriptors; the way through /proc is bound to the same file.
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    rustix::fs::chmod(path.as_str(), Mode::from_raw_mode(mode & 0o7777))?;
    Ok(())
}

/// Gives what `fd` stands for to another user or group. Quietly nothing where this user namespace lacks that id.
pub(crate) fn chown(fd: BorrowedFd<'_>, user: Option<i64>, group: Option<i64>) -> io::Result<()> {
    // The last number means "leave it" to the kernel.
    let number = |id: i64| u32::try_from(id).ok().filter(|&id| id != u32::MAX);
    let user = user.and_then(number).map(rustix::fs::Uid::from_raw);
    let group = group.and_then(number).map(rustix::fs::Gid::from_raw);
    if user.is_none() && group.is_none() {
        return Ok(());
    }
    match rustix::fs::chownat(fd, c"", user, group, AtFlags::EMPTY_PATH) {
        // EINVAL: not mapped. EPERM: mapped, but this file system or owner is beyond us.
        Err(Errno::INVAL | Errno::PERM) => Ok(()),
        done => Ok(done?),
    }
}
