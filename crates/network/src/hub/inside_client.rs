//! The client of the hub's process inside the namespaces. Starts that process, and replaces it if it exits.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use linux::packet::Packet;
use linux::packet_connection::PacketConnection;
use linux::route::RouteSocket;
use rustix::net::{AddressFamily, SocketType};
use tokio::sync::Mutex;

use super::inside::{InsideRequest, InsideResponse};
use super::namespaces::HubNamespaces;
use super::packet_listener::kill_listener;

/// Time-out of a request. If it expires, the process inside is stopped or hangs, and the client kills and replaces it.
const INSIDE_REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Time-out of the start of the process inside. It runs `newuidmap`, which may wait for the site's directory service.
const INSIDE_START_TIMEOUT: Duration = Duration::from_secs(50);
/// From linux/netlink.h.
const NETLINK_ROUTE: u32 = 0;
const CONNECT_INTERVAL: Duration = Duration::from_millis(5);

/// Starts the process inside: in the given namespaces or, with `None`, in new ones. Returns without waiting for it to listen. The
/// receiver gets the reason if it fails to start.
pub type SpawnInside = Box<
    dyn Fn(Option<&HubNamespaces>) -> io::Result<tokio::sync::oneshot::Receiver<String>>
        + Send
        + Sync,
>;

/// Sends requests to the process inside, and holds the descriptors that a replacement for it needs.
pub(super) struct InsideClient {
    socket: PathBuf,
    spawn: SpawnInside,
    connection: Mutex<InsideConnection>,
    /// Held open so that a replacement can enter them.
    pub(super) namespaces: HubNamespaces,
    /// Copies of the stored descriptors, for a replacement.
    stored: Mutex<HashMap<String, Vec<OwnedFd>>>,
}

impl InsideClient {
    /// Connects to the running process inside, or starts one: in the namespaces of an earlier one, `previous`, or in new ones.
    pub(super) async fn start(
        socket: PathBuf,
        previous: Option<HubNamespaces>,
        spawn: SpawnInside,
    ) -> io::Result<Self> {
        let existing = match InsideConnection::open(&socket) {
            Ok(mut connection) => connection
                .namespaces()
                .await
                .map(|namespaces| (connection, namespaces)),
            Err(error) => Err(error),
        };
        let (connection, namespaces) = match existing {
            Ok(existing) => existing,
            Err(_) => {
                let mut connection = start_process(&socket, previous.as_ref(), &spawn).await?;
                let namespaces = connection.namespaces().await?;
                (connection, namespaces)
            }
        };
        Ok(Self {
            socket,
            spawn,
            connection: Mutex::new(connection),
            namespaces,
            stored: Mutex::default(),
        })
    }

    /// Opens a netlink socket for interfaces and routes.
    pub(super) async fn route_socket(&self) -> io::Result<RouteSocket> {
        let netlink = self.socket(AddressFamily::NETLINK, SocketType::RAW, NETLINK_ROUTE);
        let ioctl = self.socket(AddressFamily::INET, SocketType::DGRAM, 0);
        Ok(RouteSocket::from_sockets(netlink.await?, ioctl.await?))
    }

    /// Opens a socket in the pods' network namespace.
    pub(super) async fn socket(
        &self,
        domain: AddressFamily,
        kind: SocketType,
        protocol: u32,
    ) -> io::Result<OwnedFd> {
        let request = InsideRequest::Socket {
            domain: domain.as_raw(),
            kind: kind.as_raw(),
            protocol,
        };
        let mut response = self.request(&request, &[]).await?;
        response
            .descriptors
            .pop()
            .ok_or_else(|| io::Error::other("the response has no socket"))
    }

    /// Stores descriptors in the process inside. The successor of this process gets them with [`stored`](Self::stored).
    pub(super) async fn store(&self, name: &str, descriptors: Vec<OwnedFd>) -> io::Result<()> {
        let request = InsideRequest::Store {
            name: name.to_owned(),
        };
        // Keep the copies before sending the request: a replacement that starts during the request needs them too.
        let copies = descriptors.iter().map(OwnedFd::try_clone);
        let copies = copies.collect::<io::Result<_>>()?;
        self.stored.lock().await.insert(name.to_owned(), copies);
        self.request(&request, &descriptors).await?;
        Ok(())
    }

    /// The descriptors that a predecessor of this process stored; empty if there are none.
    pub(super) async fn stored(&self, name: &str) -> io::Result<Vec<OwnedFd>> {
        let request = InsideRequest::Stored {
            name: name.to_owned(),
        };
        let response = self.request(&request, &[]).await?;
        let copies = response.descriptors.iter().map(OwnedFd::try_clone);
        let copies = copies.collect::<io::Result<_>>()?;
        self.stored.lock().await.insert(name.to_owned(), copies);
        Ok(response.descriptors)
    }

    /// Ends the process inside, and thereby the pods' network. Returns when it has exited, or after a time-out.
    pub(super) async fn shut_down(&self) {
        let connection = self.connection.lock().await;
        let request = serde_json::to_vec(&InsideRequest::ShutDown).unwrap_or_default();
        if connection.packets.send(0, &request, &[]).await.is_ok() {
            let _ =
                tokio::time::timeout(INSIDE_REQUEST_TIMEOUT, connection.packets.wait_for_close())
                    .await;
        }
    }

    /// Replaces the process inside whenever it exits, until this future is dropped.
    pub(super) async fn keep_running(&self) {
        loop {
            let Ok(watch) = PacketConnection::connect(&self.socket) else {
                self.replace().await;
                continue;
            };
            watch.wait_for_close().await;
        }
    }

