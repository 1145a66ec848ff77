//! Why a cluster ends, for the user.

use std::time::Duration;

use rustix::process::Signal;
use slurm::{EndState, JobDetail, JobReason, JobState, Slurm};

/// Time for Slurm to respond, while the pods end.
const SLURM_TIMEOUT: Duration = Duration::from_secs(5);
const JOB_DETAIL_RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// What made the leader end the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EndCause {
    /// All Jobs and Pods have ended.
    WorkloadDone,
    /// Pods could not run.
    GaveUp,
    /// A signal, or Slurm's signal to an agent.
    Signal(Signal),
    /// The control plane failed. An error message follows.
    ClusterFailed,
}

/// Describes why the cluster ends. Asks Slurm if that ended the job.
pub async fn describe_end(
    cause: &EndCause,
    lost_nodes: &[String],
    slurm: &Slurm,
    job: u32,
) -> String {
    let detail = match cause {
        EndCause::Signal(Signal::TERM) => {
            tokio::time::timeout(SLURM_TIMEOUT, job_detail(slurm, job))
                .await
                .ok()
        }
        _ => None,
    };
    describe(cause, lost_nodes, detail.as_ref())
}

/// Asks Slurm again until it responds: Slurm signals all processes of the step, also `scontrol`, and at the time limit more than once.
async fn job_detail(slurm: &Slurm, job: u32) -> JobDetail {
    loop {
        match slurm.job_detail(job).await {
            Ok(detail) => return detail,
            Err(error) => tracing::debug!(%error, job, "cannot read the job's state"),
        }
        tokio::time::sleep(JOB_DETAIL_RETRY_INTERVAL).await;
    }
}

fn describe(cause: &EndCause, lost_nodes: &[String], detail: Option<&JobDetail>) -> String {
    let mut text = match cause {
        EndCause::WorkloadDone => "the workload is done".to_owned(),
        EndCause::GaveUp => "pods could not run".to_owned(),
        EndCause::Signal(Signal::INT) => "interrupted (Ctrl-C)".to_owned(),
        EndCause::Signal(Signal::HUP) => "the terminal was closed".to_owned(),
        EndCause::Signal(Signal::TERM) => end_of_job(detail),
        EndCause::Signal(signal) => format!("received signal {}", signal.as_raw()),
        EndCause::ClusterFailed => "the control plane failed".to_owned(),
    };
    if !lost_nodes.is_empty() {
        text.push_str(&format!("; lost nodes: {}", lost_nodes.join(", ")));
    }
    text
}

fn end_of_job(detail: Option<&JobDetail>) -> String {
    let state = detail.and_then(|detail| detail.state.as_ref());
    let reason = detail.and_then(|detail| detail.reason.as_ref());
    match (state, reason) {
        (Some(JobState::Ended(EndState::Timeout | EndState::Deadline)), _)
        | (_, Some(JobReason::TimeLimit)) => "the job reached its time limit",
        (Some(JobState::Ended(EndState::Preempted)), _) => "the job was preempted",
        (Some(JobState::Ended(EndState::NodeFail | EndState::BootFail)), _)
        | (_, Some(JobReason::NodeDown)) => "a node of the job was lost",
        (Some(JobState::Ended(EndState::Cancelled)), _) => "the job was cancelled (scancel)",
        // Slurm hides the state while the job's last processes end.
        (Some(JobState::Completing), None) => "the job was cancelled (scancel or preemption)",
        (Some(JobState::Other(state)), _) if state == "RUNNING" => "the step was terminated",
        _ => "Slurm ended the job",
    }
    .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slurm_shows_why_the_job_ended() {
        for (state, reason, expected) in [
            ("COMPLETING", "TimeLimit", "time limit"),
            ("TIMEOUT", "None", "time limit"),
            ("COMPLETING", "None", "scancel"),
            ("CANCELLED", "None", "scancel"),
            ("PREEMPTED", "None", "preempted"),
            ("COMPLETING", "NodeDown", "node of the job was lost"),
            ("RUNNING", "None", "step"),
        ] {
            let shown = format!("JobId=3 JobName=x\n   JobState={state} Reason={reason}\n");
            let detail = slurm::parse_job_detail(&shown).unwrap();
            let cause = EndCause::Signal(Signal::TERM);
            let text = describe(&cause, &[], Some(&detail));
            assert!(text.contains(expected), "{state} {reason}: {text}");
        }
        let unknown = describe(&EndCause::Signal(Signal::TERM), &[], None);
        assert_eq!(unknown, "Slurm ended the job");
    }

    #[test]
    fn lost_nodes_are_named() {
        let text = describe(&EndCause::WorkloadDone, &["node2".to_owned()], None);
        assert_eq!(text, "the workload is done; lost nodes: node2");
        let text = describe(&EndCause::Signal(Signal::INT), &[], None);
        assert_eq!(text, "interrupted (Ctrl-C)");
    }
}
