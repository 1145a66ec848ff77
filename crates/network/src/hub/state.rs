//! The desired state of a node's pod network. The kubelet computes it; the hub applies it and keeps the last one if the kubelet
//! dies.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

/// The desired state of a node's pod network.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkState {
    /// By uid: the pods of this node and their addresses, as far as they have one. No other pod gets such an address, even if the
    /// pod's sandbox does not respond at the moment.
    pub pods: BTreeMap<String, Option<Ipv4Addr>>,
}
