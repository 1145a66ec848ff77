//! Listeners for [`PacketConnection`]s.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use linux::packet_connection::{PacketConnection, connect};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// More than the pods of a node.
const BACKLOG: i32 = 1024;
/// The delay after a failed accept.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Time-out of the exit of a killed process. A process that exceeds it is blocked in uninterruptible I/O.
const PEER_KILL_TIMEOUT: Timespec = Timespec {
    tv_sec: 2,
    tv_nsec: 0,
};

/// A listener for [`PacketConnection`]s.
#[derive(Debug)]
pub(super) struct PacketListener(AsyncFd<OwnedFd>);

impl PacketListener {
    /// Listens at `path`, and atomically replaces the socket of an earlier process.
    pub(super) fn bind(path: &Path) -> io::Result<Self> {
        Ok(Self(linux::async_fd::register(
            listen(path)?,
            Interest::READABLE,
        )?))
    }

    /// Accepts the next connection. Retries after errors: they are mostly a transient lack of descriptors or memory.
    pub(super) async fn accept(&self) -> PacketConnection {
        loop {
            let accept =
                |socket: &OwnedFd| Ok(rustix::net::accept_with(socket, SocketFlags::CLOEXEC)?);
            let accepted = self.0.async_io(Interest::READABLE, accept).await;
            match accepted.and_then(PacketConnection::new) {
                Ok(connection) => return connection,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_RETRY_INTERVAL).await;
                }
            }
        }
    }
}

/// Listens at `path`. Replaces the socket of an earlier process by a rename, so that clients always find one.
pub(super) fn listen(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let new = path.with_extension("new");
    match std::fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    rustix::net::bind(&socket, &SocketAddrUnix::new(&new)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    std::fs::rename(&new, path)?;
    Ok(socket)
}

/// Kills the process that listens at `socket`, waits for its exit, and returns its pid; `None` if there is none.
pub fn kill_listener(socket: &Path) -> Option<i32> {
    let connection = connect(socket).ok()?;
    let peer = rustix::net::sockopt::socket_peercred(&connection).ok()?;
    // It cannot exit and its pid be reused while it accepts connections.
    let pidfd = pidfd_open(peer.pid, PidfdFlags::empty()).ok()?;
    pidfd_send_signal(&pidfd, Signal::KILL).ok()?;
    // Until it has exited, its successor's clients could still reach it.
    let mut polled = [PollFd::new(&pidfd, PollFlags::IN)];
    let _ = rustix::event::poll(&mut polled, Some(&PEER_KILL_TIMEOUT));
    Some(peer.pid.as_raw_nonzero().get())
}

#[cfg(test)]
mod tests {
    use rustix::process::{Resource, getrlimit, setrlimit};

    use super::*;

    /// Changes the descriptor limit of the process. nextest runs each test in its own process.
    #[tokio::test]
    async fn accept_retries_without_free_descriptors() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hub.sock");
        let listener = PacketListener::bind(&path).unwrap();
        let _client = connect(&path).unwrap();
        let before = getrlimit(Resource::Nofile);
        let next_free = std::os::fd::AsRawFd::as_raw_fd(&std::fs::File::open("/").unwrap());
        let mut none = before;
        none.current = Some(next_free.unsigned_abs().into());
        setrlimit(Resource::Nofile, none).unwrap();
        let accepted = tokio::time::timeout(ACCEPT_RETRY_INTERVAL / 2, listener.accept()).await;
        setrlimit(Resource::Nofile, before).unwrap();
        assert!(accepted.is_err());
        listener.accept().await;
    }

    #[tokio::test]
    async fn new_listener_replaces_the_old_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hub.sock");
        drop(PacketListener::bind(&path).unwrap());
        assert!(connect(&path).is_err());
        let listener = PacketListener::bind(&path).unwrap();
        let client = PacketConnection::connect(&path).unwrap();
        let server = listener.accept().await;
        client.send(7, b"text", &[]).await.unwrap();
        assert!(!server.is_closed());
        let received = server.receive().await.unwrap().unwrap();
        assert_eq!((received.number, &received.text[..]), (7, &b"text"[..]));
        assert!(!server.is_closed());
        drop(client);
        assert!(server.is_closed());
        assert!(server.receive().await.unwrap().is_none());
    }
}
