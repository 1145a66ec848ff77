//! Ends pods when the machine runs out of memory or disk, one at a time, as upstream's kubelet does.
//!
//! `choice.rs` says who goes, and is pure. One thing differs from upstream: a machine may be shared with other users, whose
//! files and processes nobody here can end. So only a pod that uses more than it asked for, and enough to matter, goes.

mod choice;

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use tokio::time::Instant;

pub(crate) use self::choice::NODE_LOW;
use self::choice::{Candidate, choose};
use super::Shared;
use super::spec::{is_final, phase, uid};
use crate::pressure::{Resource, Shortage, shortages};

/// How often it is looked, as upstream.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// A sandbox that doesn't tell in this time what its pod uses is left out.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long an evicted pod may take to end before the next goes.
const END_PATIENCE: Duration = Duration::from_secs(30);
/// Images that nobody uses go before pods do; this many looks in a row must find the disk full.
const DISK_LOOKS: u32 = 3;

/// Looks after the machine for ever.
pub(super) async fn keep_room(shared: Arc<Shared>) {
    let mut full_disks = 0;
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let short = shortages(&shared.config.scratch_dir);
        let disk = short.iter().any(|short| short.resource == Resource::Disk);
        full_disks = if disk { full_disks + 1 } else { 0 };
        // Memory first: want of it ends more than pods.
        let next = short.into_iter().find(|short| match short.resource {
            Resource::Memory => true,
            Resource::Disk => full_disks >= DISK_LOOKS,
        });
        if let Some(shortage) = next {
            evict_one(&shared, &shortage).await;
        }
    }
}

async fn evict_one(shared: &Shared, shortage: &Shortage) {
    let asked = shared
        .known
        .sandboxes()
        .into_iter()
        .filter(|(pod, _)| !is_final(phase(pod)))
        .map(|(pod, sandbox)| async move {
            let usage = tokio::time::timeout(PATIENCE, sandbox?.usage()).await;
            let usage = usage.ok()?.ok()?;
            Some(Candidate { pod, usage })
        });
    let candidates: Vec<_> = join_all(asked).await.into_iter().flatten().collect();
    let Some((candidate, problem)) = choose(&candidates, shortage) else {
        tracing::warn!(
            ?shortage,
            "the machine is short, and no pod of this node is to blame"
        );
        return;
    };
    let uid = uid(&candidate.pod).to_owned();
    tracing::warn!(
        pod = super::spec::full_name(&candidate.pod),
        message = problem.message,
        "evicting a pod"
    );
    shared.evicted.send_modify(|evicted| {
        evicted.insert(uid.clone(), problem);
    });
    let until = Instant::now() + END_PATIENCE;
    while Instant::now() < until {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let ended = shared
            .known
            .shown(&uid)
            .is_none_or(|pod| is_final(phase(&pod)));
        if ended {
            break;
        }
    }
    shared.evicted.send_modify(|evicted| {
        evicted.remove(&uid);
    });
}
