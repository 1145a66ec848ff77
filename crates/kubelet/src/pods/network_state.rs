//! The desired state of the node's network, for the hub: the pods of this node and their addresses.

use std::net::Ipv4Addr;

use k8s_openapi::api::core::v1::PodStatus;
use network::hub::NetworkState;
use tokio::sync::watch;

/// Publishes the desired state of the network. Receivers are notified only on change.
#[derive(Clone, Debug, Default)]
pub struct NetworkStateSender(watch::Sender<NetworkState>);

impl NetworkStateSender {
    /// Receives the state, now and after each change.
    pub fn subscribe(&self) -> watch::Receiver<NetworkState> {
        self.0.subscribe()
    }

    /// Sets a pod's address to that in its status. An address stays reserved until the pod is removed.
    pub(super) fn set_pod(&self, uid: &str, status: Option<&PodStatus>) {
        let address = status.and_then(|status| status.pod_ip.as_deref());
        let address: Option<Ipv4Addr> = address.and_then(|address| address.parse().ok());
        self.0.send_if_modified(|state| {
            let known = state.pods.get(uid);
            if known.is_some_and(|known| address.is_none() || *known == address) {
                return false;
            }
            state.pods.insert(uid.to_owned(), address);
            true
        });
    }

    /// Releases the address of a pod that is gone.
    pub(super) fn remove_pod(&self, uid: &str) {
        self.0
            .send_if_modified(|state| state.pods.remove(uid).is_some());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(address: Option<&str>) -> PodStatus {
        PodStatus {
            pod_ip: address.map(str::to_owned),
            ..PodStatus::default()
        }
    }

    #[test]
    fn address_is_reserved_until_the_pod_is_removed() {
        let sender = NetworkStateSender::default();
        let mut receiver = sender.subscribe();
        let address = |receiver: &mut watch::Receiver<NetworkState>| {
            receiver.borrow_and_update().pods.get("uid").copied()
        };
        sender.set_pod("uid", None);
        assert_eq!(address(&mut receiver), Some(None));
        sender.set_pod("uid", Some(&status(Some("100.64.0.2"))));
        assert_eq!(
            address(&mut receiver),
            Some(Some(Ipv4Addr::new(100, 64, 0, 2)))
        );
        // A status without address, as of a failed pod, and a repeated one.
        sender.set_pod("uid", Some(&status(None)));
        sender.set_pod("uid", Some(&status(Some("100.64.0.2"))));
        assert!(!receiver.has_changed().unwrap());
        sender.remove_pod("uid");
        assert_eq!(address(&mut receiver), None);
    }
}
