//! Starts the agents of nodes: one `srun` step for all of them, and another step for each agent that is lost.

use console::print_stderr;
use std::collections::HashSet;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context;
use rustix::process::{Pid, Signal};
use slurm::{AgentStep, Slurm, SlurmError};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStderr};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::carry;
use crate::carry::program_stream::ProgramStream;
use crate::carry::script::{self, SHELL};
use crate::enrolment::JoinConfig;

/// Prefix of the line with which an agent reports that it cannot start; node and problem follow.
pub const AGENT_FAILED: &str = "coracle-node failed:";

/// Limit on the lines of srun's output that an error message may quote.
const MAX_QUOTED_LINES: usize = 40;
/// Debounce window: `srun` reports all nodes that do not see the program at about the same time.
const NODES_WITHOUT_PROGRAM_WINDOW: Duration = Duration::from_millis(300);
/// Time that a step has to end after its agents have left.
const STEP_STOP_TIMEOUT: Duration = Duration::from_secs(3);
/// Time that `srun` has to end a step after SIGTERM.
const TERMINATE_TIMEOUT: Duration = Duration::from_secs(1);

/// Starts agents as steps of one job.
#[derive(Clone)]
pub struct AgentStarter {
    slurm: Slurm,
    job: u32,
    program: PathBuf,
    verbose: bool,
    failures: mpsc::UnboundedSender<StepFailure>,
}

/// A failure of agents that have no connection to the leader.
#[derive(Debug)]
pub enum StepFailure {
    /// A whole step ended by itself.
    Step {
        /// The nodes of the step.
        nodes: Vec<String>,
        /// The error that `srun` reported.
        error: SlurmError,
    },
    /// An agent failed to start.
    Agent {
        /// The agent's node.
        node: String,
        /// The reason that the agent reported.
        problem: String,
    },
}

/// A running step of agents.
pub struct AgentStepHandle {
    nodes: Vec<String>,
    sruns: Sruns,
    /// The step no longer ends with its `srun`.
    outlives_srun: bool,
    task: JoinHandle<()>,
}

/// The steps of agents that have not ended.
#[derive(Default)]
pub struct AgentSteps(Vec<AgentStepHandle>);

/// The `srun` processes of a step: a second one where some nodes do not see the program.
type Sruns = Arc<Mutex<HashSet<Pid>>>;

