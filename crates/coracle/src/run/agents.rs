//! Starts the agents of nodes: one `srun` step for all of them, and one more for each that is lost.

use console::say;
use std::collections::HashSet;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;
use rustix::process::{Pid, Signal};
use slurm::{AgentStep, Slurm, SlurmError};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::carried;
use crate::carried::program::Program;
use crate::carried::script::{self, SHELL};
use crate::handover::Handover;
use crate::node::FAILED;

/// How much of what the agents print is kept for messages.
const KEPT_LINES: usize = 40;
/// Nodes that don't see the program say so at about the same time.
const ALL_SAID: Duration = Duration::from_millis(300);
/// A step that has no more to do is gone within this.
const STOP_GRACE: Duration = Duration::from_secs(3);
/// `srun` ends a step within this when it is told to.
const TERMINATE_TIMEOUT: Duration = Duration::from_secs(1);

/// How agents are started.
#[derive(Clone)]
pub struct Starter {
    slurm: Slurm,
    job: u32,
    program: PathBuf,
    verbose: bool,
    failures: mpsc::UnboundedSender<StepFailure>,
}

/// What went wrong with agents before they could tell it themselves.
#[derive(Debug)]
pub enum StepFailure {
    /// A whole step ended by itself.
    Step {
        /// The nodes it was for.
        nodes: Vec<String>,
        /// What happened.
        error: SlurmError,
    },
    /// One agent gave up.
    Agent {
        /// Its node.
        node: String,
        /// Why.
        problem: String,
    },
}

/// A step that runs.
pub struct Step {
    nodes: Vec<String>,
    sruns: Sruns,
    /// The death of its `srun` no longer ends it.
    outlives_srun: bool,
    task: JoinHandle<()>,
}

/// The `srun` processes of a step: a second one where some nodes don't see the program.
type Sruns = Arc<Mutex<HashSet<Pid>>>;

impl Starter {
    /// Starts agents by steps of `job`; steps that end by themselves with an error are reported.
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

    /// Starts one agent on each of `nodes` and hands over to them.
    pub fn start(&self, nodes: Vec<String>, handover: &Handover) -> anyhow::Result<Step> {
        let line = format!("{}\n", serde_json::to_string(handover)?);
        let starter = self.clone();
        let sruns = Sruns::default();
        let (theirs, own) = (nodes.clone(), sruns.clone());
        let task = tokio::spawn(async move { starter.run(nodes, line, &own).await });
        Ok(Step {
            nodes: theirs,
            sruns,
            outlives_srun: false,
            task,
        })
    }

    async fn run(&self, nodes: Vec<String>, handover: String, sruns: &Sruns) {
        // Our own program may have been carried here, for us alone, and be deleted already.
        let result = if carried::is_ours() || !self.program.exists() {
            self.run_once(&nodes, &handover, None, sruns).await
        } else {
            self.run_and_carry_where_needed(&nodes, &handover, sruns)
                .await
        };
        if let Err(error) = result {
            let _ = self.failures.send(StepFailure::Step { nodes, error });
        }
    }

    /// Some nodes may not see the program while others do, and run from it to the end.
    async fn run_and_carry_where_needed(
        &self,
        nodes: &[String],
        handover: &str,
        sruns: &Sruns,
    ) -> Result<(), SlurmError> {
        let (tell, blind) = mpsc::unbounded_channel();
        let (first, second) = tokio::join!(
            self.run_once(nodes, handover, Some(tell), sruns),
            self.carry_to(blind, handover, sruns)
        );
        match (first, second) {
            (Err(SlurmError::ProgramNotFound { .. }), Some(second)) => second,
            // It did not say where.
            (Err(SlurmError::ProgramNotFound { .. }), None) => {
                self.run_once(nodes, handover, None, sruns).await
            }
            (first, second) => first.and(second.unwrap_or(Ok(()))),
        }
    }

    /// Starts agents, from copies, on nodes that turn out not to see the program; `None` if none does.
    async fn carry_to(
        &self,
        mut blind: mpsc::UnboundedReceiver<String>,
        handover: &str,
        sruns: &Sruns,
    ) -> Option<Result<(), SlurmError>> {
        let mut nodes = vec![blind.recv().await?];
        let _ = tokio::time::timeout(ALL_SAID, async {
            while let Some(node) = blind.recv().await {
                nodes.push(node);
            }
        })
        .await;
        tracing::info!(?nodes, "carrying the program: they don't see it");
        Some(self.run_once(&nodes, handover, None, sruns).await)
    }

