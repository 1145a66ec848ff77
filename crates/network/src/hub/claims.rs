//! Which sandboxes own the interfaces of a node's pods. Pure bookkeeping.
//!
//! A sandbox owns its pod's interface through a connection. It may have several: if the hub hangs, the sandbox gives up waiting,
//! closes its connection and claims the interface again by another one. The hub may serve these connections in any order.

use std::collections::{BTreeSet, HashMap};
use std::net::Ipv4Addr;

/// The number of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ConnectionId(u64);

/// The interfaces in the hub's namespace, by the addresses of their pods.
#[derive(Debug, Default)]
pub(super) struct Claims {
    interfaces: HashMap<Ipv4Addr, Interface>,
    last: u64,
}

#[derive(Debug, Default)]
struct Interface {
    /// The pod; `None` if an earlier process created the interface, and its sandbox has not claimed it yet.
    uid: Option<String>,
    /// The open connections of its sandbox.
    connections: BTreeSet<ConnectionId>,
}

impl Interface {
    fn may_belong_to(&self, uid: &str) -> bool {
        self.uid.as_deref().is_none_or(|owner| owner == uid)
    }
}

impl Claims {
    /// Adds an interface that an earlier process created.
    pub(super) fn add_unclaimed(&mut self, address: Ipv4Addr) {
        self.interfaces.insert(address, Interface::default());
    }

    /// Adds an interface that was created for a new connection.
    pub(super) fn add(&mut self, address: Ipv4Addr, uid: &str) -> ConnectionId {
        self.interfaces.insert(address, Interface::default());
        self.connect(address, uid)
    }

    /// Claims an existing interface for a new connection; `None` if there is none, or another pod owns it.
    pub(super) fn claim(&mut self, address: Ipv4Addr, uid: &str) -> Option<ConnectionId> {
        self.may_belong_to(address, uid)
            .then(|| self.connect(address, uid))
    }

    /// Whether there is an interface that `uid` owns or may claim.
    pub(super) fn may_belong_to(&self, address: Ipv4Addr, uid: &str) -> bool {
        let interface = self.interfaces.get(&address);
        interface.is_some_and(|interface| interface.may_belong_to(uid))
    }

    /// Closes a connection. Returns whether the interface is to be removed: if no other connection owns it.
    pub(super) fn close(&mut self, address: Ipv4Addr, connection: ConnectionId) -> bool {
        let is_last = self.disconnect(address, connection);
        if is_last {
            self.interfaces.remove(&address);
        }
        is_last
    }

    /// Closes a connection whose sandbox gave up before it got a response. The interface stays: the sandbox claims it again.
    pub(super) fn abandon(&mut self, address: Ipv4Addr, connection: ConnectionId) {
        if self.disconnect(address, connection)
            && let Some(interface) = self.interfaces.get_mut(&address)
        {
            interface.uid = None;
        }
    }

    /// Forgets an interface that was removed.
    pub(super) fn remove(&mut self, address: Ipv4Addr) {
        self.interfaces.remove(&address);
    }

    /// The interfaces that no sandbox has claimed.
    pub(super) fn unclaimed(&self) -> impl Iterator<Item = Ipv4Addr> {
        let unclaimed = |(address, interface): (&Ipv4Addr, &Interface)| {
            interface.uid.is_none().then_some(*address)
        };
        self.interfaces.iter().filter_map(unclaimed)
    }

    fn connect(&mut self, address: Ipv4Addr, uid: &str) -> ConnectionId {
        self.last += 1;
        let connection = ConnectionId(self.last);
        let interface = self.interfaces.entry(address).or_default();
        interface.uid = Some(uid.to_owned());
        interface.connections.insert(connection);
        connection
    }

    /// Removes a connection; returns whether it was the last one of its interface.
    fn disconnect(&mut self, address: Ipv4Addr, connection: ConnectionId) -> bool {
        let interface = self.interfaces.get_mut(&address);
        interface.is_some_and(|interface| {
            interface.connections.remove(&connection) && interface.connections.is_empty()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: Ipv4Addr = Ipv4Addr::new(100, 64, 0, 2);

    /// The interface of the pod `uid`, as an earlier hub process left it.
    fn left_by_earlier_process() -> Claims {
        let mut claims = Claims::default();
        claims.add_unclaimed(ADDRESS);
        claims
    }

    #[test]
    fn interface_ends_with_the_connection_of_its_sandbox() {
        let mut claims = Claims::default();
        let connection = claims.add(ADDRESS, "uid");
        assert_eq!(claims.claim(ADDRESS, "other"), None);
        assert!(claims.close(ADDRESS, connection));
        assert!(!claims.close(ADDRESS, connection));
        assert_eq!(claims.claim(ADDRESS, "uid"), None);
    }

    /// A hub hung until the sandbox had claimed twice. It must not remove the interface for the first claim, whose connection is
    /// closed, whichever it serves first.
    #[test]
    fn abandoned_claim_does_not_end_a_later_one() {
        let mut claims = left_by_earlier_process();
        let abandoned = claims.claim(ADDRESS, "uid").unwrap();
        let later = claims.claim(ADDRESS, "uid").unwrap();
        claims.abandon(ADDRESS, abandoned);
        assert_eq!(claims.unclaimed().count(), 0);
        assert!(claims.close(ADDRESS, later));

        let mut claims = left_by_earlier_process();
        let later = claims.claim(ADDRESS, "uid").unwrap();
        let abandoned = claims.claim(ADDRESS, "uid").unwrap();
        assert!(!claims.close(ADDRESS, abandoned));
        assert_eq!(claims.claim(ADDRESS, "other"), None);
        assert!(claims.close(ADDRESS, later));

        let mut claims = left_by_earlier_process();
        let abandoned = claims.claim(ADDRESS, "uid").unwrap();
        claims.abandon(ADDRESS, abandoned);
        assert_eq!(claims.unclaimed().collect::<Vec<_>>(), [ADDRESS]);
        assert!(claims.claim(ADDRESS, "uid").is_some());
    }

    /// A new sandbox of the pod replaced the interface before the hub noticed that the old sandbox had exited.
    #[test]
    fn old_connection_does_not_end_a_replaced_interface() {
        let mut claims = Claims::default();
        let old = claims.add(ADDRESS, "uid");
        assert!(claims.may_belong_to(ADDRESS, "uid"));
        claims.remove(ADDRESS);
        let new = claims.add(ADDRESS, "uid");
        assert!(!claims.close(ADDRESS, old));
        assert!(claims.close(ADDRESS, new));
    }
}
