//! One `srun` on the submitting host. Relays standard error, forwards signals to the leader, and distinguishes Slurm's failures from
//! the workload's.

use console::{Failure, FailureCode};
use std::process::{ExitStatus, Stdio};

use anyhow::Context;
use rustix::process::{Pid, Signal};
use slurm::{Invocation, SlurmError};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::file_check::{CONTROL_PREFIX, WORKLOAD_SUCCEEDED};
use crate::exit;

/// Limit on the output that is kept: the tail of standard error, or the head of standard output.
const MAX_KEPT_OUTPUT: usize = 16 * 1024;
/// Prefix of every line that the leader prints.
const LEADER_LINE_PREFIX: &str = "\ncoracle: ";

/// A running `srun`.
pub struct Srun {
    child: Child,
    /// The pipes of an srun from [`Srun::start_with_pipes`].
    pipes: Option<(ChildStdin, ChildStdout)>,
    stderr: JoinHandle<StderrSummary>,
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
    /// Whether the leader reported that the workload exited with 0.
    workload_succeeded: bool,
}

impl Srun {
    /// Starts an srun that inherits standard input and output.
    pub fn start(invocation: &Invocation, terminal: bool) -> anyhow::Result<Self> {
        let mut command = invocation.command();
        if terminal {
            // It must stay in the foreground process group of the terminal.
            command = invocation.std_command().into();
            command.kill_on_drop(true);
            linux::process::set_death_signal_in_our_group(command.as_std_mut(), Signal::TERM);
        } else {
            linux::process::set_death_signal_in_new_group(command.as_std_mut(), Signal::TERM);
        }
        Self::spawn(invocation, command)
    }

    /// Starts an srun that runs until [`Srun::finish`] closes its standard input.
    pub fn start_with_pipes(invocation: &Invocation) -> anyhow::Result<Self> {
        let mut command = invocation.command();
        linux::process::set_death_signal_in_new_group(command.as_std_mut(), Signal::TERM);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        Self::spawn(invocation, command)
    }

    fn spawn(invocation: &Invocation, mut command: Command) -> anyhow::Result<Self> {
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

    /// Returns the workload's exit code, or an error if standard error shows that Slurm failed.
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
        if status.success()
            && !stderr.workload_succeeded
            && let Some(message) = slurm::node_failure_message(&stderr.tail)
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
}

/// Slurm lost the leader's node. srun does not count that as a failed task and exits with 0.
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
    use super::*;

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
