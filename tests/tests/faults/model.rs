//! What faults may do to pods. Everything else is a defect.

use crate::plan::{Fault, Kind, Layer, Target, Victim};

/// How often a container may have been restarted by the faults of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Restarts {
    pub least: u64,
    pub most: u64,
}

/// The restarts of a container of a standing pod; `first` if it is the one that [`Layer::Process`] means.
pub fn restarts(faults: &[Fault], node: &str, target: Target, first: bool) -> Restarts {
    let kills = faults
        .iter()
        .filter(|fault| match fault.kind {
            Kind::Kill(Victim::Pod(host, victim, layer)) => {
                host == node && victim == target && (first || layer != Layer::Process)
            }
            _ => false,
        })
        .count() as u64;
    // The second of two kills may hit what is about to end anyway.
    Restarts {
        least: kills.min(1),
        most: kills,
    }
}

/// Whether a pod of policy Never may have been killed.
pub fn may_fail(faults: &[Fault], node: &str) -> bool {
    restarts(faults, node, Target::Ends, true).most > 0
}

/// Whether pods of a Job on this node may fail that no fault hit itself: those that start on a full disk may be refused.
pub fn work_may_fail(faults: &[Fault], node: &str) -> bool {
    disk_was_full(faults, node)
}

/// Whether logs may lack what was said meanwhile.
pub fn disk_was_full(faults: &[Fault], node: &str) -> bool {
    faults
        .iter()
        .any(|fault| matches!(fault.kind, Kind::FullDisk(host, _) if host == node))
}

/// Whether this node's image-pull was a victim, so that there is a pod whose image it unpacks.
pub fn pulls(faults: &[Fault], node: &str) -> bool {
    faults.iter().any(|fault| match fault.kind {
        Kind::Kill(Victim::ImagePull(host)) | Kind::Stop(Victim::ImagePull(host), _) => {
            host == node
        }
        _ => false,
    })
}
