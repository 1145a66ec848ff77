//! Who is connected and has not shown yet who they are: everybody can be, so they have little room and little time.
//!
//! Whoever comes when there is no room takes the place of who has been here longest. So a crowd that only holds
//! connections open keeps out nobody who shows a certificate or a token at once, and costs no more descriptors than it has places.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

/// The places of all strangers, in the order in which they came.
#[derive(Debug)]
pub(crate) struct Strangers {
    room: usize,
    places: Mutex<Places>,
}

#[derive(Debug, Default)]
struct Places {
    next: u64,
    taken: BTreeMap<u64, CancellationToken>,
}

/// One stranger's place, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    number: u64,
    lost: CancellationToken,
    strangers: Arc<Strangers>,
}

impl Strangers {
    pub(crate) fn new(room: usize) -> Arc<Self> {
        let places = Mutex::default();
        Arc::new(Self { room, places })
    }

    /// A place for one more.
    pub(crate) fn enter(self: &Arc<Self>) -> Place {
        let lost = CancellationToken::new();
        let mut places = self.lock();
        let number = places.next;
        places.next += 1;
        places.taken.insert(number, lost.clone());
        if places.taken.len() > self.room
            && let Some((_, oldest)) = places.taken.pop_first()
        {
            oldest.cancel();
        }
        Place {
            number,
            lost,
            strangers: Arc::clone(self),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Places> {
        // Nothing in here can panic half-way.
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// Done when somebody else has the place.
    pub(crate) async fn lost(&self) {
        self.lost.cancelled().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.strangers.lock().taken.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn is_lost(place: &Place) -> bool {
        place.lost().now_or_never().is_some()
    }

    #[test]
    fn who_comes_takes_the_place_of_who_was_first() {
        let strangers = Strangers::new(2);
        let (first, second) = (strangers.enter(), strangers.enter());
        assert!(!is_lost(&first) && !is_lost(&second));
        let third = strangers.enter();
        assert!(is_lost(&first) && !is_lost(&second) && !is_lost(&third));
        // Its place was taken from it already.
        drop(first);
        let _fourth = strangers.enter();
        assert!(is_lost(&second) && !is_lost(&third));
    }

    #[test]
    fn who_leaves_makes_room() {
        let strangers = Strangers::new(2);
        let (first, second) = (strangers.enter(), strangers.enter());
        drop(second);
        let third = strangers.enter();
        assert!(!is_lost(&first) && !is_lost(&third));
        drop((first, third));
        assert!(strangers.lock().taken.is_empty());
    }
}
