//! Answers that hold for a while.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Strangers can fill it with their tokens, so it is small.
const MAX_ENTRIES: usize = 4096;

/// Values that are forgotten when their time is over.
pub(super) struct Cache<K, V>(Mutex<HashMap<K, (V, Instant)>>);

impl<K: Eq + Hash, V: Clone> Cache<K, V> {
    pub(super) fn new() -> Self {
        Self(Mutex::new(HashMap::new()))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<K, (V, Instant)>> {
        // The map is whole after every statement, so a panic elsewhere can't have left it half-written.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn get(&self, key: &K) -> Option<V> {
        let entries = self.lock();
        let (value, until) = entries.get(key)?;
        (*until > Instant::now()).then(|| value.clone())
    }

    pub(super) fn put(&self, key: K, value: V, ttl: Duration) {
        let now = Instant::now();
        let mut entries = self.lock();
        if entries.len() >= MAX_ENTRIES {
            entries.retain(|_, (_, until)| *until > now);
        }
        if entries.len() >= MAX_ENTRIES {
            // Only an attack fills it with what still holds; asking again is all that this costs.
            entries.clear();
        }
        entries.insert(key, (value, now + ttl));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_answer_holds_for_its_time() {
        let cache = Cache::new();
        cache.put("key", 1, Duration::from_secs(30));
        tokio::time::advance(Duration::from_secs(29)).await;
        assert_eq!(cache.get(&"key"), Some(1));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(cache.get(&"key"), None);
    }

    #[test]
    fn it_never_grows_beyond_its_bound() {
        let cache = Cache::new();
        for key in 0..=MAX_ENTRIES {
            cache.put(key, (), Duration::from_secs(30));
        }
        assert!(cache.lock().len() <= MAX_ENTRIES);
        assert_eq!(cache.get(&MAX_ENTRIES), Some(()));
    }
}
