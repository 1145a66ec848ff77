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

use super::look::{CONTROL, FINISHED};
use crate::exit;

/// Size of the end of standard error that is searched for Slurm's messages.
const KEPT_BYTES: usize = 16 * 1024;
/// Prefix of every line that the leader prints.
const OUR_WORDS: &str = "\ncoracle: ";

/// A running `srun`.
pub struct Srun {
    child: Child,
    /// The pipes of an srun from [`Srun::start_held`].
    held: Option<(ChildStdin, ChildStdout)>,
    stderr: JoinHandle<Said>,
    /// Control lines from the node.
    asked: mpsc::UnboundedReceiver<String>,
}

/// A summary of standard error.
#[derive(Debug, Default)]
struct Said {
    /// Its last [`KEPT_BYTES`].
    words: String,
    /// Whether the leader printed a line.
    by_leader: bool,
    /// Whether the leader reported that the workload exited with 0.
    finished: bool,
}

impl Srun {
    /// Starts an srun that inherits standard input and output.
    pub fn start(invocation: &Invocation, terminal: bool) -> anyhow::Result<Self> {
        let mut command = invocation.command();
        if terminal {
            // It must stay in the foreground process group of the terminal.
            command = invocation.std_command().into();
            command.kill_on_drop(true);
            linux::process::bind_to_us_in_group(command.as_std_mut(), Signal::TERM);
        } else {
            linux::process::bind_to_us(command.as_std_mut(), Signal::TERM);
        }
        Self::spawn(invocation, command)
    }

    /// Starts an srun that runs until [`Srun::finish`] closes its standard input.
    pub fn start_held(invocation: &Invocation) -> anyhow::Result<Self> {
        let mut command = invocation.command();
        linux::process::bind_to_us(command.as_std_mut(), Signal::TERM);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        Self::spawn(invocation, command)
    }

    fn spawn(invocation: &Invocation, mut command: Command) -> anyhow::Result<Self> {
        tracing::debug!(command = invocation.display(), "asking Slurm");
        // With a terminal, the tasks' output goes there, so only Slurm's own messages come through this pipe.
        command.stderr(Stdio::piped());
        let mut child = command.spawn().context("cannot start srun")?;
        let (ask, asked) = mpsc::unbounded_channel();
        let stderr = child.stderr.take();
        let stderr = tokio::spawn(async move {
            match stderr {
                Some(stderr) => relay(stderr, ask).await,
                None => Said::default(),
            }
        });
        Ok(Self {
            held: child.stdin.take().zip(child.stdout.take()),
            child,
            stderr,
            asked,
        })
    }

    /// Waits for srun and returns the exit code. Calls `answer` with the first control line of the node; if that fails, interrupts srun.
    pub async fn run(
        &mut self,
        answer: impl AsyncFn(&str) -> anyhow::Result<()>,
    ) -> anyhow::Result<i32> {
        let answering = async {
            // A node sends one control line; ignore further ones.
            if let Some(line) = self.asked.recv().await {
                answer(&line).await?;
            }
            std::future::pending::<anyhow::Result<()>>().await
        };
        let ended = tokio::select! {
            ended = wait(&mut self.child) => Ok(ended?),
            failed = answering => failed.map(|()| Default::default()),
        };
        match ended {
            Ok((status, told)) => self.judge(status, told).await,
            Err(failed) => {
                interrupt(&self.child);
                let _ = self.child.wait().await;
                Err(failed)
            }
        }
    }

