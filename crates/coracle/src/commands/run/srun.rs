//! One `srun` on the submitting host. Relays standard error, forwards signals to the leader, and distinguishes Slurm's failures from
//! the workload's.

use console::{Failure, FailureCode};
use std::process::{ExitStatus, Stdio};

use anyhow::Context;
use rustix::process::{Pid, Signal};
use slurm::{Invocation, JobDetail, NodeOutcome, Slurm, SlurmError};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::file_check::{CONTROL_PREFIX, LeaderLocation, WORKLOAD_SUCCEEDED, parse_location};
use crate::exit;

/// Limit on the output that is kept: the tail of standard error, or the head of standard output.
const MAX_KEPT_OUTPUT: usize = 16 * 1024;
/// Prefix of every line that the leader prints.
const LEADER_LINE_PREFIX: &str = "\ncoracle: ";

/// A running `srun`.
pub struct Srun {
    slurm: Slurm,
    child: Child,
    /// The pipes of an srun from [`Srun::start_with_pipes`].
    pipes: Option<(ChildStdin, ChildStdout)>,
    stderr: JoinHandle<StderrSummary>,
    /// Where the leader runs, if that is known before it reports it.
    leader: Option<LeaderLocation>,
    /// Control lines from the node.
    control_lines: mpsc::UnboundedReceiver<String>,
}

/// A summary of standard error.
#[derive(Debug, Default)]
struct StderrSummary {
    /// Its last [`MAX_KEPT_OUTPUT`].
    tail: String,
    /// Whether the leader printed a line.
    has_leader_line: bool,
    /// Where the leader runs, as the node reported.
    leader: Option<LeaderLocation>,
    /// Whether the leader reported that the workload exited with 0.
    workload_succeeded: bool,
}

impl Srun {
    /// Starts an srun that inherits standard input and output.
    pub fn start(slurm: &Slurm, invocation: &Invocation) -> anyhow::Result<Self> {
        let mut command = invocation.command();
        linux::process::set_death_signal_in_new_group(command.as_std_mut(), Signal::TERM);
        Self::spawn(slurm, invocation, command)
    }

    /// Starts an srun that runs the leader in our terminal, where control lines cannot tell where that runs.
    pub fn start_in_terminal(
        slurm: &Slurm,
        invocation: &Invocation,
        leader: LeaderLocation,
    ) -> anyhow::Result<Self> {
        // It must stay in the foreground process group of the terminal.
        let mut command: Command = invocation.std_command().into();
        command.kill_on_drop(true);
        linux::process::set_death_signal_in_our_group(command.as_std_mut(), Signal::TERM);
        let srun = Self::spawn(slurm, invocation, command)?;
        Ok(Self {
            leader: Some(leader),
            ..srun
        })
    }

    /// Starts an srun that runs until [`Srun::finish`] closes its standard input.
    pub fn start_with_pipes(slurm: &Slurm, invocation: &Invocation) -> anyhow::Result<Self> {
        let mut command = invocation.command();
        linux::process::set_death_signal_in_new_group(command.as_std_mut(), Signal::TERM);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        Self::spawn(slurm, invocation, command)
    }

    fn spawn(slurm: &Slurm, invocation: &Invocation, mut command: Command) -> anyhow::Result<Self> {
        tracing::debug!(command = invocation.display(), "starting srun");
        // With a terminal, the tasks' output goes there, so only Slurm's own messages come through this pipe.
        command.stderr(Stdio::piped());
        let mut child = command.spawn().context("cannot start srun")?;
        let (control_sender, control_lines) = mpsc::unbounded_channel();
        let stderr = child.stderr.take();
        let stderr = tokio::spawn(async move {
            match stderr {
                Some(stderr) => relay(stderr, control_sender).await,
                None => StderrSummary::default(),
            }
        });
        Ok(Self {
            slurm: slurm.clone(),
            leader: None,
            pipes: child.stdin.take().zip(child.stdout.take()),
            child,
            stderr,
            control_lines,
        })
    }

    /// Waits for srun and returns the exit code. Calls `respond` with the first control line of the node; if that fails, interrupts srun.
    pub async fn run(
        &mut self,
        respond: impl AsyncFn(&str) -> anyhow::Result<()>,
    ) -> anyhow::Result<i32> {
        let responding = async {
            // A node sends one control line; ignore further ones.
            if let Some(line) = self.control_lines.recv().await {
                respond(&line).await?;
            }
            std::future::pending::<anyhow::Result<()>>().await
        };
        let exited = tokio::select! {
            exited = wait(&mut self.child) => Ok(exited?),
            failed = responding => failed.map(|()| Default::default()),
        };
        match exited {
            Ok((status, signal)) => self.exit_code(status, signal).await,
            Err(failed) => {
                interrupt(&self.child);
                let _ = self.child.wait().await;
                Err(failed)
            }
        }
    }

