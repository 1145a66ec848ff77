//! The hub itself: its namespaces, its bridge, and the socket at which sandboxes get their place.

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

use super::addresses::{Addresses, Range};
use super::namespaces::Namespaces;
use super::{Attach, Attached, INTERFACE, Request};

const BRIDGE: &str = "pods";
/// More sandboxes than a node has pods.
const BACKLOG: i32 = 1024;
/// Between attempts to accept a sandbox.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Why there is no hub.
#[derive(Debug, Error)]
pub enum HubError {
    /// The host doesn't let us.
    #[error("cannot make a user and network namespace (`coracle doctor` says more): {0}")]
    Namespaces(#[source] io::Error),
    /// Its network can't be set up.
    #[error("cannot set up the node's pod network {range}: {source}")]
    Network {
        /// The node's range.
        range: Range,
        /// Why.
        source: io::Error,
    },
    /// It would take the socket away from the one that serves.
    #[error("another hub of this node runs: {path} is locked")]
    Running {
        /// The file that it has locked.
        path: String,
    },
    /// Nobody could reach it.
    #[error("cannot listen on {path}: {source}")]
    Socket {
        /// Where.
        path: String,
        /// Why.
        source: io::Error,
    },
}

/// A hub that is set up.
pub struct Hub {
    socket: PathBuf,
    listener: OwnedFd,
    range: Range,
    /// What sandboxes join, and the agent holds open.
    namespaces: Rc<Namespaces>,
    /// Held by every process of the hub, until the last of them is gone.
    _lock: File,
}

impl Hub {
    /// Moves the calling process, which must have a single thread, into the node's namespaces and sets up its network. If
    /// `before` are those of a hub that has died, pods are in them still.
    pub fn set_up(
        range: Range,
        socket: &Path,
        before: Option<Namespaces>,
    ) -> Result<Self, HubError> {
        let lock = lock(socket)?;
        enter(before).map_err(HubError::Namespaces)?;
        // Our root is the host's, and containers that see the host's processes may have all rights in our user namespace.
        linux::credentials::hide().map_err(HubError::Namespaces)?;
        let namespaces = Namespaces::own().map_err(HubError::Namespaces)?;
        make_bridge(range).map_err(|source| HubError::Network { range, source })?;
        // Last: whoever connects joins the namespaces that we are in. The socket lies outside, where its directory guards it.
        let listener = listen(socket).map_err(|source| HubError::Socket {
            path: socket.display().to_string(),
            source,
        })?;
        Ok(Self {
            socket: socket.to_owned(),
            listener,
            range,
            namespaces: Rc::new(namespaces),
            _lock: lock,
        })
    }

    /// Listens anew: sandboxes join the namespaces of the process that listens, and that one is gone.
    pub fn listen_again(&mut self) -> io::Result<()> {
        self.listener = listen(&self.socket)?;
        Ok(())
    }

    /// Gives sandboxes their places until it is told to end. Must be called within a `LocalSet`.
    pub async fn serve(&self) -> io::Result<()> {
        let places = Rc::new(Places::find(self.range, self.namespaces.clone())?);
        // Streams by name only: packets keep their boundaries, and nobody reads them as a stream.
        let listener = UnixListener::from_std(self.listener.try_clone()?.into())?;
        loop {
            let accepted = tokio::select! {
                accepted = next(&listener) => accepted,
                () = places.end.notified() => return Ok(()),
            };
            let places = places.clone();
            tokio::task::spawn_local(async move {
                if let Err(error) = places.keep(accepted).await {
                    tracing::warn!(%error, "a sandbox's connection");
                }
            });
        }
    }
}

struct Places {
    route: Route,
    namespaces: Rc<Namespaces>,
    range: Range,
    addresses: RefCell<Addresses>,
    /// Of those taken: cables that were there before us, whose sandboxes have not come back yet.
    unclaimed: RefCell<HashSet<Ipv4Addr>>,
    /// Told when we are to end.
    end: Notify,
}

impl Places {
    /// The places of this network namespace, with those that a process before us has given.
    fn find(range: Range, namespaces: Rc<Namespaces>) -> io::Result<Self> {
        let route = Route::open()?;
        let mut addresses = Addresses::new(range);
        let given: HashSet<_> = range
            .usable()
            .filter(|address| route.has(&interface(*address)))
            .collect();
        for address in &given {
            addresses.take(Some(*address));
        }
        Ok(Self {
            route,
            namespaces,
            range,
            addresses: RefCell::new(addresses),
            unclaimed: RefCell::new(given),
            end: Notify::new(),
        })
    }

    /// Frees the addresses of sandboxes that died while no hub served: their cables went with their network namespaces. One
    /// whose cable is there may have been stopped for however long, and will claim it.
    fn free_unclaimed(&self) {
        let mut unclaimed = self.unclaimed.borrow_mut();
        unclaimed.retain(|address| {
            let is_there = self.route.has(&interface(*address));
            if !is_there {
                self.addresses.borrow_mut().give_back(*address);
            }
            is_there
        });
    }

