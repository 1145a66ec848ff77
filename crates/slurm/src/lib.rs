//! The only code that runs Slurm's commands and reads what they print.
//!
//! It is responsible for the differences between Slurm 22.05 and the newest release, for the environment that Slurm gives
//! to jobs, and for turning Slurm's complaints into errors that say what to do next. It deliberately knows nothing of
//! Kubernetes, of containers, or of what is started through it.
//!
//! Slurm's output is not trusted: job names, comments and reasons are free text of users and administrators, so every
//! parser here is a pure, bounded function that ignores what it does not understand and never panics.
//!
//! Start reading at [`Allocation`] (where are we?), then [`AgentStep`] (one process on every node of a running job),
//! [`ShareStep`] (one process with a share of a running job), [`Submission`] (a new job) and [`Slurm`] (the questions we ask: version, ping, job details, partitions).

mod allocation;
mod classify;
mod command;
mod error;
mod footprint;
pub mod hostlist;
mod invocation;
mod job;
pub mod options;
mod partitions;
mod share;
mod step;
mod steps;
mod submission;
mod version;

pub use allocation::{Allocation, Place};
pub use classify::{classify, is_noise, lost_node, node_without_program};
pub use command::{Slurm, on_path};
pub use error::SlurmError;
pub use footprint::Footprint;
pub use hostlist::HostlistError;
pub use invocation::{Invocation, is_kept_in_steps};
pub use job::{Gres, JobDetail, NodeShare, parse_gres, parse_job_detail};
pub use partitions::{Partition, parse_partitions};
pub use share::ShareStep;
pub use step::AgentStep;
pub use submission::Submission;
pub use version::Version;
