//! tmpfs file systems for volumes.

use std::ffi::CString;
use std::io;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags};
use rustix::mount::{MountFlags, UnmountFlags};

/// Mounts an empty tmpfs on `target`, whose root directory has the permission bits `mode`.
///
/// Without `max_bytes` the kernel's default limit applies: half of the machine's memory.
pub fn mount(target: &Path, max_bytes: Option<u64>, mode: u32) -> io::Result<()> {
    let size = max_bytes.map_or_else(String::new, |bytes| format!(",size={bytes}"));
    let options = CString::new(format!("mode={mode:04o}{size}"))?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    rustix::mount::mount("tmpfs", target, "tmpfs", flags, options.as_c_str())?;
    Ok(())
}

/// Whether something is mounted at `path` itself.
pub fn is_mount_point(path: &Path) -> io::Result<bool> {
    let status = rustix::fs::statx(
        CWD,
        path,
        AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT,
        StatxFlags::empty(),
    )?;
    Ok(status.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

/// Lazily unmounts `target`: processes that use it keep access, others no longer see it.
pub fn unmount(target: &Path) -> io::Result<()> {
    rustix::mount::unmount(target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?;
    Ok(())
}
