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

use linux::cgroup::{CgroupLimits, DelegatedCgroup};

const AGENT_CGROUP: &str = "coracle-node";
const PODS_CGROUP: &str = "coracle-pods";
/// Processes reserved for Coracle, or a quarter of the limit if that is less: a fork bomb in a pod must not prevent its sandbox from
/// stopping it.
const RESERVED_PROCESSES: u64 = 512;

/// Sets up the cgroups of this node. Returns `None` and logs the reason where that is impossible; then the limits of the Slurm job
/// apply to all pods together.
pub fn set_up() -> Option<DelegatedCgroup> {
    let delegated = match DelegatedCgroup::set_up(AGENT_CGROUP, PODS_CGROUP) {
        Ok(delegated) => delegated,
        Err(error) => {
            let error = anyhow::Error::from(error);
            tracing::debug!(
                error = format!("{error:#}"),
                "pods have no cgroups of their own"
            );
            return None;
        }
    };
    let limits = CgroupLimits {
        processes: delegated.workloads().pids_max().map(pods_limit),
        ..CgroupLimits::default()
    };
    if let Err(error) = delegated.workloads().set_limits(&limits) {
        tracing::warn!(%error, "cannot limit the number of pods' processes");
    }
    Some(delegated)
}

/// The limit on the pods' processes, given that of the whole cgroup.
fn pods_limit(total: u64) -> u64 {
    total - (total / 4).min(RESERVED_PROCESSES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_processes_are_reserved() {
        assert_eq!([0, 3, 400, 10_000].map(pods_limit), [0, 3, 300, 9488]);
    }
}
