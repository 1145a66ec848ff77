//! The tasks of an `srun` that don't lead. `srun -N4 coracle run …` starts four of us; one leads and
//! starts an agent on every node by a step of its own, so the others have nothing to do but to end
//! when it ends: some sites kill a step in which one task ends long before the others.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use linux::signal::Held;
use rustix::process::Signal;
use slurm::{Allocation, JobLocation, Slurm};

/// The signal that dismisses. Where Slurm signals whole process trees it also reaches the leader's
/// and everything below it, so it must be one that does nothing to those who don't wait for it.
const DISMISSAL: (Signal, &str) = (Signal::URG, "URG");

/// How often a task that waits looks whether its node still has an agent, and for how long there may be none. A leader
/// replaces an agent within seconds: without one for longer, everybody who could dismiss us was killed at once.
const LOOK_EVERY: Duration = Duration::from_secs(5);
const LONGEST_ALONE: Duration = Duration::from_secs(20);

/// Waits for the leader's end, or for Slurm's word.
pub fn until_dismissed(allocation: &Allocation) -> anyhow::Result<ExitCode> {
    let held = Held::new(&[DISMISSAL.0, Signal::TERM, Signal::INT, Signal::HUP])?;
    let job = format!("SLURM_JOB_ID={}", allocation.job_id);
    let mut agent_seen = None;
    while held.wait_for(LOOK_EVERY)?.is_none() {
        if linux::process::is_running(&["internal", "node"], &job)? {
            agent_seen = Some(Instant::now());
        } else if agent_seen.is_some_and(|seen: Instant| seen.elapsed() > LONGEST_ALONE) {
            break;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Dismisses the tasks that wait in the same step as this one.
pub async fn dismiss_all(allocation: &Allocation) {
    if let JobLocation::Task { tasks, .. } = allocation.location
        && tasks != Some(1)
        && let Some(step) = allocation.step_id
    {
        dismiss(allocation.job_id, step).await;
    }
}

/// Dismisses the tasks that wait in a step.
pub async fn dismiss(job: u32, step: u32) {
    let Ok(slurm) = Slurm::find() else { return };
    if let Err(error) = slurm.signal_step(job, step, DISMISSAL.1).await {
        tracing::warn!(%error, job, step, "cannot dismiss the tasks that wait");
    }
}