    /// Reads standard output until `find` returns a value. If srun exits before, returns the exit code.
    pub async fn read_stdout_until<T>(
        &mut self,
        find: impl Fn(&str) -> Option<T>,
    ) -> anyhow::Result<Result<T, i32>> {
        let (_, stdout) = self.pipes.as_mut().context("this srun has no pipes")?;
        let mut text = String::new();
        let reading = async {
            let mut chunk = [0; 1024];
            while text.len() < MAX_KEPT_OUTPUT {
                let count = stdout.read(&mut chunk).await.unwrap_or_default();
                if count == 0 {
                    break;
                }
                text.push_str(&String::from_utf8_lossy(&chunk[..count]));
                if let Some(found) = find(&text) {
                    return found;
                }
            }
            std::future::pending().await
        };
        tokio::select! {
            found = reading => Ok(Ok(found)),
            exited = wait(&mut self.child) => {
                let (status, signal) = exited?;
                self.exit_code(status, signal).await.map(Err)
            }
        }
    }

    /// Closes the standard input of an srun with pipes and waits for it to exit.
    pub async fn finish(&mut self) {
        self.pipes = None;
        let _ = self.child.wait().await;
    }

    /// Returns the workload's exit code, or an error if Slurm failed.
    async fn exit_code(
        &mut self,
        status: ExitStatus,
        received: Option<Signal>,
    ) -> anyhow::Result<i32> {
        let stderr = (&mut self.stderr).await.unwrap_or_default();
        let code = exit::of_child(status);
        if let Some(signal) = received
            && (!stderr.has_leader_line || code == exit::of_signal(Signal::INT))
        {
            // The job was still queued, or the leader got SIGINT, which srun was sent in place of `signal`.
            return Ok(exit::of_signal(signal));
        }
        if !stderr.workload_succeeded
            && let Some(message) = self.job_failure(status, &stderr).await
        {
            return Err(job_ended_early(&message).into());
        }
        if status.success() || stderr.has_leader_line {
            return Ok(code);
        }
        match slurm::classify("srun", Some(status), &stderr.tail) {
            error @ SlurmError::ProgramNotFound { .. } => Err(cluster::slurm_failure(error).into()),
            // The leader failed before its first line, and has printed an error.
            _ if stderr.tail.contains(": task 0: ") => Ok(code),
            error => Err(cluster::slurm_failure(error).into()),
        }
    }

    /// Why Slurm ended the job or its leader before the workload exited, if it did.
    async fn job_failure(&self, status: ExitStatus, stderr: &StderrSummary) -> Option<String> {
        let leader = self.leader.as_ref().or(stderr.leader.as_ref());
        let Some(leader) = leader else {
            return job_failure(None, status, &stderr.tail);
        };
        let detail = self.slurm.job_detail(leader.job).await;
        if let Err(error) = &detail {
            tracing::debug!(%error, job = leader.job, "cannot read the job's state");
        }
        let known = detail.ok().map(|detail| (detail, leader.node.as_str()));
        job_failure(known, status, &stderr.tail)
    }
}

/// Decides by the job's state whether Slurm ended the leader; by srun's messages only if the state is unknown. srun does not count the
/// tasks of a failed node as failed, and may exit with 0.
fn job_failure(
    leader: Option<(JobDetail, &str)>,
    status: ExitStatus,
    stderr: &str,
) -> Option<String> {
    let message = slurm::node_failure_message(stderr);
    let Some((job, node)) = leader else {
        return message.filter(|_| status.success());
    };
    let id = job.job_id;
    match job.outcome_on(node) {
        NodeOutcome::Uninterrupted => None,
        NodeOutcome::NodeFailed => {
            Some(message.unwrap_or_else(|| format!("a node of job {id} failed")))
        }
        // Otherwise the exit code of the leader shows that it was stopped or killed.
        NodeOutcome::JobEnded(state) => status
            .success()
            .then(|| format!("the state of job {id} is {state}")),
        NodeOutcome::Unknown => message.filter(|_| status.success()),
    }
}

/// Slurm ended the job, or lost the leader's node.
fn job_ended_early(message: &str) -> Failure {
    Failure::new(
        FailureCode::Broken,
        format!("the job ended before the workload did: {message}"),
    )
    .with_hint("`sacct -X` shows how the job ended; run it again, without that node (--exclude) if it does not come back")
}

