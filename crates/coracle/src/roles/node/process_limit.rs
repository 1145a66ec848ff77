//! Divides the user's process limit (`RLIMIT_NPROC`) between Coracle and pods.
//!
//! Where Slurm propagates a process limit, the kernel counts all processes of the user on the node, in every job. A pod that used
//! them all would starve the agent and the control plane. So the hub's user namespace, which contains all pods, gets a lower
//! limit, and containers get a still lower one, so that sandboxes can continue to fork.

/// Minimum reserved for processes outside of pods. Threads count too.
const RESERVE: u64 = 256;
/// Minimum limit of a container.
const LEAST_OF_CONTAINERS: u64 = 16;
/// Warn if fewer processes than this are left for pods.
const FEW: u64 = 64;

/// The limit of the hub's user namespace, given the job's limit: reserves a tenth or [`RESERVE`], but at most a quarter.
pub fn of_pods(limit: u64) -> u64 {
    limit - (limit / 10).max(RESERVE).min(limit / 4)
}

/// The limit of a container, given that `outside` processes are not in pods. A quarter of the remainder is reserved for sandboxes
/// and other pods.
pub fn of_containers(of_pods: u64, outside: u64) -> u64 {
    let left = of_pods.saturating_sub(outside);
    (left - left / 4).max(LEAST_OF_CONTAINERS)
}

/// Whether so few processes are left for pods that the user should be warned.
pub fn is_scarce(of_pods: u64, outside: u64) -> bool {
    of_pods.saturating_sub(outside) < FEW
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_processes_are_reserved() {
        assert_eq!(of_pods(4096), 4096 - 409);
        assert_eq!(of_pods(2000), 2000 - 256);
        assert_eq!(of_pods(400), 300);
        assert_eq!(of_pods(0), 0);
        assert_eq!(of_containers(300, 100), 150);
        assert_eq!(of_containers(300, 1000), LEAST_OF_CONTAINERS);
        assert!(is_scarce(300, 250) && !is_scarce(300, 200));
    }
}
