//! The hub: the process that owns a node's user namespace and the network namespace with its pod bridge.
//!
//! ```text
//!   the hub's network namespace                    a pod's
//!  ┌───────────────────────────────┐     ┌───────────────────────┐
//!  │ pods (bridge) 100.64.3.1/24   │     │ eth0  100.64.3.2/24   │
//!  │  └ p2 ────────── veth ────────┼─────┤ default via 100.64.3.1│
//!  └───────────────────────────────┘     └───────────────────────┘
//! ```
//!
//! A sandbox connects to the hub's Unix socket, passes its network namespace, and has an address as long as the connection
//! is open. When a sandbox dies, the hub releases its address and its interface. The serving process may die and be replaced by
//! another one in the same namespaces, which still have the veth pairs: sandboxes reconnect and claim their addresses. A
//! process that holds the [`HubNamespaces`] can start a new hub in them after all processes of the hub have died. If only the user
//! namespace is left, sandboxes get new veth pairs with their old addresses.
//!
//! Links between hubs, services, DNS and egress of pods are not implemented yet.

mod address_pool;
mod client;
mod namespaces;
mod server;

pub use address_pool::PodCidr;
pub use client::{HubAttachment, is_listening, join_user_namespace, shut_down, wait_for_exit};
pub use namespaces::HubNamespaces;
pub use server::{Hub, HubError};

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// The name of a pod's interface in its network namespace.
pub const INTERFACE: &str = "eth0";

/// A request to the hub.
#[derive(Debug, Serialize, Deserialize)]
enum HubRequest {
    /// From a sandbox, with the descriptor of its network namespace.
    Attach(AttachRequest),
    /// From a process that joins the hub's user namespace or keeps the hub's namespaces open. The response has the descriptors
    /// of [`HubNamespaces`] and no text.
    Namespaces,
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
pub enum AttachResponse {
    /// The interface is in the pod's namespace; the sandbox sets this address.
    Attached {
        /// The address.
        address: IpAddr,
        /// The length of the node's prefix.
        prefix: u8,
        /// The default gateway.
        gateway: IpAddr,
        /// The interface was created for this request.
        is_new: bool,
    },
    /// The request failed.
    Failed(String),
}
