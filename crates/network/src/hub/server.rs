//! The hub's process: its namespaces, its bridge, and the socket for sandboxes.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fs::{File, TryLockError};
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use linux::packet;
use linux::route::{Prefixed, Route};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::thread::UnshareFlags;
use thiserror::Error;
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Notify;

use super::address_pool::{AddressPool, PodCidr};
use super::namespaces::HubNamespaces;
use super::{AttachRequest, AttachResponse, HubRequest, INTERFACE};

const BRIDGE: &str = "pods";
/// More than the pods of a node.
const BACKLOG: i32 = 1024;
/// The delay after a failed accept.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// The hub cannot be set up.
#[derive(Debug, Error)]
pub enum HubError {
    /// The host does not allow user and network namespaces.
    #[error("cannot create a user and network namespace (see `coracle doctor`): {0}")]
    Namespaces(#[source] io::Error),
    /// The bridge cannot be set up.
    #[error("cannot set up the node's pod network {cidr}: {source}")]
    Network {
        /// The node's pod CIDR.
        cidr: PodCidr,
        /// The error.
        source: io::Error,
    },
    /// Another hub of this node holds the lock.
    #[error("another hub of this node is running: {path} is locked")]
    Running {
        /// The lock file.
        path: String,
    },
    /// The socket cannot be created.
    #[error("cannot listen on {path}: {source}")]
    Socket {
        /// The socket or lock file.
        path: String,
        /// The error.
        source: io::Error,
    },
}

/// A hub with its namespaces, bridge and socket.
pub struct Hub {
    socket: PathBuf,
    listener: OwnedFd,
    cidr: PodCidr,
    /// Sandboxes join these, and the agent holds them open.
    namespaces: Rc<HubNamespaces>,
    /// Held by all processes of the hub.
    _lock: File,
}

impl Hub {
    /// Moves the calling process, which must have a single thread, into the node's namespaces and sets up the network.
    /// `previous` are the namespaces of a dead hub, which may still have pods.
    pub fn set_up(
        cidr: PodCidr,
        socket: &Path,
        previous: Option<HubNamespaces>,
    ) -> Result<Self, HubError> {
        let lock = lock(socket)?;
        enter(previous).map_err(HubError::Namespaces)?;
        // The hub's root directory is the host's, and containers with hostPID may have all capabilities in this user
        // namespace: they must not reach it below /proc.
        linux::credentials::hide().map_err(HubError::Namespaces)?;
        let namespaces = HubNamespaces::own().map_err(HubError::Namespaces)?;
        make_bridge(cidr).map_err(|source| HubError::Network { cidr, source })?;
        // Last, because clients join the namespaces of the listening process. The socket is in the host's mount namespace,
        // and the permissions of its directory protect it.
        let listener = listen(socket).map_err(|source| HubError::Socket {
            path: socket.display().to_string(),
            source,
        })?;
        Ok(Self {
            socket: socket.to_owned(),
            listener,
            cidr,
            namespaces: Rc::new(namespaces),
            _lock: lock,
        })
    }

    /// Creates a new listener in this process: the previous one belonged to a dead process.
    pub fn listen_again(&mut self) -> io::Result<()> {
        self.listener = listen(&self.socket)?;
        Ok(())
    }