    /// Sends a request, to a new process if the current one has exited.
    async fn request(
        &self,
        request: &InsideRequest,
        descriptors: &[OwnedFd],
    ) -> io::Result<Packet> {
        let first = self.request_once(request, descriptors).await;
        match first {
            Err(error) if is_disconnected(&error) => {
                self.replace().await;
                self.request_once(request, descriptors).await
            }
            response => response,
        }
    }

    async fn request_once(
        &self,
        request: &InsideRequest,
        descriptors: &[OwnedFd],
    ) -> io::Result<Packet> {
        let mut connection = self.connection.lock().await;
        connection.request(request, descriptors).await
    }

    /// Starts a new process in the same namespaces, unless another caller has done so, and hands it the stored descriptors.
    async fn replace(&self) {
        let mut connection = self.connection.lock().await;
        if connection.namespaces().await.is_ok() {
            return;
        }
        tracing::warn!(
            "the hub's process inside the namespaces has exited or hangs; starting another one"
        );
        match start_process(&self.socket, Some(&self.namespaces), &self.spawn).await {
            Ok(started) => *connection = started,
            Err(error) => {
                tracing::warn!(%error, "cannot start the hub's process inside the namespaces");
                tokio::time::sleep(Duration::from_secs(1)).await;
                return;
            }
        }
        for (name, descriptors) in &*self.stored.lock().await {
            let request = InsideRequest::Store { name: name.clone() };
            if let Err(error) = connection.request(&request, descriptors).await {
                tracing::warn!(name, %error, "cannot store descriptors inside the namespaces");
            }
        }
    }
}

fn is_disconnected(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected, TimedOut};
    [BrokenPipe, ConnectionReset, NotConnected, TimedOut].contains(&error.kind())
}

/// A connection to the process inside. Requests and responses are numbered, to discard a response that arrives after the
/// time-out of its request.
struct InsideConnection {
    packets: PacketConnection,
    last_number: u64,
}

impl InsideConnection {
    fn open(socket: &Path) -> io::Result<Self> {
        Ok(Self::new(PacketConnection::connect(socket)?))
    }

    fn new(packets: PacketConnection) -> Self {
        Self {
            packets,
            last_number: 0,
        }
    }

    async fn namespaces(&mut self) -> io::Result<HubNamespaces> {
        let response = self.request(&InsideRequest::Namespaces, &[]).await?;
        HubNamespaces::from_descriptors(response.descriptors)
            .ok_or_else(|| io::Error::other("the response has no namespaces"))
    }

    async fn request(
        &mut self,
        request: &InsideRequest,
        descriptors: &[OwnedFd],
    ) -> io::Result<Packet> {
        self.last_number += 1;
        let number = self.last_number;
        let request = serde_json::to_vec(request)?;
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let exchange = async {
            self.packets.send(number, &request, &descriptors).await?;
            loop {
                match self.packets.receive().await? {
                    Some(response) if response.number == number => return Ok(response),
                    Some(_) => {}
                    None => return Err(io::Error::from(io::ErrorKind::ConnectionReset)),
                }
            }
        };
        let response = tokio::time::timeout(INSIDE_REQUEST_TIMEOUT, exchange).await??;
        let result: InsideResponse = serde_json::from_slice(&response.text)?;
        if !response.is_complete {
            return Err(io::Error::other("no free descriptors"));
        }
        result.map(|()| response).map_err(io::Error::other)
    }
}

/// Starts a process inside and connects to it.
async fn start_process(
    socket: &Path,
    previous: Option<&HubNamespaces>,
    spawn: &SpawnInside,
) -> io::Result<InsideConnection> {
    // Two processes would compete for the socket.
    if let Some(pid) = kill_listener(socket) {
        tracing::warn!(
            pid,
            "killed the hub's process inside the namespaces, which does not respond"
        );
    }
    let mut failure = spawn(previous)?;
    let deadline = Instant::now() + INSIDE_START_TIMEOUT;
    loop {
        // Fails until the new process listens: the socket file is missing, or a stale one of a process that has exited.
        if let Ok(connection) = InsideConnection::open(socket) {
            return Ok(connection);
        }
        if let Ok(reason) = failure.try_recv() {
            return Err(io::Error::other(reason));
        }
        if Instant::now() > deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        tokio::time::sleep(CONNECT_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn late_response_is_dropped() {
        let (client, server) = linux::packet::pair().unwrap();
        let mut client = InsideConnection::new(PacketConnection::new(client).unwrap());
        let server = PacketConnection::new(server).unwrap();
        let stored = |name: &str| InsideRequest::Stored {
            name: name.to_owned(),
        };
        let first = stored("first");
        let abandoned = client.request(&first, &[]);
        let abandoned = tokio::time::timeout(Duration::from_millis(20), abandoned).await;
        assert!(abandoned.is_err(), "the server has not responded yet");

        let null = std::fs::File::open("/dev/null").unwrap();
        let respond = async {
            for descriptors in [vec![], vec![null.as_fd()]] {
                let request = server.receive().await.unwrap().unwrap();
                let response = serde_json::to_vec(&InsideResponse::Ok(())).unwrap();
                let sent = server.send(request.number, &response, &descriptors).await;
                sent.unwrap();
            }
        };
        let second = stored("second");
        let (response, ()) = tokio::join!(client.request(&second, &[]), respond);
        assert_eq!(response.unwrap().descriptors.len(), 1);
    }
}
