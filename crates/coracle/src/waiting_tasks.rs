//! The tasks of an `srun` that are not the leader.
//!
//! `srun -N4 coracle run …` starts four tasks. One becomes the leader and starts the agents on all nodes as a step of its own.
//! The other tasks must run until the leader exits: some sites kill a step if one of its tasks exits long before the others.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use linux::signal::BlockedSignals;
use rustix::process::Signal;
use slurm::{Allocation, JobLocation, Slurm};

/// The signal on which waiting tasks exit. Slurm may send it to whole process trees, including the leader's, so its default
/// action must be to ignore it.
const END_SIGNAL: (Signal, &str) = (Signal::URG, "URG");

/// How often a waiting task checks for an agent on its node, and how long an agent may be missing. The leader replaces an agent
/// within seconds. After this time-out, the leader and all agents were killed at once, and no signal will come. The first agent is looked
/// for more often: if it were killed before a check has seen it, the task would wait for ever.
const FIRST_AGENT_POLL_INTERVAL: Duration = Duration::from_secs(1);
const AGENT_POLL_INTERVAL: Duration = Duration::from_secs(5);
const MISSING_AGENT_TIMEOUT: Duration = Duration::from_secs(20);

/// Waits until the leader ends this task, Slurm ends the job, or the cluster's processes are gone.
pub fn wait_for_end(allocation: &Allocation) -> anyhow::Result<ExitCode> {
    let blocked = BlockedSignals::new(&[END_SIGNAL.0, Signal::TERM, Signal::INT, Signal::HUP])?;
    let job = format!("SLURM_JOB_ID={}", allocation.job_id);
    let mut agent_seen = None;
    let mut interval = FIRST_AGENT_POLL_INTERVAL;
    while blocked.wait_timeout(interval)?.is_none() {
        if linux::process::is_running(&["internal", "node"], &job)? {
            agent_seen = Some(Instant::now());
            interval = AGENT_POLL_INTERVAL;
        } else if agent_seen.is_some_and(|seen: Instant| seen.elapsed() > MISSING_AGENT_TIMEOUT) {
            break;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Ends the waiting tasks of the step that this process is in.
pub async fn end_all(allocation: &Allocation) {
    if let JobLocation::Task { tasks, .. } = allocation.location
        && tasks != Some(1)
        && let Some(step) = allocation.step_id
    {
        end_step(allocation.job_id, step).await;
    }
}

/// Ends the waiting tasks of a step.
pub async fn end_step(job: u32, step: u32) {
    let Ok(slurm) = Slurm::find() else { return };
    if let Err(error) = slurm.signal_step(job, step, END_SIGNAL.1).await {
        tracing::warn!(%error, job, step, "cannot end waiting tasks");
    }
}
