//! chmod and chown by `O_PATH` descriptor.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::{AtFlags, Mode};
use rustix::io::Errno;

/// Changes the mode of `fd`, an `O_PATH` descriptor that is not a symlink.
pub(crate) fn chmod(fd: BorrowedFd<'_>, mode: u32) -> io::Result<()> {
    use std::os::fd::AsRawFd;

    // fchmod rejects O_PATH descriptors; the path below /proc refers to the same file.
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    rustix::fs::chmod(path.as_str(), Mode::from_raw_mode(mode & 0o7777))?;
    Ok(())
}

/// Changes the owner or group of `fd`. Ignores ids that the user namespace does not map.
pub(crate) fn chown(fd: BorrowedFd<'_>, user: Option<i64>, group: Option<i64>) -> io::Result<()> {
    // The kernel takes u32::MAX as "do not change".
    let number = |id: i64| u32::try_from(id).ok().filter(|&id| id != u32::MAX);
    let user = user.and_then(number).map(rustix::fs::Uid::from_raw);
    let group = group.and_then(number).map(rustix::fs::Gid::from_raw);
    if user.is_none() && group.is_none() {
        return Ok(());
    }
    match rustix::fs::chownat(fd, c"", user, group, AtFlags::EMPTY_PATH) {
        // EINVAL: the id is not mapped. EPERM: the file system or the current owner does not allow it.
        Err(Errno::INVAL | Errno::PERM) => Ok(()),
        done => Ok(done?),
    }
}
