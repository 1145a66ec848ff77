//! Asynchronous SOCK_SEQPACKET sockets, which carry [`packet`]s.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::net::{AddressFamily, RecvFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::async_fd;
use crate::packet::{self, Packet};

/// A connection that carries packets.
#[derive(Debug)]
pub struct PacketConnection(AsyncFd<OwnedFd>);

impl PacketConnection {
    /// Takes a connected SOCK_SEQPACKET socket.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        let interest = Interest::READABLE | Interest::WRITABLE;
        Ok(Self(async_fd::register(socket, interest)?))
    }

    /// Connects to the listener at `path`.
    pub fn connect(path: &Path) -> io::Result<Self> {
        Self::new(connect(path)?)
    }

    /// Sends one packet.
    pub async fn send(
        &self,
        number: u64,
        text: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let send = |socket: &OwnedFd| packet::send(socket, number, text, descriptors);
        self.0.async_io(Interest::WRITABLE, send).await
    }

    /// Sends one packet now, or fails if the socket's buffer is full.
    pub fn try_send(&self, number: u64, text: &[u8]) -> io::Result<()> {
        packet::send(self.0.get_ref(), number, text, &[])
    }

    /// Receives the next packet; `None` when the peer has closed.
    pub async fn receive(&self) -> io::Result<Option<Packet>> {
        let receive = |socket: &OwnedFd| packet::receive(socket);
        self.0.async_io(Interest::READABLE, receive).await
    }

    /// Sends a request and receives its response. If this future is dropped earlier, the next request gets the response to this one.
    pub async fn request(&self, text: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<Packet> {
        self.send(0, text, descriptors).await?;
        let response = self.receive().await?;
        response.ok_or_else(|| io::Error::from(io::ErrorKind::ConnectionReset))
    }

    /// Closes the sending side: the peer receives the end.
    pub fn shut_down(&self) -> io::Result<()> {
        Ok(rustix::net::shutdown(self.0.get_ref(), Shutdown::Write)?)
    }

    /// Whether the peer has closed, and all of its packets were received.
    pub fn is_closed(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let peeked = rustix::net::recv(self.0.get_ref(), &mut [0u8; 1][..], flags);
        peeked.is_ok_and(|(length, _)| length == 0)
    }

    /// Discards packets until the peer closes.
    pub async fn wait_for_close(&self) {
        while let Ok(Some(_)) = self.receive().await {}
    }
}

/// Connects to the listener at `path`, and returns a blocking socket. Fails with `WouldBlock` if the listener has hung for so long that
/// its backlog is full: a blocking connect would wait without a bound.
pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::io::ioctl_fionbio(&socket, false)?;
    Ok(socket)
}
