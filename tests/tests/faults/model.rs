//! The effects that faults may have on pods. Any other effect is a defect.

use crate::fault::{Fault, FaultKind, PodProcess, Target, Termination, Victim};
use crate::workload::{deleted_name, pull_name};

/// How often the faults of a round may restart a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Restarts {
    pub least: u64,
    pub most: u64,
}

/// The restarts of a container of a long-running pod; `first` if the container is the one that [`PodProcess::Container`] hits.
pub fn restarts(faults: &[Fault], node: &str, target: Target, first: bool) -> Restarts {
    let hits = |process: PodProcess| kills(faults, node, target, process);
    let mut kills = hits(PodProcess::Sandbox) + hits(PodProcess::Inner);
    if first {
        kills += hits(PodProcess::Container);
    }
    // A sandbox that needs a pull and has no fork server exits, and with it all containers.
    let any = kills + hits(PodProcess::Container) > 0;
    let lost_fork_servers = any && lost_fork_servers(faults, node, target);
    Restarts {
        // The second of two kills may hit a process that is already terminating.
        least: kills.min(1),
        most: kills + u64::from(lost_fork_servers),
    }
}

/// Whether the next image pull restarts the whole pod. Each of the two fork servers is replaced by the other, unless both were
/// killed at once.
pub fn lost_fork_servers(faults: &[Fault], node: &str, target: Target) -> bool {
    kills(faults, node, target, PodProcess::ForkServer) > 1
}

fn kills(faults: &[Fault], node: &str, target: Target, process: PodProcess) -> u64 {
    let is_hit = |fault: &&Fault| match fault.kind {
        FaultKind::Kill(Victim::Pod(host, victim, hit))
        | FaultKind::KillAtTermination(Victim::Pod(host, victim, hit), ..) => {
            (host, victim, hit) == (node, target, process)
        }
        _ => false,
    };
    faults.iter().filter(is_hit).count() as u64
}

/// Whether the pod with policy Never may have been killed.
pub fn may_fail(faults: &[Fault], node: &str) -> bool {
    restarts(faults, node, Target::Ends, true).most > 0
}

/// Whether Job pods on this node may fail without a fault of their own: the node may reject those that start on a full disk.
pub fn work_may_fail(faults: &[Fault], node: &str) -> bool {
    disk_was_full(faults, node)
}

/// Whether the disk was full, so that logs may have gaps.
pub fn disk_was_full(faults: &[Fault], node: &str) -> bool {
    faults
        .iter()
        .any(|fault| matches!(fault.kind, FaultKind::FullDisk(host, _) if host == node))
}

/// The pods that were created for faults during image pulls.
pub fn pulling_pods(faults: &[Fault]) -> Vec<String> {
    let created = |(number, fault): (usize, &Fault)| match fault.kind {
        FaultKind::Kill(Victim::ImagePull(node, ..))
        | FaultKind::Stop(Victim::ImagePull(node, ..), _) => Some(pull_name(number, node)),
        _ => None,
    };
    faults.iter().enumerate().filter_map(created).collect()
}

/// The pods that were deleted for the faults of a round.
pub fn deleted_pods(faults: &[Fault]) -> Vec<String> {
    let created = |(number, fault): (usize, &Fault)| match fault.kind {
        FaultKind::KillAtTermination(victim, Termination::Deletion, _) => {
            Some(deleted_name(number, victim.node()))
        }
        _ => None,
    };
    faults.iter().enumerate().filter_map(created).collect()
}