    /// Gives one sandbox its place and keeps it until the sandbox ends.
    async fn keep(&self, connection: UnixStream) -> io::Result<()> {
        let receive = || connection.async_io(Interest::READABLE, || packet::receive(&connection));
        // Somebody who only looks who we are.
        let Some(mut message) = receive().await? else {
            return Ok(());
        };
        let request = match serde_json::from_slice(&message.text)? {
            Request::Attach(request) => request,
            Request::Namespaces => {
                let send = || packet::send(&connection, 0, &[], &self.namespaces.descriptors());
                return connection.async_io(Interest::WRITABLE, send).await;
            }
            Request::End => {
                self.end.notify_one();
                return Ok(());
            }
        };
        let answer = match message.descriptors.pop() {
            Some(namespace) => self.attach(&request, &namespace),
            None => Err(io::Error::other(
                "no network namespace came with the request",
            )),
        };
        let (address, answer) = match answer {
            Ok((address, is_new)) => (
                Some(address),
                Attached::Done {
                    address: IpAddr::V4(address),
                    prefix: self.range.prefix(),
                    gateway: self.range.gateway().into(),
                    is_new,
                },
            ),
            Err(error) => (None, Attached::Refused(error.to_string())),
        };
        let answer = serde_json::to_vec(&answer)?;
        let sent = connection
            .async_io(Interest::WRITABLE, || {
                packet::send(&connection, 0, &answer, &[])
            })
            .await;
        if sent.is_ok() {
            // Nothing more is said; this ends with the sandbox.
            while let Ok(Some(_)) = receive().await {}
        }
        if let Some(address) = address {
            self.detach(address);
        }
        sent
    }

    /// A pod's address, and whether its cable was made now.
    fn attach(&self, request: &Attach, namespace: &OwnedFd) -> io::Result<(Ipv4Addr, bool)> {
        self.free_unclaimed();
        let claim = request.claim.and_then(|claim| match claim {
            IpAddr::V4(claim) => Some(claim),
            IpAddr::V6(_) => None,
        });
        if let Some(claim) = claim
            && self.unclaimed.borrow_mut().remove(&claim)
        {
            return Ok((claim, false));
        }
        let address = self.addresses.borrow_mut().take(claim).ok_or_else(|| {
            io::Error::other(format!(
                "all addresses of this node's range {} are taken",
                self.range
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
        // It goes with the pod's namespace by itself, but a process that was left in that would hold it.
        let _ = self.route.remove(&interface(address));
        self.addresses.borrow_mut().give_back(address);
    }
}

/// The next sandbox that connects. An error is no reason to end, and with us the network of all pods: the machine is out of
/// descriptors or memory, most likely, which others use and give back.
pub(super) async fn next(listener: &UnixListener) -> UnixStream {
    loop {
        match listener.accept().await {
            Ok((connection, _)) => return connection,
            Err(error) => {
                tracing::warn!(%error, "the hub cannot accept a sandbox");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// The hub's end of a pod's cable.
fn interface(address: Ipv4Addr) -> String {
    format!("p{:08x}", u32::from(address))
}

/// Enters the namespaces of the hub before us, or new ones if there was none or they can't be entered: its pods then lose
/// their network, notice that, and are restarted.
fn enter(before: Option<Namespaces>) -> io::Result<()> {
    match before.map(|before| before.enter()) {
        Some(Ok(())) => return Ok(()),
        Some(Err(error)) => tracing::warn!(%error, "cannot enter the namespaces of the last hub"),
        None => {}
    }
    linux::namespace::enter_as_root(UnshareFlags::NEWNET).map(|_| ())
}

/// Makes the bridge, or what is missing of it.
fn make_bridge(range: Range) -> io::Result<()> {
    let route = Route::open()?;
    route.set_up("lo")?;
    let gateway = Prefixed {
        address: range.gateway().into(),
        length: range.prefix(),
    };
    for made in [route.add_bridge(BRIDGE), route.add_address(BRIDGE, gateway)] {
        match made {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => made?,
        }
    }
    route.set_up(BRIDGE)
}

/// Locks a file beside the socket: two agents may find the hub dead at the same time.
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

/// Listens at `path`, in place of a hub before us. There is a socket at every moment, so that nobody takes the hub for dead
/// while one of its processes replaces the other.
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

    /// Changes the limit of the whole process, which is this test's alone where each test has its own.
    #[tokio::test]
    async fn who_connects_while_there_are_no_descriptors_waits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hub.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let _sandbox = std::os::unix::net::UnixStream::connect(&path).unwrap();
        let before = getrlimit(Resource::Nofile);
        let next_free = std::os::fd::AsRawFd::as_raw_fd(&std::fs::File::open("/").unwrap());
        let mut none = before;
        none.current = Some(next_free.unsigned_abs().into());
        setrlimit(Resource::Nofile, none).unwrap();
        let refused = tokio::time::timeout(ACCEPT_PAUSE / 2, next(&listener)).await;
        setrlimit(Resource::Nofile, before).unwrap();
        assert!(refused.is_err());
        next(&listener).await;
    }
}
