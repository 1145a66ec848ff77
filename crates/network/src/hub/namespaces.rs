//! Descriptors of a hub's namespaces. The agent holds them, so that a new hub can enter them after both processes of the old
//! one were killed.
//!
//! Every sandbox holds the user namespace open, and serves it to an agent that starts after the hub has died. The agent cannot
//! find it in `/proc`, because hubs and sandboxes are not dumpable.

use std::convert::Infallible;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use linux::packet_connection::{PacketConnection, connect};
use linux::setns;
use rustix::fs::{Mode, OFlags};
use rustix::thread::UnshareFlags;

use super::client;
use super::packet_listener::PacketListener;

/// The socket in a pod's directory at which the sandbox serves the namespaces.
const SOCKET: &str = "namespaces.sock";
/// Timeout for one exchange with a sandbox, on both sides.
const SANDBOX_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval between attempts of a sandbox to listen, because the disk may be full temporarily.
const LISTEN_RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// The namespaces of a hub. The open descriptors keep them alive after the hub has exited.
#[derive(Debug)]
pub struct HubNamespaces {
    user: OwnedFd,
    /// `None` in a sandbox. After hub and agent have exited, the kernel destroys this namespace and the interfaces of the pods,
    /// which their sandboxes detect.
    network: Option<OwnedFd>,
}

impl HubNamespaces {
    /// The namespaces of the calling process.
    pub(super) fn own() -> io::Result<Self> {
        Ok(Self {
            user: linux::namespace::own_user_namespace()?,
            network: Some(linux::namespace::own_network_namespace()?),
        })
    }

    /// Requests the namespaces from the hub that listens at `socket`. Fails with `WouldBlock` if it does not respond within `timeout`.
    pub fn of_hub(socket: &Path, timeout: Duration) -> io::Result<Self> {
        let connection = connect(socket)?;
        client::request_namespaces(&connection, timeout)
    }

    /// Requests the hub's user namespace from the running sandbox of the pod with this directory.
    pub fn of_sandbox(pod_dir: &Path) -> io::Result<Self> {
        let socket = SocketPath::new(pod_dir)?;
        let connection = connect(&socket.path)?;
        client::request_namespaces(&connection, SANDBOX_TIMEOUT)
    }

    /// The user namespace alone.
    pub(super) fn without_network(self) -> Self {
        Self {
            network: None,
            ..self
        }
    }

    /// Serves the descriptors at a socket in the directory of a pod until the future is dropped.
    pub async fn serve(&self, pod_dir: &Path) -> Infallible {
        let listener = loop {
            match listen(pod_dir) {
                Ok(listener) => break listener,
                Err(error) => {
                    tracing::warn!(dir = %pod_dir.display(), %error, "cannot listen for requests of new agents");
                    tokio::time::sleep(LISTEN_RETRY_INTERVAL).await;
                }
            }
        };
        loop {
            let connection = listener.accept().await;
            let sent = tokio::time::timeout(SANDBOX_TIMEOUT, self.respond(&connection)).await;
            if let Err(error) = sent.map_err(io::Error::from).flatten() {
                tracing::warn!(%error, "cannot send the hub's namespaces");
            }
        }
    }

    /// Waits for a request and responds to it. All requests at this socket are for the namespaces.
    async fn respond(&self, connection: &PacketConnection) -> io::Result<()> {
        connection.receive().await?;
        connection.send(0, &[], &self.descriptors()).await
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
        setns::join_namespace(&self.user)?;
        let joined = self.network.as_ref().map(setns::join_namespace);
        match joined {
            Some(Ok(())) => Ok(()),
            Some(Err(_)) | None => linux::namespace::unshare(UnshareFlags::NEWNET),
        }
    }
}

fn listen(pod_dir: &Path) -> io::Result<PacketListener> {
    PacketListener::bind(&SocketPath::new(pod_dir)?.path)
}

/// A short path of the socket in a pod's directory: the kernel limits socket paths to 107 bytes, and the paths of pod directories
/// may be longer.
struct SocketPath {
    path: PathBuf,
    /// The path refers to this descriptor.
    _dir: OwnedFd,
}

impl SocketPath {
    fn new(pod_dir: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(pod_dir, flags, Mode::empty())?;
        let path = format!("/proc/self/fd/{}/{SOCKET}", dir.as_raw_fd());
        Ok(Self {
            path: path.into(),
            _dir: dir,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(namespace: BorrowedFd<'_>) -> u64 {
        rustix::fs::fstat(namespace).unwrap().st_ino
    }

    #[tokio::test]
    async fn sandbox_serves_its_user_namespace() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("long".repeat(30));
        std::fs::create_dir(&dir).unwrap();
        let request = || {
            let dir = dir.clone();
            tokio::task::spawn_blocking(move || HubNamespaces::of_sandbox(&dir))
        };
        request().await.unwrap().unwrap_err();
        let held = HubNamespaces::own().unwrap().without_network();
        // A client that sends no request only delays the others.
        let requests = async {
            let connection = loop {
                let socket = SocketPath::new(&dir).unwrap();
                match connect(&socket.path) {
                    Ok(connection) => break connection,
                    Err(_) => tokio::time::sleep(Duration::from_millis(2)).await,
                }
            };
            tokio::time::sleep(SANDBOX_TIMEOUT / 4).await;
            drop(connection);
            [
                request().await.unwrap().unwrap(),
                request().await.unwrap().unwrap(),
            ]
        };
        let received = tokio::select! {
            never = held.serve(&dir) => match never {},
            received = requests => received,
        };
        for received in &received {
            assert_eq!(identity(received.user()), identity(held.user()));
            assert_eq!(received.descriptors().len(), 1);
        }
    }
}