    /// Runs a step to its end: from the program as the nodes see it, if `blind` is to be told which
    /// don't, and from our own, which is sent to them before the handover, otherwise.
    async fn run_once(
        &self,
        nodes: &[String],
        handover: &str,
        blind: Option<mpsc::UnboundedSender<String>>,
        sruns: &Sruns,
    ) -> Result<(), SlurmError> {
        let start = |source| SlurmError::Start {
            command: self.slurm.srun.display().to_string(),
            source,
        };
        let mut args = ["internal".to_owned(), "node".to_owned()].to_vec();
        let mut carried = None;
        if blind.is_none() {
            let program = Program::own().await.map_err(start)?;
            args = script::run(FAILED, &program, &args);
            carried = Some(program);
        }
        let step = AgentStep {
            job_id: self.job,
            nodes,
            program: match carried {
                Some(_) => Path::new(SHELL),
                None => &self.program,
            },
            args: &args,
            gpus: None,
            name: "coracle-node",
        };
        let names: Vec<String> = std::env::vars_os()
            .map(|(name, _)| name.to_string_lossy().into_owned())
            .collect();
        let invocation = step.invocation(&self.slurm, names.iter().map(String::as_str));
        tracing::debug!(command = invocation.display(), "starting agents");
        let mut command = invocation.command();
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        // Not bound to us: if we are killed, the agents find out by themselves and clean up, which they
        // couldn't if srun, dying with us, killed them first.
        let mut child = command.spawn().map_err(start)?;
        let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        lock(sruns).extend(pid);
        // A step that ends at once doesn't read; its own words say why.
        match carried {
            Some(program) => {
                let handover = handover.to_owned();
                let rest = move |pipe: &mut File| pipe.write_all(handover.as_bytes());
                drop(program.send(child.stdin.take(), rest));
            }
            None => {
                if let Some(mut stdin) = child.stdin.take() {
                    let _ = stdin.write_all(handover.as_bytes()).await;
                }
            }
        }
        let mut kept = Vec::new();
        if let Some(stderr) = child.stderr.take() {
            let mut lines = BufReader::new(stderr).split(b'\n');
            while let Ok(Some(line)) = lines.next_segment().await {
                let line = String::from_utf8_lossy(&line).into_owned();
                if slurm::is_noise(&line) {
                    continue;
                }
                if self.verbose {
                    say(format_args!("coracle: [nodes] {line}"));
                }
                if let Some((node, problem)) = last_words(&line) {
                    let _ = self.failures.send(StepFailure::Agent { node, problem });
                }
                if let Some(blind) = &blind
                    && let Some(node) = slurm::node_without_program(&line)
                {
                    let _ = blind.send(node.to_owned());
                }
                if kept.len() < KEPT_LINES {
                    kept.push(line);
                }
            }
        }
        let status = child.wait().await.map_err(start)?;
        if let Some(pid) = pid {
            lock(sruns).remove(&pid);
        }
        if status.success() {
            return Ok(());
        }
        Err(slurm::classify("srun", Some(status), &kept.join("\n")))
    }
}

impl Step {
    /// Once all its agents have joined, makes the step outlive its `srun`: a child of that, its shepherd, would have Slurm kill
    /// everything on the nodes, pods too. The shepherd is a fork of `srun`; where `srun` is a site's script, its child is the real one. Slurm needs neither for a step that runs; `srun` only tells us what agents print.
    pub fn outlive_srun(&mut self, joined: &HashSet<String>) {
        if self.outlives_srun || !self.nodes.iter().all(|node| joined.contains(node)) {
            return;
        }
        self.outlives_srun = true;
        for srun in lock(&self.sruns).iter() {
            if let Err(error) = linux::process::kill_forks_of(*srun) {
                tracing::warn!(%error, "the agents' step ends with its srun");
            }
        }
    }

    /// Waits for the step's end, and ends it if that takes too long.
    pub async fn finish(mut self) {
        if tokio::time::timeout(STOP_GRACE, &mut self.task)
            .await
            .is_ok()
        {
            return;
        }
        // srun has Slurm kill what is left of the step.
        for srun in lock(&self.sruns).iter() {
            let _ = rustix::process::kill_process(*srun, Signal::TERM);
        }
        let ended = tokio::time::timeout(TERMINATE_TIMEOUT, &mut self.task).await;
        if ended.is_err() {
            // Dropping its child kills srun; the agents notice that the leader is gone.
            self.task.abort();
        }
    }
}

fn lock(sruns: &Sruns) -> MutexGuard<'_, HashSet<Pid>> {
    sruns.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The node and the problem in the last words of an agent.
fn last_words(line: &str) -> Option<(String, String)> {
    let (node, problem) = line.strip_prefix(FAILED)?.split_once(':')?;
    Some((node.trim().to_owned(), problem.trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agents_last_words_are_understood() {
        let line = format!("{FAILED} node2: its clock is 7200 s behind: really");
        let (node, problem) = last_words(&line).unwrap();
        assert_eq!(
            (node.as_str(), problem.as_str()),
            ("node2", "its clock is 7200 s behind: really")
        );
        assert_eq!(
            last_words("srun: error: node2: task 1: Exited with exit code 75"),
            None
        );
    }
}
