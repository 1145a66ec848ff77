//! Queries kubelets on demand, and caches the resulting usage.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::cluster_source::ClusterSource;
use crate::rates::{ClusterUsage, CounterSample};

/// How long usage is served from the cache. Autoscalers poll at this interval.
const CACHE_TTL: Duration = Duration::from_secs(15);
/// Oldest sample that may serve as the start of a rate.
const MAX_SAMPLE_AGE: Duration = Duration::from_secs(90);
/// Time between two samples if there is no earlier one.
const USAGE_SAMPLE_INTERVAL: Duration = Duration::from_millis(1500);

/// The usage of all nodes and pods, computed from two samples of the kubelets' counters.
pub(crate) struct UsageCache<S> {
    source: S,
    entry: Mutex<Option<CacheEntry>>,
}

struct CacheEntry {
    last_sample: CounterSample,
    sampled_at: Instant,
    usage: Arc<ClusterUsage>,
}

impl<S: ClusterSource> UsageCache<S> {
    pub(crate) fn new(source: S) -> Self {
        Self {
            source,
            entry: Mutex::default(),
        }
    }

    /// The current usage. Concurrent callers wait for the same query.
    pub(crate) async fn usage(&self) -> Arc<ClusterUsage> {
        let mut entry = self.entry.lock().await;
        if let Some(entry) = entry
            .as_ref()
            .filter(|entry| entry.sampled_at.elapsed() < CACHE_TTL)
        {
            return Arc::clone(&entry.usage);
        }
        let earlier = match entry.take() {
            Some(entry) if entry.sampled_at.elapsed() <= MAX_SAMPLE_AGE => entry.last_sample,
            _ => {
                let first = self.sample().await;
                tokio::time::sleep(USAGE_SAMPLE_INTERVAL).await;
                first
            }
        };
        let last_sample = self.sample().await;
        let usage = Arc::new(last_sample.usage_since(&earlier));
        *entry = Some(CacheEntry {
            last_sample,
            sampled_at: Instant::now(),
            usage: Arc::clone(&usage),
        });
        usage
    }

    async fn sample(&self) -> CounterSample {
        CounterSample::new(self.source.summaries().await)
    }

    pub(crate) fn source(&self) -> &S {
        &self.source
    }
}