    /// Serves sandboxes until a shutdown request. Must be called within a `LocalSet`.
    pub async fn serve(&self) -> io::Result<()> {
        let attachments = Rc::new(Attachments::find(self.cidr, self.namespaces.clone())?);
        // tokio has no SEQPACKET type. `UnixStream` only provides readiness; `packet` reads and writes.
        let listener = UnixListener::from_std(self.listener.try_clone()?.into())?;
        loop {
            let accepted = tokio::select! {
                accepted = next(&listener) => accepted,
                () = attachments.shutdown.notified() => return Ok(()),
            };
            let attachments = attachments.clone();
            tokio::task::spawn_local(async move {
                if let Err(error) = attachments.handle(accepted).await {
                    tracing::warn!(%error, "connection of a sandbox failed");
                }
            });
        }
    }
}

/// The pods that are attached to the bridge.
struct Attachments {
    route: Route,
    namespaces: Rc<HubNamespaces>,
    cidr: PodCidr,
    addresses: RefCell<AddressPool>,
    /// Addresses with an interface of an earlier process, whose sandboxes have not reconnected yet.
    unclaimed: RefCell<HashSet<Ipv4Addr>>,
    /// Notified by a shutdown request.
    shutdown: Notify,
}

impl Attachments {
    /// Finds the attachments that an earlier process made in this network namespace.
    fn find(cidr: PodCidr, namespaces: Rc<HubNamespaces>) -> io::Result<Self> {
        let route = Route::open()?;
        let mut addresses = AddressPool::new(cidr);
        let existing: HashSet<_> = cidr
            .usable()
            .filter(|address| route.has(&interface(*address)))
            .collect();
        for address in &existing {
            addresses.allocate(Some(*address));
        }
        Ok(Self {
            route,
            namespaces,
            cidr,
            addresses: RefCell::new(addresses),
            unclaimed: RefCell::new(existing),
            shutdown: Notify::new(),
        })
    }

    /// Releases the addresses of sandboxes that died while no process served: the kernel removed their interfaces with their
    /// network namespaces. A sandbox whose interface exists may only be stopped, and will claim its address later.
    fn release_unclaimed(&self) {
        let mut unclaimed = self.unclaimed.borrow_mut();
        unclaimed.retain(|address| {
            let exists = self.route.has(&interface(*address));
            if !exists {
                self.addresses.borrow_mut().release(*address);
            }
            exists
        });
    }

    /// Handles one connection. An attachment is held until the sandbox closes the connection.
    async fn handle(&self, connection: UnixStream) -> io::Result<()> {
        let receive = || connection.async_io(Interest::READABLE, || packet::receive(&connection));
        // A liveness check: the peer closed without a request.
        let Some(mut message) = receive().await? else {
            return Ok(());
        };
        let request = match serde_json::from_slice(&message.text)? {
            HubRequest::Attach(request) => request,
            HubRequest::Namespaces => {
                let send = || packet::send(&connection, 0, &[], &self.namespaces.descriptors());
                return connection.async_io(Interest::WRITABLE, send).await;
            }
            HubRequest::ShutDown => {
                self.shutdown.notify_one();
                return Ok(());
            }
        };
        let attached = match message.descriptors.pop() {
            Some(namespace) => self.attach(&request, &namespace),
            None => Err(io::Error::other("the request has no network namespace")),
        };
        let (address, response) = match attached {
            Ok((address, is_new)) => (
                Some(address),
                AttachResponse::Attached {
                    address: IpAddr::V4(address),
                    prefix: self.cidr.prefix(),
                    gateway: self.cidr.gateway().into(),
                    is_new,
                },
            ),
            Err(error) => (None, AttachResponse::Failed(error.to_string())),
        };
        let response = serde_json::to_vec(&response)?;
        let sent = connection
            .async_io(Interest::WRITABLE, || {
                packet::send(&connection, 0, &response, &[])
            })
            .await;
        if sent.is_ok() {
            // No further messages: wait until the sandbox exits.
            while let Ok(Some(_)) = receive().await {}
        }
        if let Some(address) = address {
            self.detach(address);
        }
        sent
    }

    /// Returns the pod's address, and whether its interface is new.
    fn attach(&self, request: &AttachRequest, namespace: &OwnedFd) -> io::Result<(Ipv4Addr, bool)> {
        self.release_unclaimed();
        let claim = request.claim.and_then(|claim| match claim {
            IpAddr::V4(claim) => Some(claim),
            IpAddr::V6(_) => None,
        });
        if let Some(claim) = claim
            && self.unclaimed.borrow_mut().remove(&claim)
        {
            return Ok((claim, false));
        }
        let address = self.addresses.borrow_mut().allocate(claim).ok_or_else(|| {
            io::Error::other(format!(
                "no free address in this node's pod CIDR {}",
                self.cidr
            ))
        })?;
        let name = interface(address);
        let connected = self
            .route
            .add_veth(&name, BRIDGE, INTERFACE, namespace.as_fd())
            .and_then(|()| self.route.set_up(&name));
        match connected {
            Ok(()) => Ok((address, true)),
            Err(error) => {
                self.detach(address);
                Err(error)
            }
        }
    }