impl AgentStarter {
    /// Starts agents as steps of `job`; failed steps are reported to `failures`.
    pub fn new(
        slurm: Slurm,
        job: u32,
        verbose: bool,
        failures: mpsc::UnboundedSender<StepFailure>,
    ) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("cannot find our own program")?;
        Ok(Self {
            slurm,
            job,
            program,
            verbose,
            failures,
        })
    }

    /// Starts one agent on each of `nodes` and sends it `join_config`.
    pub fn start(
        &self,
        nodes: Vec<String>,
        join_config: &JoinConfig,
    ) -> anyhow::Result<AgentStepHandle> {
        let line = format!("{}\n", serde_json::to_string(join_config)?);
        let starter = self.clone();
        let sruns = Sruns::default();
        let (step_nodes, step_sruns) = (nodes.clone(), sruns.clone());
        let task = tokio::spawn(async move { starter.run(nodes, line, &step_sruns).await });
        Ok(AgentStepHandle {
            nodes: step_nodes,
            sruns,
            outlives_srun: false,
            task,
        })
    }

    async fn run(&self, nodes: Vec<String>, join_config: String, sruns: &Sruns) {
        // This program may be a carried copy, which other nodes do not see and which may be deleted already.
        let result = if carry::is_carried() || !self.program.exists() {
            self.run_once(&nodes, &join_config, None, sruns).await
        } else {
            self.run_and_carry_where_needed(&nodes, &join_config, sruns)
                .await
        };
        if let Err(error) = result {
            let _ = self.failures.send(StepFailure::Step { nodes, error });
        }
    }

    /// Starts agents from the program's path; where a node does not see it, from a carried copy.
    async fn run_and_carry_where_needed(
        &self,
        nodes: &[String],
        join_config: &str,
        sruns: &Sruns,
    ) -> Result<(), SlurmError> {
        let (sender, without_program) = mpsc::unbounded_channel();
        let (from_path, from_copies) = tokio::join!(
            self.run_once(nodes, join_config, Some(sender), sruns),
            self.start_from_copies(without_program, join_config, sruns)
        );
        match (from_path, from_copies) {
            (Err(SlurmError::ProgramNotFound { .. }), Some(from_copies)) => from_copies,
            // srun did not name the nodes.
            (Err(SlurmError::ProgramNotFound { .. }), None) => {
                self.run_once(nodes, join_config, None, sruns).await
            }
            (from_path, from_copies) => from_path.and(from_copies.unwrap_or(Ok(()))),
        }
    }

    /// Starts agents from carried copies on the nodes that `without_program` yields; `None` if it yields none.
    async fn start_from_copies(
        &self,
        mut without_program: mpsc::UnboundedReceiver<String>,
        join_config: &str,
        sruns: &Sruns,
    ) -> Option<Result<(), SlurmError>> {
        let mut nodes = vec![without_program.recv().await?];
        let _ = tokio::time::timeout(NODES_WITHOUT_PROGRAM_WINDOW, async {
            while let Some(node) = without_program.recv().await {
                nodes.push(node);
            }
        })
        .await;
        tracing::info!(?nodes, "carrying the program to nodes that do not see it");
        Some(self.run_once(&nodes, join_config, None, sruns).await)
    }

    /// Runs a step to its end. With `without_program`, starts the agents from the program's path, and sends the nodes that do not see it
    /// there to that channel. Else from a copy, which is sent to the nodes before the join configuration.
    async fn run_once(
        &self,
        nodes: &[String],
        join_config: &str,
        without_program: Option<mpsc::UnboundedSender<String>>,
        sruns: &Sruns,
    ) -> Result<(), SlurmError> {
        let start_error = |source| SlurmError::Start {
            command: self.slurm.srun.display().to_string(),
            source,
        };
        let copy = match without_program {
            Some(_) => None,
            None => Some(
                ProgramStream::of_this_program()
                    .await
                    .map_err(start_error)?,
            ),
        };
        let mut child = self.spawn_srun(nodes, copy.as_ref()).map_err(start_error)?;
        let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        sruns.lock().unwrap().extend(pid);
        // A step that ends at once does not read its input; its error output gives the reason.
        match copy {
            Some(program) => {
                let join_config = join_config.to_owned();
                let rest = move |pipe: &mut File| pipe.write_all(join_config.as_bytes());
                drop(program.send(child.stdin.take(), rest));
            }
            None => {
                if let Some(mut stdin) = child.stdin.take() {
                    let _ = stdin.write_all(join_config.as_bytes()).await;
                }
            }
        }
        let quoted = match child.stderr.take() {
            Some(stderr) => {
                self.read_srun_errors(stderr, without_program.as_ref())
                    .await
            }
            None => Vec::new(),
        };
        let status = child.wait().await.map_err(start_error)?;
        if let Some(pid) = pid {
            sruns.lock().unwrap().remove(&pid);
        }
        if status.success() {
            return Ok(());
        }
        Err(slurm::classify("srun", Some(status), &quoted.join("\n")))
    }

    /// Starts `srun`. With a `copy`, a shell on each node receives the program; else the agents start from the program's path.
    fn spawn_srun(&self, nodes: &[String], copy: Option<&ProgramStream>) -> std::io::Result<Child> {
        let mut args = ["internal".to_owned(), "node".to_owned()].to_vec();
        let mut variable = None;
        if let Some(program) = copy {
            let shell = script::run_command(AGENT_FAILED, program, &args);
            variable = Some(shell.variable());
            args = shell.args;
        }
        let step = AgentStep {
            job_id: self.job,
            nodes,
            program: match copy {
                Some(_) => Path::new(SHELL),
                None => &self.program,
            },
            args: &args,
            gpus: None,
            name: "coracle-node",
        };
        let names = slurm::environment_names();
        let mut invocation = step.invocation(&self.slurm, names.iter().map(String::as_str));
        invocation.env_set.extend(variable);
        tracing::debug!(command = invocation.display(), "starting agents");
        let mut command = invocation.command();
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        // Without a parent death signal: if the leader is killed, the agents notice and clean up. They could not do that if srun died
        // with the leader and killed them first.
        command.spawn()
    }

    /// Reads the standard error of `srun` to its end: reports failed agents and nodes that do not see the program, and returns the first
    /// lines.
    async fn read_srun_errors(
        &self,
        stderr: ChildStderr,
        without_program: Option<&mpsc::UnboundedSender<String>>,
    ) -> Vec<String> {
        let mut quoted = Vec::new();
        let mut lines = BufReader::new(stderr).split(b'\n');
        while let Ok(Some(line)) = lines.next_segment().await {
            let line = String::from_utf8_lossy(&line).into_owned();
            if slurm::is_noise(&line) {
                continue;
            }
            if self.verbose {
                print_stderr(format_args!("coracle: [nodes] {line}"));
            }
            if let Some((node, problem)) = parse_agent_failure(&line) {
                let _ = self.failures.send(StepFailure::Agent { node, problem });
            }
            if let Some(sender) = without_program
                && let Some(node) = slurm::node_without_program(&line)
            {
                let _ = sender.send(node.to_owned());
            }
            if quoted.len() < MAX_QUOTED_LINES {
                quoted.push(line);
            }
        }
        quoted
    }
}