/// Waits for srun. Forwards termination signals as SIGINT, which srun passes on to the leader.
async fn wait(child: &mut Child) -> anyhow::Result<(ExitStatus, Option<Signal>)> {
    let mut signals = TerminationSignals::listen()?;
    let mut received = None;
    loop {
        let signal = tokio::select! {
            status = child.wait() => return Ok((status?, received)),
            signal = signals.next() => signal,
        };
        received.get_or_insert(signal);
        // Always SIGINT: on other signals srun kills the tasks at once.
        interrupt(child);
    }
}

/// Receives the signals that terminate this process.
pub struct TerminationSignals([(Signal, tokio::signal::unix::Signal); 3]);

impl TerminationSignals {
    /// Installs the handlers.
    pub fn listen() -> anyhow::Result<Self> {
        Ok(Self([
            (Signal::INT, signal(SignalKind::interrupt())?),
            (Signal::TERM, signal(SignalKind::terminate())?),
            (Signal::HUP, signal(SignalKind::hangup())?),
        ]))
    }

    /// Waits for the next signal.
    pub async fn next(&mut self) -> Signal {
        let [(int, interrupted), (term, terminate), (hup, hangup)] = &mut self.0;
        tokio::select! {
            _ = interrupted.recv() => *int,
            _ = terminate.recv() => *term,
            _ = hangup.recv() => *hup,
        }
    }
}

fn interrupt(child: &Child) {
    if let Some(pid) = child.id().and_then(|id| Pid::from_raw(id.cast_signed())) {
        let _ = rustix::process::kill_process(pid, Signal::INT);
    }
}

/// Copies `from` to standard error, except for control lines.
async fn relay(
    mut from: impl AsyncRead + Unpin,
    control_lines: mpsc::UnboundedSender<String>,
) -> StderrSummary {
    // A line break, so that the first line matches [`LEADER_LINE_PREFIX`] too.
    let mut tail = vec![b'\n'];
    let mut summary = StderrSummary::default();
    let mut filter = ControlLineFilter::default();
    let mut chunk = [0; 4096];
    let mut own_stderr = tokio::io::stderr();
    while let Ok(count) = from.read(&mut chunk).await {
        let passed = if count == 0 {
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
        let _ = own_stderr.write_all(&passed).await;
        let _ = own_stderr.flush().await;
        tail.extend_from_slice(&passed);
        summary.has_leader_line |= String::from_utf8_lossy(&tail).contains(LEADER_LINE_PREFIX);
        if tail.len() > 2 * MAX_KEPT_OUTPUT {
            tail.drain(..tail.len() - MAX_KEPT_OUTPUT);
        }
        if count == 0 {
            break;
        }
    }
    summary.tail = String::from_utf8_lossy(&tail).into_owned();
    summary
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
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn job_state_decides_whether_slurm_failed() {
        let words = "coracle: ready\nsrun: error: Node failure on node1\n";
        let failure = |state: Option<&str>, code: i32, stderr: &str| {
            let detail = state.map(|state| {
                let shown = format!(
                    "JobId=12 JobName=x\n   JobState={state}\n   NodeList=node[1-2]\n     Nodes=node[1-2] CPU_IDs=0 Mem=0\n"
                );
                (slurm::parse_job_detail(&shown).unwrap(), "node1")
            });
            job_failure(detail, ExitStatus::from_raw(code << 8), stderr)
        };
        let running = Some("RUNNING Reason=None");
        let failed = Some("NODE_FAIL Reason=NodeDown");
        // The state is decisive, whatever srun has written.
        assert_eq!(failure(running, 0, words), None);
        assert_eq!(
            failure(failed, 0, "").as_deref(),
            Some("a node of job 12 failed")
        );
        assert_eq!(
            failure(failed, 137, words).as_deref(),
            Some("Node failure on node1")
        );
        let cancelled = Some("CANCELLED Reason=None");
        assert_eq!(
            failure(cancelled, 0, "").as_deref(),
            Some("the state of job 12 is CANCELLED")
        );
        assert_eq!(failure(cancelled, 143, ""), None);
        // Without a state, srun's messages are.
        for unknown in [None, Some("COMPLETING Reason=None")] {
            assert_eq!(
                failure(unknown, 0, words).as_deref(),
                Some("Node failure on node1")
            );
            assert_eq!(failure(unknown, 0, ""), None);
            assert_eq!(failure(unknown, 1, words), None);
        }
    }

    #[tokio::test]
    async fn leader_location_is_read_from_control_lines() {
        let text = "coracle-control: job 12 node1\ncoracle: ready\ncoracle-control: carry x\n";
        let (sender, mut control_lines) = mpsc::unbounded_channel();
        let summary = relay(text.as_bytes(), sender).await;
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
