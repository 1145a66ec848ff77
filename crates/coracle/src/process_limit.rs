//! Divides the user's process limit (`RLIMIT_NPROC`) between Coracle and pods.
//!
//! Where Slurm propagates a process limit, the kernel counts all processes of the user on the node, in every job. A pod that used
//! them all would starve the agent and the control plane. So the hub's user namespace, which contains all pods, gets a lower
//! limit, and containers get a still lower one, so that sandboxes can continue to fork.

/// Minimum reserved for processes outside of pods. Threads count too.
const MIN_RESERVED: u64 = 256;
/// Minimum limit of a container.
const MIN_CONTAINER_LIMIT: u64 = 16;
/// Warn if fewer processes than this are left for pods.
const WARN_BELOW: u64 = 64;

/// The limit of the hub's user namespace, given the job's limit: reserves a tenth or [`MIN_RESERVED`], but at most a quarter.
pub fn pods_limit(limit: u64) -> u64 {
    limit - (limit / 10).max(MIN_RESERVED).min(limit / 4)
}

/// The limit of a container, given that `outside` processes are not in pods. A quarter of the remainder is reserved for sandboxes
/// and other pods.
pub fn container_limit(pods_limit: u64, outside: u64) -> u64 {
    let available = pods_limit.saturating_sub(outside);
    (available - available / 4).max(MIN_CONTAINER_LIMIT)
}

/// Whether fewer than [`WARN_BELOW`] processes are left for pods.
pub fn is_scarce(pods_limit: u64, outside: u64) -> bool {
    pods_limit.saturating_sub(outside) < WARN_BELOW
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_processes_are_reserved() {
        assert_eq!(pods_limit(4096), 4096 - 409);
        assert_eq!(pods_limit(2000), 2000 - 256);
        assert_eq!(pods_limit(400), 300);
        assert_eq!(pods_limit(0), 0);
        assert_eq!(container_limit(300, 100), 150);
        assert_eq!(container_limit(300, 1000), MIN_CONTAINER_LIMIT);
        assert!(is_scarce(300, 250) && !is_scarce(300, 200));
    }
}
