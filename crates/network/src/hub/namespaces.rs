//! A hub's namespaces, held open by others, so that a new hub finds them when both processes of the old one were killed.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use linux::fresh;
use rustix::thread::UnshareFlags;

use super::client;

/// The namespaces of a hub. They last as long as this is held, whether or not the hub runs.
#[derive(Debug)]
pub struct Namespaces {
    user: OwnedFd,
    /// Unknown if they were found through a sandbox.
    network: Option<OwnedFd>,
}

impl Namespaces {
    /// Those of the hub that listens at `socket`.
    pub fn of_hub(socket: &Path) -> io::Result<Self> {
        let hub = client::process_id(socket)?.as_raw_nonzero().get();
        let namespaces = Self {
            user: fresh::namespace_of(hub, "user")?,
            network: Some(fresh::namespace_of(hub, "net")?),
        };
        // If it had died meanwhile, its number could be another process's.
        let still = client::process_id(socket)?.as_raw_nonzero().get();
        if still != hub {
            return Err(io::Error::other("the hub was just replaced"));
        }
        Ok(namespaces)
    }

    /// The user namespace of a sandbox's process, which is the one of the hub that it joined.
    pub fn of_sandbox(process: i32) -> io::Result<Self> {
        Ok(Self {
            user: fresh::namespace_of(process, "user")?,
            network: None,
        })
    }

    /// The user namespace.
    pub fn user(&self) -> BorrowedFd<'_> {
        self.user.as_fd()
    }

    /// As descriptors, to be sent to a new hub.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let network = self.network.as_ref().map(AsFd::as_fd);
        std::iter::once(self.user.as_fd()).chain(network).collect()
    }

    /// What [`Namespaces::descriptors`] were; `None` if there is none.
    pub fn from_descriptors(descriptors: Vec<OwnedFd>) -> Option<Self> {
        let mut descriptors = descriptors.into_iter();
        Some(Self {
            user: descriptors.next()?,
            network: descriptors.next(),
        })
    }

    /// Moves the calling process, which must have a single thread, into them. A network namespace that can't be entered is replaced.
    pub(super) fn enter(&self) -> io::Result<()> {
        fresh::join_namespace(&self.user)?;
        let joined = self.network.as_ref().map(fresh::join_namespace);
        match joined {
            Some(Ok(())) => Ok(()),
            Some(Err(_)) | None => linux::namespace::unshare(UnshareFlags::NEWNET),
        }
    }
}
