//! Descriptors of a hub's namespaces. The agent holds them, so that a new hub can enter them after both processes of the old
//! one were killed.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use linux::fresh;
use rustix::thread::UnshareFlags;

use super::client;

/// The namespaces of a hub. They exist as long as this is held, also without the hub.
#[derive(Debug)]
pub struct HubNamespaces {
    user: OwnedFd,
    /// `None` if they were found through a sandbox.
    network: Option<OwnedFd>,
}

impl HubNamespaces {
    /// The namespaces of the calling process.
    pub(super) fn own() -> io::Result<Self> {
        Ok(Self {
            user: linux::namespace::own_user_namespace()?,
            network: Some(linux::namespace::own_network()?),
        })
    }

    /// The namespaces of the hub that listens at `socket`.
    pub fn of_hub(socket: &Path) -> io::Result<Self> {
        let descriptors = client::namespaces(socket)?;
        Self::from_descriptors(descriptors)
            .ok_or_else(|| io::Error::other("the node's hub sent no namespaces"))
    }

    /// The user namespace of a sandbox's hub, found through one of the sandbox's containers: the sandbox itself is not
    /// dumpable.
    pub fn of_sandbox(sandbox: i32) -> io::Result<Self> {
        let table = linux::usage::Table::read()?;
        let below = table.tree(vec![sandbox]);
        let opened = below
            .into_iter()
            .find_map(|process| fresh::namespace_of(process, "user").ok());
        let container =
            opened.ok_or_else(|| io::Error::other("no running container in the pod"))?;
        Ok(Self {
            user: linux::namespace::child_of_own(container)?,
            network: None,
        })
    }

    /// The user namespace.
    pub fn user(&self) -> BorrowedFd<'_> {
        self.user.as_fd()
    }

    /// The descriptors, to send to a new hub.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let network = self.network.as_ref().map(AsFd::as_fd);
        std::iter::once(self.user.as_fd()).chain(network).collect()
    }

    /// The inverse of [`HubNamespaces::descriptors`]; `None` without descriptors.
    pub fn from_descriptors(descriptors: Vec<OwnedFd>) -> Option<Self> {
        let mut descriptors = descriptors.into_iter();
        Some(Self {
            user: descriptors.next()?,
            network: descriptors.next(),
        })
    }

    /// Moves the calling process, which must have a single thread, into the namespaces. Creates a new network namespace if the
    /// old one cannot be entered.
    pub(super) fn enter(&self) -> io::Result<()> {
        fresh::join_namespace(&self.user)?;
        let joined = self.network.as_ref().map(fresh::join_namespace);
        match joined {
            Some(Ok(())) => Ok(()),
            Some(Err(_)) | None => linux::namespace::unshare(UnshareFlags::NEWNET),
        }
    }
}
