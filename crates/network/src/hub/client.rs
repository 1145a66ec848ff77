//! Clients of the hub's process outside: sandboxes and the node's agent.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use linux::packet;
use linux::packet_connection::{PacketConnection, connect};
use rustix::net::sockopt::Timeout;

use super::namespaces::HubNamespaces;
use super::state::NetworkState;
use super::{AttachRequest, AttachResponse, HubRequest, StateResponse};

/// A pod's attachment to the pod network, held until this is dropped.
#[derive(Debug)]
pub struct HubAttachment {
    /// The pod's address.
    pub address: IpAddr,
    /// The default gateway. It is not in the address's network, so its route needs the flag `onlink`.
    pub gateway: IpAddr,
    /// The hub created the interface for this request: it has no address yet.
    pub is_new: bool,
    /// The attachment ends when this is closed.
    connection: PacketConnection,
}

/// Timeout for the hub's response, including retries while its process is being replaced.
const JOIN_TIMEOUT: Duration = Duration::from_secs(10);
const JOIN_RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Joins the user namespace of the hub at `socket`, as its root. The calling process must have a single thread. Returns that
/// namespace, which the process can [serve](HubNamespaces::serve) to other processes.
pub fn join_user_namespace(socket: &Path) -> io::Result<HubNamespaces> {
    let deadline = Instant::now() + JOIN_TIMEOUT;
    let namespaces = loop {
        match HubNamespaces::of_hub(socket, JOIN_TIMEOUT) {
            Err(_) if Instant::now() < deadline => std::thread::sleep(JOIN_RETRY_INTERVAL),
            received => break received?,
        }
    };
    linux::setns::join_namespace(namespaces.user())?;
    Ok(namespaces.without_network())
}

/// Requests the hub's namespaces from the peer, a hub or one of its sandboxes. They cannot be opened below `/proc`, because
/// the processes in them are not dumpable.
pub(super) fn request_namespaces(
    connection: &OwnedFd,
    timeout: Duration,
) -> io::Result<HubNamespaces> {
    rustix::net::sockopt::set_socket_timeout(connection, Timeout::Recv, Some(timeout))?;
    let request = serde_json::to_vec(&HubRequest::Namespaces)?;
    packet::send(connection, 0, &request, &[])?;
    let response = packet::receive(connection)?;
    let response = response.ok_or_else(hub_exited)?;
    HubNamespaces::from_descriptors(response.descriptors)
        .ok_or_else(|| io::Error::other("the node's hub sent no namespaces"))
}

fn hub_exited() -> io::Error {
    io::Error::other("the node's hub has exited")
}

fn no_response(timeout: Duration) -> io::Error {
    let message = format!(
        "the node's hub has not responded for {} s",
        timeout.as_secs()
    );
    io::Error::new(io::ErrorKind::TimedOut, message)
}

/// Waits until the process that serves at `socket` exits.
pub async fn wait_for_exit(socket: &Path) -> io::Result<()> {
    PacketConnection::connect(socket)?.wait_for_close().await;
    Ok(())
}

/// Whether a hub's process listens at `socket`.
pub fn is_listening(socket: &Path) -> bool {
    // A process whose backlog is full hangs, but listens.
    connect(socket).map_or_else(|error| error.kind() == io::ErrorKind::WouldBlock, |_| true)
}

impl HubAttachment {
    /// Requests an address and an interface for a pod's network namespace from the hub at `socket`. Fails if the hub does not respond
    /// within `timeout`: it may be stopped, or hang.
    pub async fn request(
        socket: &Path,
        request: &AttachRequest,
        namespace: &OwnedFd,
        timeout: Duration,
    ) -> io::Result<Self> {
        let connection = PacketConnection::connect(socket)?;
        let text = serde_json::to_vec(&HubRequest::Attach(request.clone()))?;
        let descriptors = [namespace.as_fd()];
        let response = connection.request(&text, &descriptors);
        let response = tokio::time::timeout(timeout, response).await;
        let response = response.map_err(|_| no_response(timeout))?;
        let response = response.map_err(|_| hub_exited())?;
        match serde_json::from_slice(&response.text)? {
            AttachResponse::Attached {
                address,
                gateway,
                is_new,
            } => Ok(Self {
                address,
                gateway,
                is_new,
                connection,
            }),
            AttachResponse::Failed(reason) => Err(io::Error::other(reason)),
        }
    }

    /// Returns when the hub's process has exited. The pod keeps its network, but must claim it from the next process.
    pub async fn hub_exited(&self) {
        self.connection.wait_for_close().await;
    }
}

/// A connection on which the kubelet sends the desired state of the network.
#[derive(Debug)]
pub struct StateConnection(PacketConnection);

impl StateConnection {
    /// Connects to the hub at `socket`.
    pub async fn open(socket: &Path) -> io::Result<Self> {
        let connection = PacketConnection::connect(socket)?;
        let request = serde_json::to_vec(&HubRequest::State)?;
        connection.send(0, &request, &[]).await?;
        Ok(Self(connection))
    }

    /// Sends a state, and waits until the hub has applied it. After a time-out, or if this future is dropped, the connection must be
    /// closed: a late response would be taken for that to the next state.
    pub async fn apply(&self, state: &NetworkState, timeout: Duration) -> io::Result<()> {
        let state = serde_json::to_vec(state)?;
        let response = tokio::time::timeout(timeout, self.0.request(&state, &[])).await;
        let response = response.map_err(|_| no_response(timeout))??;
        match serde_json::from_slice(&response.text)? {
            StateResponse::Applied => Ok(()),
            StateResponse::Failed(reason) => Err(io::Error::other(reason)),
        }
    }

    /// Returns when the hub's process has exited.
    pub async fn hub_exited(&self) {
        self.0.wait_for_close().await;
    }
}

/// Requests the shutdown of the hub's process at `socket`, without waiting for it.
pub fn shut_down(socket: &Path) -> io::Result<()> {
    let connection = connect(socket)?;
    let request = serde_json::to_vec(&HubRequest::ShutDown)?;
    packet::send(&connection, 0, &request, &[])
}

#[cfg(test)]
mod tests {
    use super::super::packet_listener::PacketListener;
    use super::*;

    /// A hub that hangs: it listens, and never accepts a connection.
    #[tokio::test]
    async fn request_to_a_hanging_hub_fails_in_time() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("hub.sock");
        let _hub = PacketListener::bind(&socket).unwrap();
        let namespace = OwnedFd::from(std::fs::File::open("/proc/self/ns/net").unwrap());
        let request = AttachRequest {
            uid: "uid".to_owned(),
            claim: None,
        };
        let request = || {
            let timeout = Duration::from_millis(50);
            HubAttachment::request(&socket, &request, &namespace, timeout)
        };
        let error = request().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        // Connections that were closed again stay in the backlog, so it fills up. Connecting would then block this thread.
        while connect(&socket).is_ok() {}
        let error = request().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert!(is_listening(&socket));
    }

    #[tokio::test]
    async fn state_for_hung_hub_times_out() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("hub.sock");
        let _hub = PacketListener::bind(&socket).unwrap();
        let connection = StateConnection::open(&socket).await.unwrap();
        let state = NetworkState::default();
        let applied = connection.apply(&state, Duration::from_millis(50));
        let applied = tokio::time::timeout(Duration::from_secs(60), applied).await;
        let error = applied.unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
