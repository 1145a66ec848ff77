//! One `srun` on the submitting host. Relays standard error, forwards signals to the leader, and distinguishes Slurm's failures from
//! the workload's.

use console::{Failure, FailureCode};
use std::io::{Seek, Write};
use std::process::{ExitStatus, Stdio};

use anyhow::Context;
use rustix::process::{Pid, Signal};
use slurm::{Invocation, JobDetail, NodeOutcome, Slurm, SlurmError};
use tokio::io::AsyncReadExt;
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::file_check::LeaderLocation;
use super::queue_watch;
use super::srun_stderr::{self, StderrSummary};
use crate::exit;

/// Limit on the standard output that is read.
const MAX_STDOUT: usize = 16 * 1024;

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

impl Srun {
    /// Starts an srun that inherits standard output, and standard input unless `stdin` is given.
    pub fn start(
        slurm: &Slurm,
        invocation: &Invocation,
        stdin: Option<&[u8]>,
    ) -> anyhow::Result<Self> {
        let mut command = invocation.command();
        if let Some(text) = stdin {
            command.stdin(file_with(text).context("cannot keep standard input in a file")?);
        }
        linux::process::set_death_signal_in_new_group(command.as_std_mut(), Signal::TERM);
        Self::spawn(slurm, invocation, command, None)
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
        Self::spawn(slurm, invocation, command, Some(leader))
    }

    /// Starts an srun that runs until [`Srun::finish`] closes its standard input.
    pub fn start_with_pipes(slurm: &Slurm, invocation: &Invocation) -> anyhow::Result<Self> {
        let mut command = invocation.command();
        linux::process::set_death_signal_in_new_group(command.as_std_mut(), Signal::TERM);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        Self::spawn(slurm, invocation, command, None)
    }

    fn spawn(
        slurm: &Slurm,
        invocation: &Invocation,
        mut command: Command,
        leader: Option<LeaderLocation>,
    ) -> anyhow::Result<Self> {
        tracing::debug!(command = invocation.display(), "starting srun");
        // With a terminal, the tasks' output goes there, so only Slurm's own messages come through this pipe.
        command.stderr(Stdio::piped());
        let mut child = command.spawn().context("cannot start srun")?;
        let (control_sender, control_lines) = mpsc::unbounded_channel();
        let (queue_sender, queued_jobs) = mpsc::unbounded_channel();
        tokio::spawn(queue_watch::watch(slurm.clone(), queued_jobs));
        let stderr = child.stderr.take();
        let job_runs = leader.is_some();
        let stderr = tokio::spawn(async move {
            match stderr {
                Some(stderr) => {
                    srun_stderr::relay(stderr, job_runs, control_sender, queue_sender).await
                }
                None => StderrSummary::default(),
            }
        });
        Ok(Self {
            slurm: slurm.clone(),
            leader,
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
            while text.len() < MAX_STDOUT {
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
        (&mut self.stderr).await.unwrap_or_default().print_held();
    }

    /// Returns the workload's exit code, or an error if Slurm failed.
    async fn exit_code(
        &mut self,
        status: ExitStatus,
        received: Option<Signal>,
    ) -> anyhow::Result<i32> {
        let stderr = (&mut self.stderr).await.unwrap_or_default();
        let result = self.evaluate(status, received, &stderr).await;
        let quotes_stderr = matches!(&result, Err(error) if error.is::<Failure>());
        if !quotes_stderr {
            stderr.print_held();
        }
        result
    }

    async fn evaluate(
        &self,
        status: ExitStatus,
        received: Option<Signal>,
        stderr: &StderrSummary,
    ) -> anyhow::Result<i32> {
        let code = exit::of_child(status);
        if let Some(signal) = received
            && (!stderr.has_leader_line || code == exit::of_signal(Signal::INT))
        {
            // The job was still queued, or the leader got SIGINT, which srun was sent in place of `signal`.
            return Ok(exit::of_signal(signal));
        }
        if !stderr.workload_succeeded
            && let Some(message) = self.job_failure(status, stderr).await
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

/// An unnamed file with these contents, at its beginning.
fn file_with(text: &[u8]) -> std::io::Result<std::fs::File> {
    let mut file = tempfile::tempfile()?;
    file.write_all(text)?;
    file.rewind()?;
    Ok(file)
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
}
