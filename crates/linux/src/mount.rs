//! Mounts inside a mount namespace of our own.

use std::ffi::CString;
use std::io;
use std::path::Path;

use rustix::mount::{MountFlags, MountPropagationFlags};

/// Stops mounts from travelling between this namespace and the one it was copied from.
pub fn keep_to_ourselves() -> io::Result<()> {
    let flags = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", flags)?;
    Ok(())
}

/// Lets mounts of the namespace that this one was copied from come in, and none go out.
pub fn follow_outside() -> io::Result<()> {
    let flags = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", flags)?;
    Ok(())
}

/// Mounts a new, empty file system in memory on `target`, open to its owner only.
pub fn tmpfs(target: &Path, max_bytes: u64) -> io::Result<()> {
    let options = CString::new(format!("mode=0700,size={max_bytes}"))?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    rustix::mount::mount("tmpfs", target, "tmpfs", flags, options.as_c_str())?;
    Ok(())
}

/// Takes away what is mounted on `target`, and all below it; who still uses it may go on.
pub fn detach(target: &Path) -> io::Result<()> {
    rustix::mount::unmount(target, rustix::mount::UnmountFlags::DETACH)?;
    Ok(())
}

/// Lets others pass through a directory to what they know below it, without showing them what is there.
pub fn passable(dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o711))
}

/// Mounts memory for everybody to share, as `/dev/shm` is.
pub fn shared_memory(target: &Path) -> io::Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    let options = c"mode=1777,size=65536k";
    rustix::mount::mount("shm", target, "tmpfs", flags, options)?;
    Ok(())
}

/// Makes the directory `source` visible at `target` too, without what is mounted below it.
pub fn bind(source: &Path, target: &Path) -> io::Result<()> {
    rustix::mount::mount_bind(source, target)?;
    Ok(())
}
