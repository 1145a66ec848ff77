//! Entering new namespaces as an ordinary user.

use std::io;

use rustix::thread::UnshareFlags;

use crate::mount;

/// Moves the calling, single-threaded process into a user and a mount namespace of its own; its next
/// child becomes the first process of a new pid namespace.
///
/// The user keeps their own id inside, so files and sockets look as they do outside. Until the next
/// `exec` the process holds all capabilities over the new namespaces. Mounts made from here on are
/// seen by nobody else, and disappear with the last process.
pub fn enter_private() -> io::Result<()> {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    let flags = UnshareFlags::NEWUSER | UnshareFlags::NEWNS | UnshareFlags::NEWPID;
    // SAFETY: none of these flags shares or unshares the file descriptor table, the one case that
    // makes `unshare` unsafe.
    unsafe { rustix::thread::unshare_unsafe(flags) }?;
    // The kernel allows a group map only to those who gave up changing their groups.
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/uid_map", identity_map(uid.as_raw()))?;
    std::fs::write("/proc/self/gid_map", identity_map(gid.as_raw()))?;
    mount::keep_to_ourselves()
}

/// One id, mapped onto itself.
fn identity_map(id: u32) -> String {
    format!("{id} {id} 1")
}
