//! While a job is queued: prints Slurm's reason and the expected start, whenever one of them changes.

use console::print_stderr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use slurm::{PendingJob, Slurm};
use tokio::sync::mpsc;

/// The interval of queries doubles from the first to the last, to spare Slurm's controller.
const FIRST_INTERVAL: Duration = Duration::from_secs(2);
const LAST_INTERVAL: Duration = Duration::from_secs(60);

/// Waits until `queued_jobs` names a job, then watches that job until the channel is closed or the job is no longer pending.
pub async fn watch(slurm: Slurm, mut queued_jobs: mpsc::UnboundedReceiver<u32>) {
    let Some(job) = queued_jobs.recv().await else {
        return;
    };
    let mut interval = FIRST_INTERVAL;
    let mut printed = None;
    loop {
        match slurm.pending_job(job).await {
            Ok(Some(pending)) => {
                let shown = Some(significant(&pending));
                if printed != shown {
                    print_stderr(format_args!("{}", describe(job, &pending, unix_time())));
                    printed = shown;
                }
            }
            Ok(None) => return,
            // The next query may succeed; srun reports errors that end the job.
            Err(error) => tracing::debug!(%error, job, "cannot read the state of a queued job"),
        }
        tokio::select! {
            _ = queued_jobs.recv() => return,
            () = tokio::time::sleep(interval) => {}
        }
        interval = (interval * 2).min(LAST_INTERVAL);
    }
}

/// The part of a state whose change is worth a line. Estimates vary by seconds.
fn significant(pending: &PendingJob) -> (Option<String>, Option<u64>) {
    let minute = pending.start_time.map(|start| start / 60);
    (pending.reason.clone(), minute)
}

/// `coracle: job 12 is queued (Resources: it waits for nodes to become free); Slurm expects it to start in about 5 min`
fn describe(job: u32, pending: &PendingJob, now: u64) -> String {
    let reason = match (pending.reason.as_deref(), pending.explanation()) {
        (Some(reason), Some(explanation)) => format!(" ({reason}: {explanation})"),
        (Some(reason), None) => format!(" ({reason})"),
        (None, _) => String::new(),
    };
    let start = match pending.start_time {
        Some(start) => format!(
            "Slurm expects it to start in {}",
            about(start.saturating_sub(now))
        ),
        None => "Slurm has no estimate of its start yet".to_owned(),
    };
    format!("coracle: job {job} is queued{reason}; {start}; Ctrl-C cancels it")
}

/// A duration for people.
fn about(seconds: u64) -> String {
    match seconds {
        0..60 => "less than a minute".to_owned(),
        60..7200 => format!("about {} min", seconds.div_ceil(60)),
        7200..172_800 => format!("about {} h", seconds.div_ceil(3600)),
        _ => format!("about {} days", seconds.div_ceil(86_400)),
    }
}

fn unix_time() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
    since_epoch.map_or(0, |time| time.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_name_reason_and_expected_start() {
        let line = |reason: Option<&str>, start_time| {
            let reason = reason.map(str::to_owned);
            describe(12, &PendingJob { reason, start_time }, 1_000_000)
        };
        let lines = [
            line(Some("Resources"), Some(1_000_290)),
            line(Some("Priority"), None),
            line(Some("Odd"), Some(999_000)),
            line(None, Some(1_100_000)),
        ];
        insta::assert_snapshot!(lines.join("\n"), @r"
        coracle: job 12 is queued (Resources: it waits for nodes to become free); Slurm expects it to start in about 5 min; Ctrl-C cancels it
        coracle: job 12 is queued (Priority: jobs of higher priority are before it); Slurm has no estimate of its start yet; Ctrl-C cancels it
        coracle: job 12 is queued (Odd); Slurm expects it to start in less than a minute; Ctrl-C cancels it
        coracle: job 12 is queued; Slurm expects it to start in about 28 h; Ctrl-C cancels it
        ");
    }

    #[test]
    fn estimate_that_varies_by_seconds_is_not_repeated() {
        let pending = |start| PendingJob {
            reason: None,
            start_time: Some(start),
        };
        assert_eq!(significant(&pending(600)), significant(&pending(630)));
        assert_ne!(significant(&pending(600)), significant(&pending(660)));
    }
}
