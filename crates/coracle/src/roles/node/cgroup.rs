//! The node's cgroups: where the agent's cgroup is delegated to the user, the kernel enforces the pods' limits.
//!
//! ```text
//!   the step's cgroup            empty
//!   ├ coracle-node               guard, agent, hub, sandboxes
//!   └ coracle-pods
//!     └ pod-UID                  the pod's limits             ┐
//!       └ CONTAINER-N            one run of a container       ┘ created by its sandbox
//! ```
//!
//! The guard creates them while it is the only process in the cgroup, and removes them after all other processes have exited.
//! Agents that it restarts are forked into `coracle-node`.

use linux::cgroup::{Division, Limits, divide};

const OURS: &str = "coracle-node";
const THEIRS: &str = "coracle-pods";
/// Processes reserved for Coracle, or a quarter of the limit if that is less: a fork bomb in a pod must not prevent its sandbox from
/// stopping it.
const RESERVED_PROCESSES: u64 = 512;

/// Divides the cgroup of this process. Returns `None` and logs the reason where that is impossible; then the limits of the Slurm job
/// apply to all pods together.
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

/// The number of `all` processes that pods may have.
fn for_pods(all: u64) -> u64 {
    all - (all / 4).min(RESERVED_PROCESSES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_processes_are_reserved() {
        assert_eq!([0, 3, 400, 10_000].map(for_pods), [0, 3, 300, 9488]);
    }
}
