//! Which part of the processes that the user may have on this node is for pods.
//!
//! Where Slurm propagates a limit of processes, it counts all that the user has on the node, in whichever job. A pod that used
//! them all up would take them from the agent and from the control plane too. So the hub's user namespace, in which all pods are,
//! is made with a lower limit, and containers get one that is lower still, so that sandboxes can go on.

/// Reserved for what is not in a pod, at least; it has threads, which count.
const RESERVE: u64 = 256;
/// What a container may have in any case.
const LEAST_OF_CONTAINERS: u64 = 16;
/// With fewer for its pods, a node isn't good for much.
const FEW: u64 = 64;

/// The limit of the hub's user namespace, given that of the job: a tenth is reserved, or [`RESERVE`], but no more than a quarter.
pub fn of_pods(limit: u64) -> u64 {
    limit - (limit / 10).max(RESERVE).min(limit / 4)
}

/// The limit of a container's processes, if all that is not in pods has `outside`: a quarter of the rest is for sandboxes and for
/// other pods.
pub fn of_containers(of_pods: u64, outside: u64) -> u64 {
    let left = of_pods.saturating_sub(outside);
    (left - left / 4).max(LEAST_OF_CONTAINERS)
}

/// Whether what is left for pods is so little that the user should know.
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
