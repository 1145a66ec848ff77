//! The state of a job, and Slurm's reason for it.

use std::fmt;

/// The state of a job, as `scontrol` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JobState {
    /// The job has ended.
    Ended(EndState),
    /// Slurm kills the job's last processes; the final state is not shown yet.
    Completing,
    /// Any other state: `RUNNING`, `PENDING`, `REQUEUED`, …
    Other(String),
}

/// The state of a job that has ended and will not be requeued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndState {
    /// A node failed to boot for the job.
    BootFail,
    /// The user or an administrator cancelled it.
    Cancelled,
    /// All processes exited with code 0.
    Completed,
    /// Its deadline has passed.
    Deadline,
    /// A process exited with another code.
    Failed,
    /// A node failed.
    NodeFail,
    /// It exceeded its memory.
    OutOfMemory,
    /// Another job took its resources.
    Preempted,
    /// A sibling job of a federation has started instead.
    Revoked,
    /// Its time limit has passed.
    Timeout,
}

const END_STATES: [EndState; 10] = [
    EndState::BootFail,
    EndState::Cancelled,
    EndState::Completed,
    EndState::Deadline,
    EndState::Failed,
    EndState::NodeFail,
    EndState::OutOfMemory,
    EndState::Preempted,
    EndState::Revoked,
    EndState::Timeout,
];

impl EndState {
    /// Slurm's name of the state.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::BootFail => "BOOT_FAIL",
            Self::Cancelled => "CANCELLED",
            Self::Completed => "COMPLETED",
            Self::Deadline => "DEADLINE",
            Self::Failed => "FAILED",
            Self::NodeFail => "NODE_FAIL",
            Self::OutOfMemory => "OUT_OF_MEMORY",
            Self::Preempted => "PREEMPTED",
            Self::Revoked => "REVOKED",
            Self::Timeout => "TIMEOUT",
        }
    }
}

impl fmt::Display for EndState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl JobState {
    /// Slurm's name of the state.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Ended(state) => state.as_str(),
            Self::Completing => "COMPLETING",
            Self::Other(state) => state,
        }
    }
}

impl From<&str> for JobState {
    fn from(text: &str) -> Self {
        let ended = END_STATES.into_iter().find(|state| state.as_str() == text);
        match (ended, text) {
            (Some(state), _) => Self::Ended(state),
            (None, "COMPLETING") => Self::Completing,
            (None, other) => Self::Other(other.to_owned()),
        }
    }
}

/// Why a job is in its state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JobReason {
    /// A node of the job failed.
    NodeDown,
    /// The job reached its time limit.
    TimeLimit,
    /// Any other reason: `Resources`, `Priority`, …
    Other(String),
}

impl From<&str> for JobReason {
    fn from(text: &str) -> Self {
        match text {
            "NodeDown" => Self::NodeDown,
            "TimeLimit" => Self::TimeLimit,
            other => Self::Other(other.to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_keep_their_names() {
        let names = END_STATES.map(EndState::as_str);
        for name in names.into_iter().chain(["COMPLETING", "RUNNING", "NEW"]) {
            assert_eq!(JobState::from(name).as_str(), name);
        }
        assert_eq!(
            JobState::from("TIMEOUT"),
            JobState::Ended(EndState::Timeout)
        );
    }
}
