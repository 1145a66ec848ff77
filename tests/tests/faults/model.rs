//! The effects that faults may have on pods. Any other effect is a defect.

use crate::fault::{End, Fault, Kind, Layer, Target, Victim};
use crate::workload::{deleted_name, pull_name};

/// How often the faults of a round may restart a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Restarts {
    pub least: u64,
    pub most: u64,
}

/// The restarts of a container of a standing pod; `first` if the container is the one that [`Layer::Process`] hits.
pub fn restarts(faults: &[Fault], node: &str, target: Target, first: bool) -> Restarts {
    let hits = |layer: Layer| kills(faults, node, target, layer);
    let mut kills = hits(Layer::Sandbox) + hits(Layer::Inner);
    if first {
        kills += hits(Layer::Process);
    }
    // A sandbox that needs a pull and has no fork server exits, and with it all containers.
    let any = kills + hits(Layer::Process) > 0;
    let lost_puller = any && lost_puller(faults, node, target);
    Restarts {
        // The second of two kills may hit a process that is already terminating.
        least: kills.min(1),
        most: kills + u64::from(lost_puller),
    }
}

/// Whether the next image pull restarts the whole pod. Each of the two fork servers is replaced by the other, unless both were
/// killed at once.
pub fn lost_puller(faults: &[Fault], node: &str, target: Target) -> bool {
    kills(faults, node, target, Layer::Puller) > 1
}

fn kills(faults: &[Fault], node: &str, target: Target, layer: Layer) -> u64 {
    let is_hit = |fault: &&Fault| match fault.kind {
        Kind::Kill(Victim::Pod(host, victim, hit))
        | Kind::KillAtEnd(Victim::Pod(host, victim, hit), ..) => {
            (host, victim, hit) == (node, target, layer)
        }
        _ => false,
    };
    faults.iter().filter(is_hit).count() as u64
}

/// Whether the pod with policy Never may have been killed.
pub fn may_fail(faults: &[Fault], node: &str) -> bool {
    restarts(faults, node, Target::Ends, true).most > 0
}

/// Whether Job pods on this node may fail without being hit: those that start on a full disk may be rejected.
pub fn work_may_fail(faults: &[Fault], node: &str) -> bool {
    disk_was_full(faults, node)
}

/// Whether the disk was full, so that logs may have gaps.
pub fn disk_was_full(faults: &[Fault], node: &str) -> bool {
    faults
        .iter()
        .any(|fault| matches!(fault.kind, Kind::FullDisk(host, _) if host == node))
}

/// The pods that were created for faults that hit image pulls.
pub fn pulls(faults: &[Fault]) -> Vec<String> {
    let made = |(number, fault): (usize, &Fault)| match fault.kind {
        Kind::Kill(Victim::ImagePull(node, ..)) | Kind::Stop(Victim::ImagePull(node, ..), _) => {
            Some(pull_name(number, node))
        }
        _ => None,
    };
    faults.iter().enumerate().filter_map(made).collect()
}

/// The pods that were deleted for the faults of a round.
pub fn deleted(faults: &[Fault]) -> Vec<String> {
    let made = |(number, fault): (usize, &Fault)| match fault.kind {
        Kind::KillAtEnd(victim, End::Deletion, _) => Some(deleted_name(number, victim.node())),
        _ => None,
    };
    faults.iter().enumerate().filter_map(made).collect()
}
