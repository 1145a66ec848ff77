//! The eviction manager: evicts pods when the machine is short of memory or disk, one at a time, as upstream's kubelet does.
//!
//! `ranking.rs` selects the pod, and is pure. One difference from upstream: other users may share the machine, and the kubelet
//! cannot remove their files and processes. So only pods that considerably exceed their requests are evicted.

mod ranking;

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use tokio::time::Instant;

use self::ranking::{EvictionCandidate, choose};
use super::Shared;
use super::spec::{phase, uid};
use crate::node::pressure::{EvictionResource, Shortage, shortages};

/// Interval between checks, as in upstream.
const EVICTION_CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// A pod whose sandbox does not report its usage in this time is not considered.
const USAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long an evicted pod may take to end before the next one is evicted.
const EVICTION_TIMEOUT: Duration = Duration::from_secs(30);
/// Pods are evicted only if this many successive checks find the disk full: unused images are removed first.
const MIN_FULL_DISK_CHECKS: u32 = 3;

/// Checks the machine's resources periodically. Never returns.
pub(super) async fn run(shared: Arc<Shared>) {
    let mut full_disk_checks = 0;
    loop {
        tokio::time::sleep(EVICTION_CHECK_INTERVAL).await;
        let shortages = shortages(shared.config.scratch_dir());
        let disk = shortages
            .iter()
            .any(|shortage| shortage.resource == EvictionResource::Disk);
        full_disk_checks = if disk { full_disk_checks + 1 } else { 0 };
        // Memory first: without it the kernel kills processes, also those outside of pods.
        let next = shortages
            .into_iter()
            .find(|shortage| match shortage.resource {
                EvictionResource::Memory => true,
                EvictionResource::Disk => full_disk_checks >= MIN_FULL_DISK_CHECKS,
            });
        if let Some(shortage) = next {
            evict_one(&shared, &shortage).await;
        }
    }
}

async fn evict_one(shared: &Shared, shortage: &Shortage) {
    let requests = shared
        .pod_manager
        .pods_with_sandboxes()
        .into_iter()
        .filter(|(pod, _)| !phase(pod).is_terminal())
        .map(|(pod, sandbox)| async move {
            let usage = tokio::time::timeout(USAGE_TIMEOUT, sandbox?.usage()).await;
            let usage = usage.ok()?.ok()?;
            Some(EvictionCandidate { pod, usage })
        });
    let candidates: Vec<_> = join_all(requests).await.into_iter().flatten().collect();
    let Some((candidate, failure)) = choose(&candidates, shortage) else {
        tracing::warn!(
            ?shortage,
            "the machine is short of a resource, and no pod of this node exceeds its requests"
        );
        return;
    };
    let uid = uid(&candidate.pod).to_owned();
    tracing::warn!(
        pod = super::spec::full_name(&candidate.pod),
        message = failure.message,
        "evicting pod"
    );
    shared.evictions.send_modify(|evictions| {
        evictions.insert(uid.clone(), failure);
    });
    let until = Instant::now() + EVICTION_TIMEOUT;
    while Instant::now() < until {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let ended = shared
            .pod_manager
            .get(&uid)
            .is_none_or(|pod| phase(&pod).is_terminal());
        if ended {
            break;
        }
    }
    shared.evictions.send_modify(|evictions| {
        evictions.remove(&uid);
    });
}
