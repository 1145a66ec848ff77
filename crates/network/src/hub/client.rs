//! A sandbox's side of the hub.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use linux::packet;
use rustix::net::sockopt::Timeout;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::io::Interest;
use tokio::net::UnixStream;

use super::namespaces::Namespaces;
use super::{Attach, Attached, Request};

/// A place in the pod network, kept until this is dropped.
#[derive(Debug)]
pub struct Place {
    /// The pod's address.
    pub address: IpAddr,
    /// The length of the node's prefix.
    pub prefix: u8,
    /// Where everything else goes.
    pub gateway: IpAddr,
    /// The hub made the interface for this request: it has no address yet, and none of an earlier one is left.
    pub is_new: bool,
    /// It lasts as long as this is open.
    connection: UnixStream,
}

/// How long a hub may take to answer, and the pause before it is asked again: its process may be replaced just now.
const JOIN_TIMEOUT: Duration = Duration::from_secs(10);
const JOIN_RETRY: Duration = Duration::from_millis(100);

/// Joins the user namespace of the hub at `socket`, as its root. The calling process must have a single thread.
pub fn join(socket: &Path) -> io::Result<()> {
    let end = Instant::now() + JOIN_TIMEOUT;
    let namespaces = loop {
        match Namespaces::of_hub(socket) {
            Err(_) if Instant::now() < end => std::thread::sleep(JOIN_RETRY),
            asked => break asked?,
        }
    };
    linux::fresh::join_namespace(namespaces.user())
}

/// Asks the hub for its namespaces. A hub's process hides, so that no other process can open them below `/proc`.
pub(super) fn namespaces(socket: &Path) -> io::Result<Vec<OwnedFd>> {
    let connection = connect(socket)?;
    let timeout = Some(JOIN_TIMEOUT);
    rustix::net::sockopt::set_socket_timeout(&connection, Timeout::Recv, timeout)?;
    let request = serde_json::to_vec(&Request::Namespaces)?;
    packet::send(&connection, 0, &request, &[])?;
    let answer = packet::receive(&connection)?;
    answer
        .map(|answer| answer.descriptors)
        .ok_or_else(|| io::Error::other("the node's hub has ended"))
}

/// Waits until the process that serves at `socket` ends.
pub async fn lost(socket: &Path) -> io::Result<()> {
    let connection = connect_async(socket)?;
    let receive = || packet::receive(&connection);
    while let Ok(Some(_)) = connection.async_io(Interest::READABLE, receive).await {}
    Ok(())
}

/// Whether a hub listens at `socket`: either of its processes does.
pub fn is_there(socket: &Path) -> bool {
    connect(socket).is_ok()
}

impl Place {
    /// Asks the hub at `socket` for a place for a pod's network namespace.
    pub async fn ask(socket: &Path, request: &Attach, namespace: &OwnedFd) -> io::Result<Self> {
        let connection = connect_async(socket)?;
        let text = serde_json::to_vec(&Request::Attach(request.clone()))?;
        connection
            .async_io(Interest::WRITABLE, || {
                packet::send(&connection, 0, &text, &[namespace.as_fd()])
            })
            .await?;
        let answer = connection
            .async_io(Interest::READABLE, || packet::receive(&connection))
            .await?;
        let answer = answer.ok_or_else(|| io::Error::other("the node's hub has ended"))?;
        match serde_json::from_slice(&answer.text)? {
            Attached::Done {
                address,
                prefix,
                gateway,
                is_new,
            } => Ok(Self {
                address,
                prefix,
                gateway,
                is_new,
                connection,
            }),
            Attached::Refused(reason) => Err(io::Error::other(reason)),
        }
    }

    /// Returns when the hub's process has ended. The pod still has its network, but must claim it from the next one.
    pub async fn lost(&self) {
        let receive = || packet::receive(&self.connection);
        while let Ok(Some(_)) = self.connection.async_io(Interest::READABLE, receive).await {}
    }
}

/// Ends the hub at `socket`; it is on its way when this returns.
pub fn end(socket: &Path) -> io::Result<()> {
    let connection = connect(socket)?;
    packet::send(&connection, 0, &serde_json::to_vec(&Request::End)?, &[])
}

fn connect_async(path: &Path) -> io::Result<UnixStream> {
    let connection = connect(path)?;
    rustix::io::ioctl_fionbio(&connection, true)?;
    // A stream by name only: packets keep their boundaries, and we never read it as a stream.
    UnixStream::from_std(connection.into())
}

fn connect(path: &Path) -> io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}