    fn detach(&self, address: Ipv4Addr) {
        // The kernel removes it with the pod's network namespace, but a leftover process would keep that.
        let _ = self.route.remove(&interface(address));
        self.addresses.borrow_mut().release(address);
    }
}

/// Accepts the next connection, and retries after errors: they are mostly a transient lack of descriptors or memory, and the
/// end of the hub would end the network of all pods.
pub(super) async fn next(listener: &UnixListener) -> UnixStream {
    loop {
        match listener.accept().await {
            Ok((connection, _)) => return connection,
            Err(error) => {
                tracing::warn!(%error, "hub failed to accept a connection");
                tokio::time::sleep(ACCEPT_RETRY_INTERVAL).await;
            }
        }
    }
}

/// The name of the hub's end of a pod's veth pair.
fn interface(address: Ipv4Addr) -> String {
    format!("p{:08x}", u32::from(address))
}

/// Enters the namespaces of the previous hub, or new ones if there was none or they cannot be entered. In the latter case
/// pods lose their network, and their sandboxes restart them.
fn enter(previous: Option<HubNamespaces>) -> io::Result<()> {
    match previous.map(|previous| previous.enter()) {
        Some(Ok(())) => return Ok(()),
        Some(Err(error)) => {
            tracing::warn!(%error, "failed to enter the namespaces of the previous hub")
        }
        None => {}
    }
    linux::namespace::enter_as_root(UnshareFlags::NEWNET).map(|_| ())
}

/// Creates the bridge, or completes an existing one.
fn make_bridge(cidr: PodCidr) -> io::Result<()> {
    let route = Route::open()?;
    route.set_up("lo")?;
    let gateway = Prefixed {
        address: cidr.gateway().into(),
        length: cidr.prefix(),
    };
    for made in [route.add_bridge(BRIDGE), route.add_address(BRIDGE, gateway)] {
        match made {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => made?,
        }
    }
    route.set_up(BRIDGE)
}

/// Locks the lock file, because two agents may find the hub dead at the same time.
fn lock(socket: &Path) -> Result<File, HubError> {
    let path = socket.with_extension("lock");
    let failed = |source| HubError::Socket {
        path: path.display().to_string(),
        source,
    };
    let file = File::create(&path).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(HubError::Running {
            path: path.display().to_string(),
        }),
        Err(TryLockError::Error(source)) => Err(failed(source)),
    }
}

/// Listens at `path`, and replaces the socket of an earlier process atomically, so that clients do not take the hub for dead
/// meanwhile.
pub(super) fn listen(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
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

#[cfg(test)]
mod tests {
    use rustix::process::{Resource, getrlimit, setrlimit};

    use super::*;

    /// Changes the descriptor limit of the process. nextest runs each test in its own process.
    #[tokio::test]
    async fn accept_retries_without_free_descriptors() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hub.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let _sandbox = std::os::unix::net::UnixStream::connect(&path).unwrap();
        let before = getrlimit(Resource::Nofile);
        let next_free = std::os::fd::AsRawFd::as_raw_fd(&std::fs::File::open("/").unwrap());
        let mut none = before;
        none.current = Some(next_free.unsigned_abs().into());
        setrlimit(Resource::Nofile, none).unwrap();
        let accepted = tokio::time::timeout(ACCEPT_RETRY_INTERVAL / 2, next(&listener)).await;
        setrlimit(Resource::Nofile, before).unwrap();
        assert!(accepted.is_err());
        next(&listener).await;
    }
}
