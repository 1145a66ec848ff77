//! The hub of a node: connects its pods to the network.
//!
//! ```text
//!   host's network             the hub's network namespace                a pod's
//!  ┌──────────────┐  sockets  ┌─────────────────────────────┐    ┌────────────────────────┐
//!  │ outside      │◄──────────┤ lo   100.64.3.1/32          │    │ eth0  100.64.3.2/32    │
//!  │ (all logic)  │           │ p64400302 ───── veth ───────┼────┤ default via 100.64.3.1 │
//!  └──────────────┘           └────── inside (holds it) ────┘    └────────────────────────┘
//! ```
//!
//! Two processes. The one [`inside`] holds a user and a network namespace and opens sockets in them. The one [`outside`], in the
//! host's network, does everything else through these sockets. Either may die: the agent restarts the one outside, which finds
//! the interfaces of the pods again; the one outside restarts the one inside in the namespaces, which it holds open too. A
//! process that holds the [`HubNamespaces`] can start a new hub in them after both have died.
//!
//! A sandbox connects to the socket of the process outside, passes its network namespace, and has an address as long as the
//! connection is open. If it loses the connection, it reconnects and claims its address. The kubelet sends the desired
//! [`NetworkState`], complete, on each change.
//!
//! Links between hubs, services, DNS and egress of pods are not implemented yet.

mod address_pool;
mod attachments;
mod claims;
mod client;
mod inside;
mod inside_client;
mod kept_attachment;
mod namespaces;
mod outside;
mod packet_listener;
mod state;

pub use address_pool::PodCidr;
pub use client::{
    HubAttachment, StateConnection, is_listening, join_user_namespace, shut_down, wait_for_exit,
};
pub use inside::Inside;
pub use inside_client::SpawnInside;
pub use kept_attachment::ATTACH_TIMEOUT;
pub use namespaces::HubNamespaces;
pub use outside::{Hub, HubError, HubSockets};
pub use packet_listener::kill_listener;
pub use state::NetworkState;

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// The name of a pod's interface in its network namespace.
pub const INTERFACE: &str = "eth0";

/// A request to the hub's process outside.
#[derive(Debug, Serialize, Deserialize)]
enum HubRequest {
    /// From a sandbox, with the descriptor of its network namespace.
    Attach(AttachRequest),
    /// From a process that joins the hub's user namespace or keeps the hub's namespaces open. The response has the descriptors
    /// of [`HubNamespaces`] and no text.
    Namespaces,
    /// From the kubelet: further packets on this connection are [`NetworkState`]s, each answered by a [`StateResponse`].
    State,
    /// From the node's agent, when the node shuts down.
    ShutDown,
}

/// A sandbox's request for an address and an interface.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AttachRequest {
    /// The pod's uid.
    pub uid: String,
    /// The pod's address from an earlier hub process.
    pub claim: Option<IpAddr>,
}

/// The hub's response to [`AttachRequest`].
#[derive(Debug, Serialize, Deserialize)]
enum AttachResponse {
    /// The interface is in the pod's namespace; the sandbox sets this address, and a default route via the gateway.
    Attached {
        /// The address.
        address: IpAddr,
        /// The default gateway.
        gateway: IpAddr,
        /// The interface was created for this request.
        is_new: bool,
    },
    /// The request failed.
    Failed(String),
}

/// The hub's response to a [`NetworkState`].
#[derive(Debug, Serialize, Deserialize)]
enum StateResponse {
    Applied,
    Failed(String),
}
