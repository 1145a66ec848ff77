//! Clients of the hub: sandboxes and the node's agent.

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

use super::namespaces::HubNamespaces;
use super::{AttachRequest, AttachResponse, HubRequest};

/// A pod's attachment to the pod network, held until this is dropped.
#[derive(Debug)]
pub struct HubAttachment {
    /// The pod's address.
    pub address: IpAddr,
    /// The length of the node's prefix.
    pub prefix: u8,
    /// The default gateway.
    pub gateway: IpAddr,
    /// The hub created the interface for this request: it has no address yet.
    pub is_new: bool,
    /// The attachment ends when this is closed.
    connection: UnixStream,
}

/// Timeout for the hub's response, including retries while its process is being replaced.
pub(super) const JOIN_TIMEOUT: Duration = Duration::from_secs(10);
const JOIN_RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Joins the user namespace of the hub at `socket`, as its root. The calling process must have a single thread. Returns that
/// namespace, to be [handed over](HubNamespaces::hand_over) to other processes.
pub fn join_user_namespace(socket: &Path) -> io::Result<HubNamespaces> {
    let deadline = Instant::now() + JOIN_TIMEOUT;
    let namespaces = loop {
        match HubNamespaces::of_hub(socket) {
            Err(_) if Instant::now() < deadline => std::thread::sleep(JOIN_RETRY_INTERVAL),
            received => break received?,
        }
    };
    linux::fresh::join_user(namespaces.user())?;
    Ok(namespaces.without_network())
}

/// Requests the hub's namespaces from the peer, a hub or one of its sandboxes. They cannot be opened below `/proc`, because
/// neither process is dumpable.
pub(super) fn namespaces(connection: &OwnedFd, timeout: Duration) -> io::Result<HubNamespaces> {
    rustix::net::sockopt::set_socket_timeout(connection, Timeout::Recv, Some(timeout))?;
    let request = serde_json::to_vec(&HubRequest::Namespaces)?;
    packet::send(connection, 0, &request, &[])?;
    let response = packet::receive(connection)?;
    let response = response.ok_or_else(|| io::Error::other("the node's hub has exited"))?;
    HubNamespaces::from_descriptors(response.descriptors)
        .ok_or_else(|| io::Error::other("the node's hub sent no namespaces"))
}

/// Waits until the process that serves at `socket` exits.
pub async fn wait_for_exit(socket: &Path) -> io::Result<()> {
    let connection = connect_async(socket)?;
    let receive = || packet::receive(&connection);
    while let Ok(Some(_)) = connection.async_io(Interest::READABLE, receive).await {}
    Ok(())
}

/// Whether a hub's process listens at `socket`.
pub fn is_listening(socket: &Path) -> bool {
    connect(socket).is_ok()
}

impl HubAttachment {
    /// Requests an address and an interface for a pod's network namespace from the hub at `socket`.
    pub async fn request(
        socket: &Path,
        request: &AttachRequest,
        namespace: &OwnedFd,
    ) -> io::Result<Self> {
        let connection = connect_async(socket)?;
        let text = serde_json::to_vec(&HubRequest::Attach(request.clone()))?;
        connection
            .async_io(Interest::WRITABLE, || {
                packet::send(&connection, 0, &text, &[namespace.as_fd()])
            })
            .await?;
        let response = connection
            .async_io(Interest::READABLE, || packet::receive(&connection))
            .await?;
        let response = response.ok_or_else(|| io::Error::other("the node's hub has exited"))?;
        match serde_json::from_slice(&response.text)? {
            AttachResponse::Attached {
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
            AttachResponse::Failed(reason) => Err(io::Error::other(reason)),
        }
    }

    /// Returns when the hub's process has exited. The pod keeps its network, but must claim it from the next process.
    pub async fn hub_exited(&self) {
        let receive = || packet::receive(&self.connection);
        while let Ok(Some(_)) = self.connection.async_io(Interest::READABLE, receive).await {}
    }
}

/// Requests the shutdown of the hub at `socket`, without waiting for it.
pub fn shut_down(socket: &Path) -> io::Result<()> {
    let connection = connect(socket)?;
    packet::send(
        &connection,
        0,
        &serde_json::to_vec(&HubRequest::ShutDown)?,
        &[],
    )
}

fn connect_async(path: &Path) -> io::Result<UnixStream> {
    let connection = connect(path)?;
    rustix::io::ioctl_fionbio(&connection, true)?;
    // tokio has no SEQPACKET type. `UnixStream` only provides readiness; `packet` reads and writes.
    UnixStream::from_std(connection.into())
}

pub(super) fn connect(path: &Path) -> io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}
