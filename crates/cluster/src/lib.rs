//! The life of a cluster, for `coracle run` now and `coracle up` later: its control plane, the enrolment of its nodes, the Slurm
//! steps in which their agents run, and the order of start and stop.
//!
//! Storage, keys and membership are parameters ([`ClusterOptions`]). This crate handles no pods: the caller decides about the work of an agent
//! after enrolment. Start reading at [`Cluster`].

#![warn(unused_crate_dependencies)]

mod agents;
pub mod carry;
pub mod client;
mod cluster;
mod control_plane;
pub mod enrolment;
mod grace;
mod node_plan;
mod node_resources;
mod objects;
mod seed;
mod temporary_control_plane;
pub mod token;

pub use ::control_plane::{ClusterKeys, ClusterStorage};
pub use agents::AGENT_FAILED;
pub use cluster::{Cluster, ClusterEnd, ClusterMembership, ClusterOptions};
pub use control_plane::ControlPlaneProcess;
pub use grace::GracePeriods;
pub use node_plan::NODE_PREFIX_LEN;
pub use seed::ensure as ensure_seed;
pub use temporary_control_plane::TemporaryControlPlane;

use console::{Failure, FailureCode};

/// The environment variable that marks the processes of a cluster's workload, so that they can be found and killed.
pub const WORKLOAD_MARK: &str = "CORACLE_CLUSTER";

/// Converts an error of Slurm for the user.
pub fn slurm_failure(error: slurm::SlurmError) -> Failure {
    let mut failure = Failure::new(FailureCode::Slurm, error.to_string());
    if let Some(hint) = error.hint() {
        failure = failure.with_hint(hint);
    }
    match error {
        slurm::SlurmError::Start { source, .. } => failure.with_source(source),
        _ => failure,
    }
}
