//! The hub's process inside the namespaces. It keeps them alive and opens sockets in them; all logic is outside.
//!
//! A socket belongs to the network namespace in which it was opened, whichever process uses it, and the user who created a user
//! namespace has all capabilities in it. So the process outside configures interfaces and serves pods through descriptors from
//! here. It may crash or be replaced: descriptors that it stored here ([`InsideRequest::Store`]) keep their kernel objects, and
//! the packets queued in them, for its successor.
//!
//! One thread and no event loop, because only a process with a single thread can enter a user namespace.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use linux::packet::{self, Packet};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{AddressFamily, Protocol, SocketFlags, SocketType};
use rustix::thread::UnshareFlags;
use serde::{Deserialize, Serialize};

use super::namespaces::HubNamespaces;
use super::packet_listener;

/// A request to the process inside. Responses carry an [`InsideResponse`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum InsideRequest {
    /// Returns the descriptors of [`HubNamespaces`].
    Namespaces,
    /// Opens a socket: the arguments of `socket(2)`.
    Socket {
        domain: u16,
        kind: u32,
        protocol: u32,
    },
    /// Stores the descriptors of this packet under a name; without descriptors, removes those stored before.
    Store { name: String },
    /// Returns the descriptors that are stored under a name, if there are any.
    Stored { name: String },
    /// The node shuts down.
    ShutDown,
}

/// The text of a response.
pub(super) type InsideResponse = Result<(), String>;

/// The namespaces with the process that holds them open.
pub struct Inside {
    namespaces: HubNamespaces,
    stored: HashMap<String, Vec<OwnedFd>>,
}

/// Whether to continue after a request.
#[derive(PartialEq, Eq)]
enum Next {
    Serve,
    ShutDown,
}

impl Inside {
    /// Moves the calling process, which must have a single thread, into the namespaces of the node's pods: those of an earlier
    /// process, which may still have pods, or new ones. If the previous ones cannot be entered, pods lose their network, and
    /// their sandboxes restart them.
    pub fn enter(previous: Option<HubNamespaces>) -> io::Result<Self> {
        match previous.map(|previous| previous.enter()) {
            Some(Ok(())) => {}
            entered => {
                if let Some(Err(error)) = entered {
                    tracing::warn!(%error, "cannot enter the namespaces of the previous hub");
                }
                linux::namespace::enter_as_root(UnshareFlags::NEWNET)?;
            }
        }
        // The root directory of this process is the host's, and containers with hostPID may have all capabilities in this user
        // namespace: they must not reach it below /proc.
        linux::credentials::set_non_dumpable()?;
        configure_forwarding();
        Ok(Self {
            namespaces: HubNamespaces::own()?,
            stored: HashMap::new(),
        })
    }

    /// Serves the hub's processes outside at `socket` until one of them requests the shutdown. Whenever there was no request for
    /// `idle_interval`, calls `is_abandoned`, and returns if it returns true.
    pub fn serve(
        mut self,
        socket: &Path,
        idle_interval: Duration,
        mut is_abandoned: impl FnMut() -> bool,
    ) -> io::Result<()> {
        let listener = packet_listener::listen(socket)?;
        let mut connections: Vec<OwnedFd> = Vec::new();
        loop {
            let ready = poll(&listener, &connections, idle_interval)?;
            if ready.is_empty() && is_abandoned() {
                return Ok(());
            }
            let mut closed = Vec::new();
            for index in ready {
                // The listener comes after the connections, so that it does not change their indexes.
                let Some(connection) = connections.get(index) else {
                    if let Ok(accepted) = rustix::net::accept_with(&listener, SocketFlags::CLOEXEC)
                    {
                        connections.push(accepted);
                    }
                    continue;
                };
                match packet::receive(connection) {
                    Ok(Some(request)) => match self.respond(connection.as_fd(), request) {
                        Ok(Next::Serve) => {}
                        Ok(Next::ShutDown) => return Ok(()),
                        Err(error) => {
                            tracing::warn!(%error, "cannot respond to the hub's process outside");
                            closed.push(index);
                        }
                    },
                    Ok(None) | Err(_) => closed.push(index),
                }
            }
            for index in closed.into_iter().rev() {
                connections.remove(index);
            }
        }
    }

    fn respond(&mut self, connection: BorrowedFd<'_>, request: Packet) -> io::Result<Next> {
        let number = request.number;
        let opened;
        let (response, descriptors): (InsideResponse, Vec<BorrowedFd<'_>>) =
            match serde_json::from_slice(&request.text)? {
                InsideRequest::Namespaces => (Ok(()), self.namespaces.descriptors()),
                InsideRequest::Socket {
                    domain,
                    kind,
                    protocol,
                } => match open_socket(domain, kind, protocol) {
                    Ok(socket) => {
                        opened = socket;
                        (Ok(()), vec![opened.as_fd()])
                    }
                    Err(error) => (Err(error.to_string()), vec![]),
                },
                InsideRequest::Store { .. } if !request.is_complete => {
                    (Err("no free descriptors".to_owned()), vec![])
                }
                InsideRequest::Store { name } => {
                    if request.descriptors.is_empty() {
                        self.stored.remove(&name);
                    } else {
                        self.stored.insert(name, request.descriptors);
                    }
                    (Ok(()), vec![])
                }
                InsideRequest::Stored { name } => {
                    let stored = self.stored.get(&name).into_iter().flatten();
                    (Ok(()), stored.map(AsFd::as_fd).collect())
                }
                InsideRequest::ShutDown => return Ok(Next::ShutDown),
            };
        let response = serde_json::to_vec(&response)?;
        packet::send(connection, number, &response, &descriptors)?;
        Ok(Next::Serve)
    }
}

/// Waits for connections or requests. Returns the indexes of the ready descriptors, where the listener comes last.
fn poll(listener: &OwnedFd, connections: &[OwnedFd], timeout: Duration) -> io::Result<Vec<usize>> {
    let mut polled: Vec<_> = connections
        .iter()
        .chain([listener])
        .map(|descriptor| PollFd::new(descriptor, PollFlags::IN))
        .collect();
    let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
    match rustix::event::poll(&mut polled, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    let ready = polled.iter().enumerate();
    Ok(ready
        .filter(|(_, polled)| !polled.revents().is_empty())
        .map(|(index, _)| index)
        .collect())
}

fn open_socket(domain: u16, kind: u32, protocol: u32) -> io::Result<OwnedFd> {
    let protocol = std::num::NonZeroU32::new(protocol).map(Protocol::from_raw);
    Ok(rustix::net::socket_with(
        AddressFamily::from_raw(domain),
        SocketType::from_raw(kind),
        SocketFlags::CLOEXEC,
        protocol,
    )?)
}

/// Forwards packets between interfaces. A packet from a pod must have the pod's own source address (strict reverse path filter);
/// only interfaces that exist later get the default value.
fn configure_forwarding() {
    let settings = [
        ("ip_forward", "1"),
        ("conf/all/rp_filter", "0"),
        ("conf/default/rp_filter", "1"),
    ];
    for (name, value) in settings {
        let path = format!("/proc/sys/net/ipv4/{name}");
        if let Err(error) = std::fs::write(&path, value) {
            tracing::warn!(path, %error, "cannot configure the pod network");
        }
    }
}
