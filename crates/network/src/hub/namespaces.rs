//! A hub's namespaces, held open by others, so that a new hub finds them when both processes of the old one were killed.
//!
//! The agent holds them. Every sandbox holds the user namespace, and hands it to an agent that comes after a hub had died. No process could find
//! it through `/proc`: hubs and sandboxes hide.

use std::convert::Infallible;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use linux::{fresh, packet};
use rustix::fs::{Mode, OFlags};
use rustix::thread::UnshareFlags;
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};

use super::{client, server};

/// Where a sandbox hands over the namespaces, in the directory of its pod.
const SOCKET: &str = "namespaces.sock";
/// How long a sandbox may take to hand them over, and how long it waits for the question.
const SANDBOX_TIMEOUT: Duration = Duration::from_secs(1);
/// Between attempts of a sandbox to listen: the disk may be full for a while.
const LISTEN_PAUSE: Duration = Duration::from_secs(10);

/// The namespaces of a hub. They last as long as this is held, whether or not the hub runs.
#[derive(Debug)]
pub struct Namespaces {
    user: OwnedFd,
    /// Sandboxes hold none: if it ends with the hub and the agent, so do the interfaces of pods, by which they notice.
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
        let connection = client::connect(socket)?;
        client::namespaces(&connection, client::JOIN_TIMEOUT)
    }

    /// The user namespace of the hub that the sandbox of the pod with this directory joined, if the sandbox runs.
    pub fn of_sandbox(pod_dir: &Path) -> io::Result<Self> {
        let socket = SocketPath::new(pod_dir)?;
        let connection = client::connect(&socket.path)?;
        client::namespaces(&connection, SANDBOX_TIMEOUT)
    }

    /// The user namespace alone.
    pub(super) fn without_network(self) -> Self {
        Self {
            network: None,
            ..self
        }
    }

    /// Hands them to every process that asks in the directory of a pod, until this is dropped.
    pub async fn hand_over(&self, pod_dir: &Path) -> Infallible {
        let listener = loop {
            match listen(pod_dir) {
                Ok(listener) => break listener,
                Err(error) => {
                    tracing::warn!(dir = %pod_dir.display(), %error, "cannot listen for new agents");
                    tokio::time::sleep(LISTEN_PAUSE).await;
                }
            }
        };
        loop {
            let connection = server::next(&listener).await;
            let answered = tokio::time::timeout(SANDBOX_TIMEOUT, self.answer(&connection)).await;
            if let Err(error) = answered.map_err(io::Error::from).flatten() {
                tracing::warn!(%error, "cannot hand over the hub's namespaces");
            }
        }
    }

    /// Waits for a request, which can only be for these, and answers it.
    async fn answer(&self, connection: &UnixStream) -> io::Result<()> {
        let receive = || packet::receive(connection);
        connection.async_io(Interest::READABLE, receive).await?;
        let send = || packet::send(connection, 0, &[], &self.descriptors());
        connection.async_io(Interest::WRITABLE, send).await
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

fn listen(pod_dir: &Path) -> io::Result<UnixListener> {
    let socket = SocketPath::new(pod_dir)?;
    UnixListener::from_std(server::listen(&socket.path)?.into())
}

/// A short path of the socket in a pod's directory: the kernel takes at most 107 bytes, and those of pods may be longer.
struct SocketPath {
    path: PathBuf,
    /// The path leads through it.
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
    async fn a_sandbox_hands_over_what_it_holds() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("long".repeat(30));
        std::fs::create_dir(&dir).unwrap();
        let ask = || {
            let dir = dir.clone();
            tokio::task::spawn_blocking(move || Namespaces::of_sandbox(&dir))
        };
        ask().await.unwrap().unwrap_err();
        let held = Namespaces::own().unwrap().without_network();
        // One that says nothing delays the others, and that is all.
        let silent = async {
            let connection = loop {
                let socket = SocketPath::new(&dir).unwrap();
                match client::connect(&socket.path) {
                    Ok(connection) => break connection,
                    Err(_) => tokio::time::sleep(Duration::from_millis(2)).await,
                }
            };
            tokio::time::sleep(SANDBOX_TIMEOUT / 4).await;
            drop(connection);
            [ask().await.unwrap().unwrap(), ask().await.unwrap().unwrap()]
        };
        let received = tokio::select! {
            never = held.hand_over(&dir) => match never {},
            received = silent => received,
        };
        for received in &received {
            assert_eq!(identity(received.user()), identity(held.user()));
            assert_eq!(received.descriptors().len(), 1);
        }
    }
}
