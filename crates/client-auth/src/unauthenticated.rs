//! Limits the connections whose client has not authenticated yet. Any host on the network can open them.
//!
//! At the limit a new connection evicts the oldest one. So idle connections do not block a client that authenticates at once, and
//! take no more file descriptors than the limit.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use tokio_util::sync::CancellationToken;

/// All unauthenticated connections of a listener, oldest first.
#[derive(Debug)]
pub struct UnauthenticatedConnections {
    limit: usize,
    slots: Mutex<Slots>,
}

#[derive(Debug, Default)]
struct Slots {
    next: u64,
    taken: BTreeMap<u64, CancellationToken>,
}

/// The slot of an unauthenticated connection. Drop it when the client has authenticated or disconnected.
#[derive(Debug)]
pub struct UnauthenticatedSlot {
    number: u64,
    evicted: CancellationToken,
    connections: Arc<UnauthenticatedConnections>,
}

impl UnauthenticatedConnections {
    /// Allows `limit` connections at a time.
    pub fn new(limit: usize) -> Arc<Self> {
        let slots = Mutex::default();
        Arc::new(Self { limit, slots })
    }

    /// Takes a slot for a new connection, and evicts the oldest one at the limit.
    pub fn admit(self: &Arc<Self>) -> UnauthenticatedSlot {
        let evicted = CancellationToken::new();
        let mut slots = self.slots.lock().unwrap();
        let number = slots.next;
        slots.next += 1;
        slots.taken.insert(number, evicted.clone());
        if slots.taken.len() > self.limit
            && let Some((_, oldest)) = slots.taken.pop_first()
        {
            oldest.cancel();
        }
        UnauthenticatedSlot {
            number,
            evicted,
            connections: Arc::clone(self),
        }
    }
}

impl UnauthenticatedSlot {
    /// Resolves when a new connection has evicted this one. The caller must then close it.
    pub async fn evicted(&self) {
        self.evicted.cancelled().await;
    }
}

impl Drop for UnauthenticatedSlot {
    fn drop(&mut self) {
        self.connections
            .slots
            .lock()
            .unwrap()
            .taken
            .remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn is_evicted(slot: &UnauthenticatedSlot) -> bool {
        slot.evicted().now_or_never().is_some()
    }

    #[test]
    fn new_connection_evicts_the_oldest() {
        let connections = UnauthenticatedConnections::new(2);
        let (first, second) = (connections.admit(), connections.admit());
        assert!(!is_evicted(&first) && !is_evicted(&second));
        let third = connections.admit();
        assert!(is_evicted(&first) && !is_evicted(&second) && !is_evicted(&third));
        // Eviction has already freed its slot.
        drop(first);
        let _fourth = connections.admit();
        assert!(is_evicted(&second) && !is_evicted(&third));
    }

    #[test]
    fn dropping_a_slot_frees_it() {
        let connections = UnauthenticatedConnections::new(2);
        let (first, second) = (connections.admit(), connections.admit());
        drop(second);
        let third = connections.admit();
        assert!(!is_evicted(&first) && !is_evicted(&third));
        drop((first, third));
        assert!(connections.slots.lock().unwrap().taken.is_empty());
    }
}
