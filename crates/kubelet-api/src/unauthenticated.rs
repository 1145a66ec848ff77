//! Connections whose client has not authenticated yet. Everybody on the network can open them, so there are few.
//!
//! When there are too many, a new one evicts the oldest. So clients that only hold connections open keep nobody out who
//! authenticates at once, and cost no more descriptors than the limit.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

/// All unauthenticated connections of a listener, in the order in which they came.
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

/// An unauthenticated connection's slot. To be dropped when the client has authenticated or is gone.
#[derive(Debug)]
pub struct UnauthenticatedSlot {
    number: u64,
    evicted: CancellationToken,
    connections: Arc<UnauthenticatedConnections>,
}

impl UnauthenticatedConnections {
    /// At most `limit` at once.
    pub fn new(limit: usize) -> Arc<Self> {
        let slots = Mutex::default();
        Arc::new(Self { limit, slots })
    }

    /// A slot for a new connection; evicts the oldest if there are too many.
    pub fn admit(self: &Arc<Self>) -> UnauthenticatedSlot {
        let evicted = CancellationToken::new();
        let mut slots = self.lock();
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

    fn lock(&self) -> MutexGuard<'_, Slots> {
        // Nothing in here can panic half-way.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UnauthenticatedSlot {
    /// Done when a new connection has evicted this one, which has to be closed then.
    pub async fn evicted(&self) {
        self.evicted.cancelled().await;
    }
}

impl Drop for UnauthenticatedSlot {
    fn drop(&mut self) {
        self.connections.lock().taken.remove(&self.number);
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
    fn a_new_connection_evicts_the_oldest() {
        let connections = UnauthenticatedConnections::new(2);
        let (first, second) = (connections.admit(), connections.admit());
        assert!(!is_evicted(&first) && !is_evicted(&second));
        let third = connections.admit();
        assert!(is_evicted(&first) && !is_evicted(&second) && !is_evicted(&third));
        // Its slot was taken from it already.
        drop(first);
        let _fourth = connections.admit();
        assert!(is_evicted(&second) && !is_evicted(&third));
    }

    #[test]
    fn a_dropped_slot_is_free() {
        let connections = UnauthenticatedConnections::new(2);
        let (first, second) = (connections.admit(), connections.admit());
        drop(second);
        let third = connections.admit();
        assert!(!is_evicted(&first) && !is_evicted(&third));
        drop((first, third));
        assert!(connections.lock().taken.is_empty());
    }
}