    /// Reads standard output until `find` returns a value. If srun exits before, returns the exit code.
    pub async fn first_words<T>(
        &mut self,
        find: impl Fn(&str) -> Option<T>,
    ) -> anyhow::Result<Result<T, i32>> {
        let (_, stdout) = self.held.as_mut().context("this srun isn't held")?;
        let mut text = String::new();
        let reading = async {
            let mut chunk = [0; 1024];
            while text.len() < KEPT_BYTES {
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
            ended = wait(&mut self.child) => {
                let (status, told) = ended?;
                self.judge(status, told).await.map(Err)
            }
        }
    }

    /// Closes the standard input of a held srun and waits for it to exit.
    pub async fn finish(&mut self) {
        self.held = None;
        let _ = self.child.wait().await;
    }

    /// Returns the workload's exit code, or an error if standard error shows that Slurm failed.
    async fn judge(&mut self, status: ExitStatus, told: Option<Signal>) -> anyhow::Result<i32> {
        let said = (&mut self.stderr).await.unwrap_or_default();
        let code = exit::of_child(status);
        if let Some(signal) = told
            && (!said.by_leader || code == exit::of_signal(Signal::INT))
        {
            // The job was still queued, or the leader got SIGINT, which srun was sent in place of `signal`.
            return Ok(exit::of_signal(signal));
        }
        if status.success()
            && !said.finished
            && let Some(words) = slurm::node_failure_message(&said.words)
        {
            return Err(unfinished(&words).into());
        }
        if status.success() || said.by_leader {
            return Ok(code);
        }
        match slurm::classify("srun", Some(status), &said.words) {
            error @ SlurmError::ProgramNotFound { .. } => Err(cluster::slurm_failure(error).into()),
            // The leader failed before its first line, and has printed an error.
            _ if said.words.contains(": task 0: ") => Ok(code),
            error => Err(cluster::slurm_failure(error).into()),
        }
    }
}

/// Slurm lost the leader's node. srun does not count that as a failed task and exits with 0.
fn unfinished(words: &str) -> Failure {
    Failure::new(
        FailureCode::Broken,
        format!("the job ended before the workload did: {words}"),
    )
    .hint("`sacct -X` shows how the job ended; run it again, without that node (--exclude) if it does not come back")
}

/// Waits for srun. Forwards termination signals as SIGINT, which srun passes on to the leader.
async fn wait(child: &mut Child) -> anyhow::Result<(ExitStatus, Option<Signal>)> {
    let mut ends = Ends::listen()?;
    let mut told = None;
    loop {
        let signal = tokio::select! {
            status = child.wait() => return Ok((status?, told)),
            signal = ends.next() => signal,
        };
        told.get_or_insert(signal);
        // Always SIGINT: on other signals srun kills the tasks at once.
        interrupt(child);
    }
}

/// Receives the signals that terminate this process.
pub struct Ends([(Signal, tokio::signal::unix::Signal); 3]);

impl Ends {
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
async fn relay(mut from: impl AsyncRead + Unpin, ask: mpsc::UnboundedSender<String>) -> Said {
    // A line break, so that the first line matches [`OUR_WORDS`] too.
    let mut kept = vec![b'\n'];
    let mut said = Said::default();
    let mut lines = Lines::default();
    let mut chunk = [0; 4096];
    let mut to = tokio::io::stderr();
    while let Ok(count) = from.read(&mut chunk).await {
        let passed = if count == 0 {
            lines.rest()
        } else {
            lines.pass(&chunk[..count], |line| {
                if line.trim_end() == FINISHED {
                    said.finished = true;
                } else {
                    let _ = ask.send(line);
                }
            })
        };
        let _ = to.write_all(&passed).await;
        let _ = to.flush().await;
        kept.extend_from_slice(&passed);
        said.by_leader |= String::from_utf8_lossy(&kept).contains(OUR_WORDS);
        if kept.len() > 2 * KEPT_BYTES {
            kept.drain(..kept.len() - KEPT_BYTES);
        }
        if count == 0 {
            break;
        }
    }
    said.words = String::from_utf8_lossy(&kept).into_owned();
    said
}

/// Filters lines that begin with [`CONTROL`] out of a stream, without delaying other bytes.
#[derive(Debug, Default)]
struct Lines {
    /// The beginning of a line that may be a control line.
    pending: Vec<u8>,
    /// In the middle of a line that is no control line.
    passing: bool,
}

impl Lines {
    /// Returns the bytes to pass on; calls `take` with each control line.
    fn pass(&mut self, bytes: &[u8], mut take: impl FnMut(String)) -> Vec<u8> {
        let mut passed = Vec::with_capacity(bytes.len());
        for &byte in bytes {
            if self.passing {
                passed.push(byte);
                self.passing = byte != b'\n';
                continue;
            }
            self.pending.push(byte);
            let common = self.pending.len().min(CONTROL.len());
            if self.pending[..common] != CONTROL.as_bytes()[..common] {
                passed.append(&mut self.pending);
                self.passing = byte != b'\n';
            } else if byte == b'\n' {
                take(String::from_utf8_lossy(&self.pending).into_owned());
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
            let (mut lines, mut passed, mut asked) = (Lines::default(), Vec::new(), Vec::new());
            for chunk in text.as_bytes().chunks(size) {
                passed.extend(lines.pass(chunk, |line| asked.push(line)));
            }
            passed.extend(lines.rest());
            assert_eq!(
                String::from_utf8(passed).unwrap(),
                "one\nco\n\ncoracle: two coracle-control: no\ncoracle-co"
            );
            assert_eq!(asked, ["coracle-control: x\n"]);
        }
    }
}