impl AgentSteps {
    /// Adds a step, and forgets those that have ended: an agent may be restarted any number of times.
    pub fn add(&mut self, step: AgentStepHandle) {
        self.0.retain(|step| !step.task.is_finished());
        self.0.push(step);
    }

    /// Makes the steps whose agents have all joined outlive their `srun`.
    pub fn outlive_sruns(&mut self, joined: &HashSet<String>) {
        for step in &mut self.0 {
            step.outlive_srun(joined);
        }
    }

    /// Waits for the end of all steps, and ends them after a time-out.
    pub async fn finish(self) {
        futures::future::join_all(self.0.into_iter().map(AgentStepHandle::finish)).await;
    }
}

impl AgentStepHandle {
    /// Once all agents of the step have joined, makes it outlive its `srun`: a forked child of `srun`, the shepherd, would
    /// otherwise have Slurm kill everything on the nodes, pods too, when `srun` dies. Slurm needs neither process for a
    /// running step; `srun` only forwards the agents' output. Where `srun` is a site's script, its child is the real one.
    fn outlive_srun(&mut self, joined: &HashSet<String>) {
        if self.outlives_srun || !self.nodes.iter().all(|node| joined.contains(node)) {
            return;
        }
        self.outlives_srun = true;
        for srun in self.sruns.lock().unwrap().iter() {
            if let Err(error) = linux::process::kill_forks_of(*srun) {
                tracing::warn!(%error, "the agents' step ends with its srun");
            }
        }
    }

    /// Waits for the step's end, and ends it after a time-out.
    async fn finish(mut self) {
        if tokio::time::timeout(STEP_STOP_TIMEOUT, &mut self.task)
            .await
            .is_ok()
        {
            return;
        }
        // srun makes Slurm kill the rest of the step.
        for srun in self.sruns.lock().unwrap().iter() {
            let _ = rustix::process::kill_process(*srun, Signal::TERM);
        }
        let ended = tokio::time::timeout(TERMINATE_TIMEOUT, &mut self.task).await;
        if ended.is_err() {
            // Dropping the child kills srun; the agents notice that the leader is gone.
            self.task.abort();
        }
    }
}

/// Node and problem, if `line` reports an agent's failure.
fn parse_agent_failure(line: &str) -> Option<(String, String)> {
    let (node, problem) = line.strip_prefix(AGENT_FAILED)?.split_once(':')?;
    Some((node.trim().to_owned(), problem.trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn ended_steps_are_forgotten() {
        let step = |task| AgentStepHandle {
            nodes: vec!["node1".to_owned()],
            sruns: Sruns::default(),
            outlives_srun: false,
            task,
        };
        let mut steps = AgentSteps::default();
        steps.add(step(tokio::spawn(std::future::pending())));
        for _ in 0..10 {
            let task = tokio::spawn(std::future::ready(()));
            while !task.is_finished() {
                tokio::task::yield_now().await;
            }
            steps.add(step(task));
        }
        // The one that runs, and the one that was added last.
        assert_eq!(steps.0.len(), 2);
    }

    #[test]
    fn parses_agent_failure_line() {
        let line = format!("{AGENT_FAILED} node2: its clock is 7200 s behind: really");
        let (node, problem) = parse_agent_failure(&line).unwrap();
        assert_eq!(
            (node.as_str(), problem.as_str()),
            ("node2", "its clock is 7200 s behind: really")
        );
        assert_eq!(
            parse_agent_failure("srun: error: node2: task 1: Exited with exit code 75"),
            None
        );
    }
}
