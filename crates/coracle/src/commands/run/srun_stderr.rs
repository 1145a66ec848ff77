//! The standard error of `srun`: Slurm's messages, control lines of the node, and the output of the leader and the workload.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

use super::file_check::{CONTROL_PREFIX, LeaderLocation, WORKLOAD_SUCCEEDED, parse_location};
use console::print_stderr;

/// Limit on the output that is kept.
const MAX_KEPT_OUTPUT: usize = 16 * 1024;
/// Prefix of every line that the leader prints.
const LEADER_LINE_PREFIX: &str = "\ncoracle: ";

/// A summary of standard error.
#[derive(Debug, Default)]
pub struct StderrSummary {
    /// Its last [`MAX_KEPT_OUTPUT`].
    pub tail: String,
    /// Whether the leader printed a line.
    pub has_leader_line: bool,
    /// Where the leader runs, as the node reported.
    pub leader: Option<LeaderLocation>,
    /// Whether the leader reported that the workload exited with 0.
    pub workload_succeeded: bool,
    /// Slurm's messages that were not printed, because the error that follows quotes them.
    held: Vec<String>,
}

impl StderrSummary {
    /// Prints Slurm's messages that were held back, for a caller that does not quote them.
    pub fn print_held(&self) {
        for line in &self.held {
            print_stderr(format_args!("{line}"));
        }
    }
}

/// Copies `from` to standard error, except for control lines and for Slurm's messages before the job runs. Sends the id of the job to
/// `queued_jobs` if it is queued, and closes that channel when the job runs.
pub async fn relay(
    mut from: impl AsyncRead + Unpin,
    job_runs: bool,
    control_lines: mpsc::UnboundedSender<String>,
    queued_jobs: mpsc::UnboundedSender<u32>,
) -> StderrSummary {
    // A line break, so that the first line matches [`LEADER_LINE_PREFIX`] too.
    let mut tail = vec![b'\n'];
    let mut summary = StderrSummary::default();
    let mut filter = ControlLineFilter::default();
    let mut before_start = (!job_runs).then(|| MessagesBeforeStart::new(queued_jobs));
    let mut chunk = [0; 4096];
    let mut own_stderr = tokio::io::stderr();
    while let Ok(count) = from.read(&mut chunk).await {
        let mut passed = if count == 0 {
            filter.rest()
        } else {
            filter.filter(&chunk[..count], |line| {
                if line.trim_end() == WORKLOAD_SUCCEEDED {
                    summary.workload_succeeded = true;
                } else if let Some(leader) = parse_location(&line) {
                    summary.leader = Some(leader);
                } else {
                    let _ = control_lines.send(line);
                }
            })
        };
        tail.extend_from_slice(&passed);
        summary.has_leader_line |= String::from_utf8_lossy(&tail).contains(LEADER_LINE_PREFIX);
        if tail.len() > 2 * MAX_KEPT_OUTPUT {
            tail.drain(..tail.len() - MAX_KEPT_OUTPUT);
        }
        if let Some(messages) = &mut before_start {
            passed = messages.filter(&passed);
            if summary.leader.is_some() || summary.has_leader_line {
                let held: Vec<u8> = messages
                    .held
                    .iter()
                    .flat_map(|line| line.bytes().chain([b'\n']))
                    .collect();
                passed = [held, passed, std::mem::take(&mut messages.line)].concat();
                before_start = None;
            }
        }
        let _ = own_stderr.write_all(&passed).await;
        let _ = own_stderr.flush().await;
        if count == 0 {
            break;
        }
    }
    summary.held = before_start.map_or_else(Vec::new, MessagesBeforeStart::into_lines);
    summary.tail = String::from_utf8_lossy(&tail).into_owned();
    summary
}

/// Slurm's messages before the job runs: held back, so that they are printed once if they become part of an error.
#[derive(Debug)]
struct MessagesBeforeStart {
    queued_jobs: mpsc::UnboundedSender<u32>,
    held: Vec<String>,
    /// The beginning of a line.
    line: Vec<u8>,
}

impl MessagesBeforeStart {
    fn new(queued_jobs: mpsc::UnboundedSender<u32>) -> Self {
        Self {
            queued_jobs,
            held: Vec::new(),
            line: Vec::new(),
        }
    }

    /// Returns the complete lines that are not Slurm's.
    fn filter(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut passed = Vec::new();
        for &byte in bytes {
            self.line.push(byte);
            if byte != b'\n' && self.line.len() < MAX_KEPT_OUTPUT {
                continue;
            }
            let line = String::from_utf8_lossy(&self.line);
            let line = line.trim_end();
            if let Some(job) = slurm::parse_queued(line) {
                let _ = self.queued_jobs.send(job);
            } else if slurm::is_from_slurm(line) {
                self.held.push(line.to_owned());
            } else if !slurm::is_noise(line) {
                passed.extend_from_slice(&self.line);
            }
            self.line.clear();
        }
        passed
    }

