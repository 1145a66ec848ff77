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
    /// Those of the calling process.
    pub(super) fn own() -> io::Result<Self> {
        Ok(Self {
            user: linux::namespace::own_user_namespace()?,
            network: Some(linux::namespace::own_network()?),
        })
    }

    /// Those of the hub that listens at `socket`.
    pub fn of_hub(socket: &Path) -> io::Result<Self> {
        let descriptors = client::namespaces(socket)?;
        Self::from_descriptors(descriptors)
            .ok_or_else(|| io::Error::other("the node's hub sent no namespaces"))
    }

    /// The user namespace of the hub that a sandbox joined, found through one of its containers: the sandbox itself hides.
    pub fn of_sandbox(sandbox: i32) -> io::Result<Self> {
        let table = linux::usage::Table::read()?;
        let below = table.tree(vec![sandbox]);
        let opened = below
            .into_iter()
            .find_map(|process| fresh::namespace_of(process, "user").ok());
        let container = opened.ok_or_else(|| io::Error::other("no container of the pod runs"))?;
        Ok(Self {
            user: linux::namespace::child_of_own(container)?,
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
