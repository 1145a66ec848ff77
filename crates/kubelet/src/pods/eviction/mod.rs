//! The eviction manager: evicts pods when their machine is short of memory or disk, one at a time, as upstream's kubelet does.
//!
//! `ranking.rs` selects the pod, and is pure. One difference from upstream: other users may share the machine, and the kubelet
//! cannot remove their files and processes. So only pods that considerably exceed their requests are evicted.

mod ranking;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use pod_protocol::usage::HostResources;
use tokio::time::Instant;

use self::ranking::{EvictionCandidate, choose};
use super::Shared;
use super::spec::{phase, uid};
use crate::node::pressure::{EvictionResource, Shortage, shortages, this_machine};

/// Interval between checks, as in upstream.
const EVICTION_CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// A pod whose sandbox does not report its usage in this time is not considered.
const USAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long an evicted pod may take to end before the next one is evicted.
const EVICTION_TIMEOUT: Duration = Duration::from_secs(30);
/// Pods are evicted only if this many successive checks find the disk full: unused images are removed first.
const MIN_FULL_DISK_CHECKS: u32 = 3;

/// Checks the resources of all machines with pods of this node periodically. Never returns.
pub(super) async fn run(shared: Arc<Shared>) {
    let mut monitor = ShortageMonitor::default();
    loop {
        tokio::time::sleep(EVICTION_CHECK_INTERVAL).await;
        match shared.config.scratch_dir() {
            Some(dir) => {
                let short = monitor.check([(Machine::default(), this_machine(dir))]);
                if let Some((_, shortage)) = short.first() {
                    evict_one(&shared, &candidates(&shared).await, shortage).await;
                }
            }
            // The sandboxes run on other machines, and report those.
            None => {
                let mut machines = by_machine(candidates(&shared).await);
                let newest = |candidates: &Vec<EvictionCandidate>| {
                    let usages = candidates.iter().map(|candidate| &candidate.usage);
                    usages.max_by_key(|usage| usage.at).map(|usage| usage.host)
                };
                let resources = machines.iter().filter_map(|(machine, candidates)| {
                    Some((machine.clone(), newest(candidates)?))
                });
                let short = monitor.check(resources);
                join_all(short.into_iter().map(|(machine, shortage)| {
                    let candidates = machines.remove(&machine).unwrap_or_default();
                    let shared = &shared;
                    async move { evict_one(shared, &candidates, &shortage).await }
                }))
                .await;
            }
        }
    }
}

/// A machine, by its addresses; without any for the kubelet's own.
type Machine = Vec<String>;

/// Groups pods by the machine on which their sandboxes run.
fn by_machine(candidates: Vec<EvictionCandidate>) -> HashMap<Machine, Vec<EvictionCandidate>> {
    let mut machines: HashMap<Machine, Vec<_>> = HashMap::new();
    for candidate in candidates {
        let status = candidate.pod.status.as_ref();
        let ips = status.and_then(|status| status.host_ips.as_ref());
        let machine = ips.into_iter().flatten().map(|ip| ip.ip.clone());
        let machine: Machine = machine.collect();
        // The addresses of a new pod are not known yet.
        if !machine.is_empty() {
            machines.entry(machine).or_default().push(candidate);
        }
    }
    machines
}

/// Decides which shortages call for an eviction.
#[derive(Default)]
struct ShortageMonitor {
    /// The number of successive checks that found the disk full.
    full_disk_checks: HashMap<Machine, u32>,
}

impl ShortageMonitor {
    /// The machines on which a pod has to be evicted, each with its most urgent shortage.
    fn check(
        &mut self,
        machines: impl IntoIterator<Item = (Machine, HostResources)>,
    ) -> Vec<(Machine, Shortage)> {
        let mut full_disk_checks = HashMap::new();
        let mut short = Vec::new();
        for (machine, host) in machines {
            let shortages = shortages(&host);
            let is_disk = |shortage: &Shortage| shortage.resource == EvictionResource::Disk;
            let mut checks = 0;
            if shortages.iter().any(is_disk) {
                checks = 1 + self.full_disk_checks.get(&machine).copied().unwrap_or(0);
                full_disk_checks.insert(machine.clone(), checks);
            }
            // Memory first: without it the kernel kills processes, also those outside of pods.
            let urgent = (shortages.into_iter())
                .find(|shortage| !is_disk(shortage) || checks >= MIN_FULL_DISK_CHECKS);
            short.extend(urgent.map(|shortage| (machine, shortage)));
        }
        self.full_disk_checks = full_disk_checks;
        short
    }
}

/// The pods that have not ended, with their usage.
async fn candidates(shared: &Shared) -> Vec<EvictionCandidate> {
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
    join_all(requests).await.into_iter().flatten().collect()
}

async fn evict_one(shared: &Shared, candidates: &[EvictionCandidate], shortage: &Shortage) {
    let Some((candidate, failure)) = choose(candidates, shortage) else {
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

#[cfg(test)]
mod tests;
