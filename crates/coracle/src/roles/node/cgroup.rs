//! The node's control groups: where the group that the agent was started in is ours to divide, pods are limited by the kernel.
//!
//! ```text
//!   what Slurm gave us           empty
//!   ├ coracle-node               guard, agent, hub, sandboxes
//!   └ coracle-pods
//!     └ pod-UID                  the pod's limits             ┐
//!       └ CONTAINER-N            one run of a container       ┘ made by its sandbox
//! ```
//!
//! The guard divides, before there is anybody else in the group, and undoes it when all others are gone. Agents that it
//! starts later are born into the same place.

use linux::cgroup::{Division, Limits, divide};

const OURS: &str = "coracle-node";
const THEIRS: &str = "coracle-pods";
/// Of the processes that we may have, so many are kept from pods, or a quarter of them: a pod that forks without end must not
/// keep its sandbox from ending it.
const RESERVED_PROCESSES: u64 = 512;

/// Divides the group that this process is in. `None`, with the reason in the log, where that can't be done: then the limits of the
/// Slurm job hold, for all pods together.
pub fn set_up() -> Option<Division> {
    let division = match divide(OURS, THEIRS) {
        Ok(division) => division,
        Err(error) => {
            let error = anyhow::Error::from(error);
            tracing::debug!(
                error = format!("{error:#}"),
                "pods have no control groups of their own"
            );
            return None;
        }
    };
    let limits = Limits {
        processes: division.theirs().most_processes().map(for_pods),
        ..Limits::default()
    };
    if let Err(error) = division.theirs().limit(&limits) {
        tracing::warn!(%error, "cannot limit the number of the pods' processes");
    }
    Some(division)
}

/// How many of `all` processes pods may have.
fn for_pods(all: u64) -> u64 {
    all - (all / 4).min(RESERVED_PROCESSES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_processes_are_kept() {
        assert_eq!([0, 3, 400, 10_000].map(for_pods), [0, 3, 300, 9488]);
    }
}
