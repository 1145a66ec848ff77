//! Changing what a descriptor stands for.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::{AtFlags, Mode};
use rustix::io::Errno;

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