    /// All lines that were not passed on.
    fn into_lines(mut self) -> Vec<String> {
        if !self.line.is_empty() {
            self.held
                .push(String::from_utf8_lossy(&self.line).into_owned());
        }
        self.held
    }
}

/// Filters lines that begin with [`CONTROL_PREFIX`] out of a stream, without delaying other bytes.
#[derive(Debug, Default)]
struct ControlLineFilter {
    /// The beginning of a line that may be a control line.
    pending: Vec<u8>,
    /// In the middle of a line that is no control line.
    passing: bool,
}

impl ControlLineFilter {
    /// Returns the bytes to pass on; calls `on_control_line` with each control line.
    fn filter(&mut self, bytes: &[u8], mut on_control_line: impl FnMut(String)) -> Vec<u8> {
        let mut passed = Vec::with_capacity(bytes.len());
        for &byte in bytes {
            if self.passing {
                passed.push(byte);
                self.passing = byte != b'\n';
                continue;
            }
            self.pending.push(byte);
            let common = self.pending.len().min(CONTROL_PREFIX.len());
            if self.pending[..common] != CONTROL_PREFIX.as_bytes()[..common] {
                passed.append(&mut self.pending);
                self.passing = byte != b'\n';
            } else if byte == b'\n' {
                on_control_line(String::from_utf8_lossy(&self.pending).into_owned());
                self.pending.clear();
            }
        }
        passed
    }

    /// An incomplete control line at the end of the stream.
    fn rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.pending)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn leader_location_is_read_from_control_lines() {
        let text = "coracle-control: job 12 node1\ncoracle: ready\ncoracle-control: carry x\n";
        let (sender, mut control_lines) = mpsc::unbounded_channel();
        let summary = relay(text.as_bytes(), false, sender, mpsc::unbounded_channel().0).await;
        let leader = LeaderLocation {
            job: 12,
            node: "node1".to_owned(),
        };
        assert_eq!(summary.leader, Some(leader));
        assert!(summary.has_leader_line && !summary.workload_succeeded);
        // Only other control lines reach the caller.
        assert_eq!(
            control_lines.recv().await.as_deref(),
            Some("coracle-control: carry x\n")
        );
    }

    #[tokio::test]
    async fn slurms_messages_are_held_until_the_job_runs() {
        let queued = "srun: job 12 queued and waiting for resources\n";
        let refused = "srun: error: Unable to allocate resources: Invalid account\n";
        let relayed = async |text: String| {
            let (sender, mut queued_jobs) = mpsc::unbounded_channel();
            let (control_lines, _) = mpsc::unbounded_channel();
            let summary = relay(text.as_bytes(), false, control_lines, sender).await;
            (summary, queued_jobs.recv().await)
        };
        let (summary, job) = relayed(format!("{queued}{refused}rest")).await;
        assert_eq!(job, Some(12));
        assert_eq!(summary.held, [refused.trim_end(), "rest"]);
        assert!(summary.tail.contains(refused));
        let (summary, job) = relayed(format!(
            "{refused}coracle-control: job 12 node1\ncoracle: ready\n"
        ))
        .await;
        assert_eq!((summary.held, job), (Vec::new(), None));
    }

    #[test]
    fn lines_of_others_pass_while_messages_are_held() {
        let (sender, _queued_jobs) = mpsc::unbounded_channel();
        let mut messages = MessagesBeforeStart::new(sender);
        let text =
            "wrapper: hello\nsrun: error: no\nsrun: job 3 has been allocated resources\nof the";
        assert_eq!(messages.filter(text.as_bytes()), b"wrapper: hello\n");
        assert_eq!(messages.filter(b" site\n"), b"of the site\n");
        assert_eq!(messages.into_lines(), ["srun: error: no"]);
    }

    #[test]
    fn only_control_lines_are_filtered() {
        let text = "one\ncoracle-control: x\nco\n\ncoracle: two coracle-control: no\ncoracle-co";
        // Independent of the chunk size.
        for size in [1, 2, 7, 100] {
            let (mut filter, mut passed, mut control_lines) =
                (ControlLineFilter::default(), Vec::new(), Vec::new());
            for chunk in text.as_bytes().chunks(size) {
                passed.extend(filter.filter(chunk, |line| control_lines.push(line)));
            }
            passed.extend(filter.rest());
            assert_eq!(
                String::from_utf8(passed).unwrap(),
                "one\nco\n\ncoracle: two coracle-control: no\ncoracle-co"
            );
            assert_eq!(control_lines, ["coracle-control: x\n"]);
        }
    }
}
