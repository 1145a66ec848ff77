//! The tasks of an `srun` that don't lead. `srun -N4 coracle run …` starts four of us; one leads and
//! starts an agent on every node by a step of its own, so the others have nothing to do but to end
//! when it ends: some sites kill a step in which one task ends long before the others.

use std::process::{Command, ExitCode, Stdio};

use linux::signal::Held;
use rustix::process::Signal;
use slurm::{Allocation, Place, Slurm};

use crate::carried;

/// The signal that dismisses; every task of the step gets it, and the others ignore it.
const DISMISSAL: &str = "USR1";

/// Waits for the leader's end, or for Slurm's word.
pub fn until_dismissed(allocation: &Allocation) -> anyhow::Result<ExitCode> {
    let held = Held::new(&[Signal::USR1, Signal::TERM, Signal::INT, Signal::HUP])?;
    if matches!(
        allocation.place,
        Place::Task {
            localid: Some(0),
            ..
        }
    ) {
        carried::remove_when_all_have_started();
    }
    held.wait()?;
    Ok(ExitCode::SUCCESS)
}

/// Dismisses the tasks that wait in the same step as this one.
pub fn dismiss_all(allocation: &Allocation) {
    if let Place::Task { tasks, .. } = allocation.place
        && tasks != Some(1)
        && let Some(step) = allocation.step_id
    {
        dismiss(allocation.job_id, step);
    }
}

/// Dismisses the tasks that wait in a step.
pub fn dismiss(job: u32, step: u32) {
    let Ok(slurm) = Slurm::find() else { return };
    // Synchronous and silent: this is the last thing a process does, and the step may be over.
    let _ = Command::new(slurm.scancel)
        .args([
            "--quiet",
            &format!("--signal={DISMISSAL}"),
            &format!("{job}.{step}"),
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
}
