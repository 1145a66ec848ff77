//! A bounded cache with a TTL per entry.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

/// Unauthenticated clients can add entries with made-up tokens, so the cache is small.
const MAX_ENTRIES: usize = 4096;

/// A map whose entries expire.
pub(super) struct Cache<K, V>(Mutex<HashMap<K, (V, Instant)>>);

impl<K: Eq + Hash, V: Clone> Cache<K, V> {
    pub(super) fn new() -> Self {
        Self(Mutex::new(HashMap::new()))
    }

    pub(super) fn get(&self, key: &K) -> Option<V> {
        let entries = self.0.lock().unwrap();
        let (value, until) = entries.get(key)?;
        (*until > Instant::now()).then(|| value.clone())
    }

    pub(super) fn put(&self, key: K, value: V, ttl: Duration) {
        let now = Instant::now();
        let mut entries = self.0.lock().unwrap();
        if entries.len() >= MAX_ENTRIES {
            entries.retain(|_, (_, until)| *until > now);
        }
        if entries.len() >= MAX_ENTRIES {
            // Only an attack fills the cache with unexpired entries. Clearing it costs only repeated reviews.
            entries.clear();
        }
        entries.insert(key, (value, now + ttl));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn entries_expire_after_their_ttl() {
        let cache = Cache::new();
        cache.put("key", 1, Duration::from_secs(30));
        tokio::time::advance(Duration::from_secs(29)).await;
        assert_eq!(cache.get(&"key"), Some(1));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(cache.get(&"key"), None);
    }

    #[test]
    fn size_stays_within_the_limit() {
        let cache = Cache::new();
        for key in 0..=MAX_ENTRIES {
            cache.put(key, (), Duration::from_secs(30));
        }
        assert!(cache.0.lock().unwrap().len() <= MAX_ENTRIES);
        assert_eq!(cache.get(&MAX_ENTRIES), Some(()));
    }
}
