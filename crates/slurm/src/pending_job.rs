//! Why a job is pending and when it may start, from `squeue`.

/// Fields separated by bars; the reason may contain spaces and commas.
pub(crate) const SQUEUE_FORMAT: &str = "--format=%T|%S|%r";

/// A job that waits in the queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PendingJob {
    /// Slurm's word for the reason: `Resources`, `Priority`, …; `None` before the scheduler has looked at the job.
    pub reason: Option<String>,
    /// When Slurm expects it to start, in seconds since 1970; `None` without an estimate.
    pub start_time: Option<u64>,
}

impl PendingJob {
    /// What the reason means, for the common ones.
    pub fn explanation(&self) -> Option<&'static str> {
        let reason = self.reason.as_deref()?;
        Some(match reason {
            "Resources" => "it waits for nodes to become free",
            "Priority" => "jobs of higher priority are before it",
            "Dependency" => "it waits for another job",
            "BeginTime" => "its --begin time has not come",
            "JobHeldUser" => "it is held: `scontrol release` lets it start",
            "JobHeldAdmin" => "an administrator holds it",
            "PartitionDown" | "PartitionInactive" => "its partition starts no jobs now",
            "PartitionNodeLimit" => "it requests more nodes than the partition allows",
            "PartitionTimeLimit" => "its --time is longer than the partition allows",
            "Reservation" => "it waits for its reservation",
            _ if reason.starts_with("ReqNodeNotAvail") => "a node that it needs is not available",
            _ if reason.starts_with("QOS") || reason.starts_with("Assoc") => {
                "a limit of your account or QOS is reached"
            }
            _ => return None,
        })
    }
}

/// Parses the line `PENDING|1794946176|Resources` of a job; `None` if it is not pending.
pub(crate) fn parse_pending_job(text: &str) -> Option<PendingJob> {
    let line = text.lines().find(|line| line.starts_with("PENDING|"))?;
    let mut fields = line.splitn(3, '|').skip(1).map(str::trim);
    let start_time = fields.next()?.parse().ok();
    let reason = fields.next()?.trim_start_matches('(').trim_end_matches(')');
    Some(PendingJob {
        reason: Some(crate::error::sanitize(reason)).filter(|_| !["", "None"].contains(&reason)),
        start_time,
    })
}

/// The job in srun's line `srun: job 12 queued and waiting for resources`.
pub fn parse_queued(line: &str) -> Option<u32> {
    let rest = line.trim_end().strip_prefix("srun: job ")?;
    let id = rest.strip_suffix(" queued and waiting for resources")?;
    id.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pending_jobs_are_parsed() {
        let parse = |line: &str| {
            let job = parse_pending_job(line)?;
            Some(format!(
                "{} {} {}",
                job.reason.as_deref().unwrap_or("-"),
                job.start_time.unwrap_or_default(),
                job.explanation().unwrap_or("-")
            ))
        };
        let lines = [
            "PENDING|1794946176|Resources",
            "PENDING|N/A|None",
            "PENDING|N/A|(ReqNodeNotAvail, UnavailableNodes:node1)",
            "PENDING|N/A|QOSMaxCpuPerUserLimit",
            "PENDING|N/A|Odd\u{1b}[2J",
            "RUNNING|1794945876|None",
            "",
            "PENDING",
        ];
        let parsed = lines.map(|line| parse(line).unwrap_or_else(|| "not pending".to_owned()));
        insta::assert_snapshot!(parsed.join("\n"), @r"
        Resources 1794946176 it waits for nodes to become free
        - 0 -
        ReqNodeNotAvail, UnavailableNodes:node1 0 a node that it needs is not available
        QOSMaxCpuPerUserLimit 0 a limit of your account or QOS is reached
        Odd [2J 0 -
        not pending
        not pending
        not pending
        ");
    }

    #[test]
    fn queued_job_is_read_from_sruns_message() {
        let line = "srun: job 12 queued and waiting for resources\n";
        assert_eq!(parse_queued(line), Some(12));
        assert_eq!(
            parse_queued("srun: job 12 has been allocated resources"),
            None
        );
        assert_eq!(
            parse_queued("job 12 queued and waiting for resources"),
            None
        );
    }
}
