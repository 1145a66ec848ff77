//! Readiness of descriptors for which tokio has no type of its own: packet sockets, pidfds, TUN devices.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::unix::AsyncFd;

/// Registers a descriptor with tokio's reactor. It must be non-blocking, unless it is only polled, such as a pidfd.
pub fn register(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open, and refers to the same descriptor, until it is dropped, and `AsyncFd` deregisters it first.
    Ok(unsafe { AsyncFd::register(descriptor) }?)
}
