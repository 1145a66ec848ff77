//! The hub's process outside the namespaces, in the host's network: serves sandboxes and the kubelet.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use linux::packet_connection::PacketConnection;
use thiserror::Error;
use tokio::sync::Notify;

use super::address_pool::PodCidr;
use super::attachments::{Attached, Attachments, ipv4};
use super::inside_client::{InsideClient, SpawnInside};
use super::namespaces::HubNamespaces;
use super::packet_listener::PacketListener;
use super::state::NetworkState;
use super::{AttachResponse, HubRequest, StateResponse};

/// The name under which the kubelet's last state is stored inside.
const STATE: &str = "state";

/// The hub cannot be set up.
#[derive(Debug, Error)]
pub enum HubError {
    /// The host does not allow user and network namespaces.
    #[error("cannot create a user and network namespace (see `coracle doctor`): {0}")]
    Namespaces(#[source] io::Error),
    /// The pod network cannot be configured.
    #[error("cannot set up the node's pod network {cidr}: {source}")]
    Network {
        /// The node's pod CIDR.
        cidr: PodCidr,
        /// The error.
        source: io::Error,
    },
    /// The socket cannot be created.
    #[error("cannot listen on {path}: {source}")]
    Socket {
        /// The socket.
        path: String,
        /// The error.
        source: io::Error,
    },
}

/// Where the hub's processes listen.
#[derive(Clone, Debug)]
pub struct HubSockets {
    /// The process outside, for sandboxes and the agent.
    pub outside: PathBuf,
    /// The process inside, for the process outside.
    pub inside: PathBuf,
}

/// A running hub.
pub struct Hub {
    listener: PacketListener,
    shared: Arc<Shared>,
}

struct Shared {
    cidr: PodCidr,
    inside: InsideClient,
    attachments: Mutex<Attachments>,
    /// Held while a state is stored, so that states are stored in the order in which they were applied: a kubelet that has timed out
    /// sends the next one on another connection.
    storing: tokio::sync::Mutex<()>,
    /// Notified by a shutdown request.
    shutdown: Notify,
}

impl Hub {
    /// Sets up the pod network. The caller ensures that the node has no other hub. `previous` are the namespaces of a dead hub, which
    /// may still have pods; `spawn` starts the process inside, if none is running.
    pub async fn set_up(
        cidr: PodCidr,
        sockets: &HubSockets,
        previous: Option<HubNamespaces>,
        spawn: SpawnInside,
    ) -> Result<Self, HubError> {
        let inside = InsideClient::start(sockets.inside.clone(), previous, spawn)
            .await
            .map_err(HubError::Namespaces)?;
        let network = |source| HubError::Network { cidr, source };
        let route = inside.route_socket().await.map_err(network)?;
        let mut attachments = Attachments::set_up(cidr, route).map_err(network)?;
        if let Some(state) = stored_state(&inside).await {
            attachments.apply(state);
        }
        // Last, because clients take a listening hub for ready.
        let listener =
            PacketListener::bind(&sockets.outside).map_err(|source| HubError::Socket {
                path: sockets.outside.display().to_string(),
                source,
            })?;
        Ok(Self {
            listener,
            shared: Arc::new(Shared {
                cidr,
                inside,
                attachments: Mutex::new(attachments),
                storing: tokio::sync::Mutex::default(),
                shutdown: Notify::new(),
            }),
        })
    }

    /// Serves sandboxes and the kubelet until a shutdown request, then ends the process inside.
    pub async fn serve(self) {
        let shared = &self.shared;
        let accept = async {
            loop {
                let connection = self.listener.accept().await;
                let shared = Arc::clone(shared);
                tokio::spawn(async move {
                    if let Err(error) = shared.handle(connection).await {
                        tracing::warn!(%error, "connection to the hub failed");
                    }
                });
            }
        };
        tokio::select! {
            () = accept => {}
            () = shared.inside.keep_running() => {}
            () = shared.shutdown.notified() => {}
        }
        shared.inside.shut_down().await;
    }
}

impl Shared {
    async fn handle(&self, connection: PacketConnection) -> io::Result<()> {
        // A liveness check: the peer closed without a request.
        let Some(mut message) = connection.receive().await? else {
            return Ok(());
        };
        match serde_json::from_slice(&message.text)? {
            HubRequest::Attach(request) => {
                let namespace = message.descriptors.pop();
                let namespace =
                    namespace.ok_or_else(|| io::Error::other("no network namespace"))?;
                if connection.is_closed() {
                    // This process hung, and the sandbox has given up. Its next request may have been served already.
                    return Ok(());
                }
                let attached =
                    self.attachments()
                        .attach(&request.uid, ipv4(request.claim), &namespace);
                self.keep_attached(&connection, attached).await
            }
            HubRequest::Namespaces => {
                let namespaces = &self.inside.namespaces;
                connection.send(0, &[], &namespaces.descriptors()).await
            }
            HubRequest::State => self.receive_states(&connection).await,
            HubRequest::ShutDown => {
                self.shutdown.notify_one();
                Ok(())
            }
        }
    }

    /// Responds to a sandbox, and detaches its pod when it closes the connection.
    async fn keep_attached(
        &self,
        connection: &PacketConnection,
        attached: io::Result<Attached>,
    ) -> io::Result<()> {
        let response = match &attached {
            Ok(attached) => AttachResponse::Attached {
                address: attached.address.into(),
                gateway: self.cidr.gateway().into(),
                is_new: attached.is_new,
            },
            Err(error) => AttachResponse::Failed(error.to_string()),
        };
        let sent = connection
            .send(0, &serde_json::to_vec(&response)?, &[])
            .await;
        match (&attached, &sent) {
            (Ok(attached), Ok(())) => {
                connection.wait_for_close().await;
                self.attachments().detach(attached);
            }
            (Ok(attached), Err(_)) => self.attachments().revert(attached),
            (Err(_), _) => {}
        }
        sent
    }

    /// Applies the states that the kubelet sends, each after the one before it.
    async fn receive_states(&self, connection: &PacketConnection) -> io::Result<()> {
        while let Some(message) = connection.receive().await? {
            let response = match serde_json::from_slice::<NetworkState>(&message.text) {
                Ok(state) => {
                    self.attachments().apply(state);
                    self.store_state(&message.text).await;
                    StateResponse::Applied
                }
                Err(error) => StateResponse::Failed(error.to_string()),
            };
            let response = serde_json::to_vec(&response)?;
            connection.send(message.number, &response, &[]).await?;
        }
        Ok(())
    }

    /// Stores the state for the next process outside, which may start while there is no kubelet.
    async fn store_state(&self, state: &[u8]) {
        let _storing = self.storing.lock().await;
        let stored = async {
            let memory = linux::packet::memory_file(state)?;
            self.inside.store(STATE, vec![memory.into()]).await
        };
        if let Err(error) = stored.await {
            tracing::warn!(%error, "cannot store the state of the network");
        }
    }

    fn attachments(&self) -> MutexGuard<'_, Attachments> {
        self.attachments.lock().unwrap()
    }
}

/// The state that the last process outside has stored.
async fn stored_state(inside: &InsideClient) -> Option<NetworkState> {
    let memory = inside.stored(STATE).await.ok()?.pop()?;
    let text = linux::packet::read_memory_file(memory.into()).ok()?;
    serde_json::from_slice(&text).ok()
}
