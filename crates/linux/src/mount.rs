//! Mounts and mount propagation in the mount namespace of this process.

use std::ffi::CString;
use std::io;
use std::path::Path;

use rustix::mount::{MountFlags, MountPropagationFlags};

/// Makes all mounts private: no mount propagates between this namespace and the one it was copied from.
pub fn make_all_private() -> io::Result<()> {
    let flags = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", flags)?;
    Ok(())
}

/// Makes all mounts slaves: new mounts propagate from the namespace that this one was copied from, but not back.
pub fn make_all_slave() -> io::Result<()> {
    let flags = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", flags)?;
    Ok(())
}

/// Mounts an empty tmpfs on `target`, accessible to its owner only.
pub fn tmpfs(target: &Path, max_bytes: u64) -> io::Result<()> {
    let options = CString::new(format!("mode=0700,size={max_bytes}"))?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    rustix::mount::mount("tmpfs", target, "tmpfs", flags, options.as_c_str())?;
    Ok(())
}

/// Lazily unmounts `target` and everything below it; processes that use it keep access.
pub fn detach(target: &Path) -> io::Result<()> {
    rustix::mount::unmount(target, rustix::mount::UnmountFlags::DETACH)?;
    Ok(())
}

/// Lets other users traverse a directory to known paths below it, without permission to list it.
pub fn allow_traversal(dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o711))
}

/// Mounts a tmpfs for `/dev/shm`, with the usual mode and flags, and the default size of container runtimes (64 MiB).
pub fn shm(target: &Path) -> io::Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    let options = c"mode=1777,size=65536k";
    rustix::mount::mount("shm", target, "tmpfs", flags, options)?;
    Ok(())
}

/// Bind-mounts the directory `source` on `target`, without the mounts below it.
pub fn bind(source: &Path, target: &Path) -> io::Result<()> {
    rustix::mount::mount_bind(source, target)?;
    Ok(())
}
