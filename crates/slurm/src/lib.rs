//! The only code that runs Slurm's commands and parses their output.
//!
//! Responsible for: the differences between Slurm 22.05 and the newest release, the environment that Slurm gives
//! to jobs, and turning Slurm's messages into errors with a hint. It deliberately knows nothing of
//! Kubernetes, of containers, or of the programs that it starts.
//!
//! Slurm's output is not trusted: job names, comments and reasons are free text of users and administrators. So every
//! parser here is a pure, bounded function that ignores unknown fields and never panics.
//!
//! Start reading at [`Allocation`] (the job of this process), then [`AgentStep`] (one process on every node of a running job),
//! [`ExactStep`] (one process with resources of its own in a running job), [`Submission`] (a new job) and [`Slurm`] (queries: version, ping, job
//! details, partitions).

#![warn(unused_crate_dependencies)]

mod agent_step;
mod allocation;
mod classify;
mod command;
mod error;
mod exact_step;
pub mod hostlist;
mod invocation;
mod job_detail;
mod job_state;
mod partitions;
mod pending_job;
mod process_markers;
pub mod srun_options;
mod step_list;
mod submission;
mod version;

pub use agent_step::AgentStep;
pub use allocation::{Allocation, JobLocation};
pub use classify::{classify, is_from_slurm, is_noise, node_failure_message, node_without_program};
pub use command::{Slurm, on_path};
pub use error::SlurmError;
pub use exact_step::ExactStep;
pub use hostlist::HostlistError;
pub use invocation::{Invocation, environment_names, is_inherited_by_steps};
pub use job_detail::{Gres, JobDetail, NodeOutcome, NodeShare, parse_gres, parse_job_detail};
pub use job_state::{EndState, JobReason, JobState};
pub use partitions::{Partition, PartitionState, parse_partitions};
pub use pending_job::{PendingJob, parse_queued};
pub use process_markers::JobProcessMarkers;
pub use submission::Submission;
pub use version::SlurmVersion;
