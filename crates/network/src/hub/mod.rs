//! The hub: owner of the user and network namespace in which a node's pods meet.
//!
//! ```text
//!   the hub's network namespace                    a pod's
//!  ┌───────────────────────────────┐     ┌───────────────────────┐
//!  │ pods (bridge) 100.64.3.1/24   │     │ eth0  100.64.3.2/24   │
//!  │  └ p2 ────────── veth ────────┼─────┤ default via 100.64.3.1│
//!  └───────────────────────────────┘     └───────────────────────┘
//! ```
//!
//! A sandbox connects to the hub's Unix socket, hands over its network namespace, and has an address for as long as the
//! connection lasts: when a sandbox dies, however it dies, its address and its interface are free again. The process that serves may
//! die and be replaced by another in the same namespaces, in which the cables still are: sandboxes connect again and claim
//! what they had. A process that holds the hub's [`Namespaces`] can start a new hub in them when all of its processes are gone. If only the
//! user namespace is left, sandboxes are given new cables with their old addresses.
//!
//! Links between hubs, services, names and the way out are not here yet.

mod addresses;
mod client;
mod namespaces;
mod server;

pub use addresses::Range;
pub use client::{Place, end, is_there, join, lost};
pub use namespaces::Namespaces;
pub use server::{Hub, HubError};

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// A pod's interface, in its own namespace.
pub const INTERFACE: &str = "eth0";

/// What the hub is asked.
#[derive(Debug, Serialize, Deserialize)]
enum Request {
    /// By a sandbox; its network namespace is beside it.
    Attach(Attach),
    /// By a process that joins the hub's user namespace, or keeps the hub's namespaces open. Answered by the descriptors of its
    /// [`Namespaces`], with no text.
    Namespaces,
    /// By the node's agent: the node ends.
    End,
}

/// A place that a sandbox wants.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Attach {
    /// The pod.
    pub uid: String,
    /// The address that it had from a hub before this one.
    pub claim: Option<IpAddr>,
}

/// What the hub answers.
#[derive(Debug, Serialize, Deserialize)]
pub enum Attached {
    /// The interface is in the namespace; the pod gives it this address.
    Done {
        /// The address.
        address: IpAddr,
        /// The length of the node's prefix.
        prefix: u8,
        /// Where everything else goes.
        gateway: IpAddr,
        /// The interface was made for this request, and not for one before it.
        is_new: bool,
    },
    /// It can't be.
    Refused(String),
}
