//! A pod's sandbox as a step of the Slurm job, so that Slurm enforces and accounts what the pod asks for.
//!
//! ```text
//!   agent ── srun ◄─────────────► slurmstepd ── coracle internal sandbox
//!              └ its shepherd       says on standard output that it runs
//! ```
//!
//! `srun` is there only until the sandbox says that it runs. Then it is killed, and before it its shepherd, a child that would
//! end the step with it: a step needs no `srun`, and with one the pod would die whenever `srun` does, which Slurm itself
//! signals at the end of a job before the pod had its time. Slurm's accounts and limits don't mind.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use kubelet::{LaunchRequest, PodResources, SandboxProcess};
use rustix::process::Pid;
use slurm::{ExactStep, Slurm};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStderr, ChildStdout};
use tokio::task::JoinHandle;

use super::Launchers;
use crate::handover::POD_MARK;
use crate::node::place::NodePlace;
use crate::sandbox_role::{FAILED, RUNNING};

/// The variable that marks the steps of a node.
const NODE_MARK: &str = "CORACLE_NODE";
/// A step that has just ended may not have given back what it held; beyond this it is held by others.
const BUSY_PATIENCE: Duration = Duration::from_secs(3);
/// How long Slurm may take in all. Its controller may be away.
const START_PATIENCE: Duration = Duration::from_secs(20);
/// What is read of srun's words.
const MAX_WORDS: u64 = 16 * 1024;
/// What the sandbox itself needs: less would end it, and never let an image be unpacked.
const LEAST_MEMORY_MB: u64 = 64;
/// What a killed sandbox may take to be gone.
const LAST_BREATH: Duration = Duration::from_secs(2);

/// Starts a sandbox and waits until it runs, or until it is known why it doesn't.
pub async fn start(node: &Launchers, launch: LaunchRequest) -> anyhow::Result<SandboxProcess> {
    let line = node.start_line(&launch).await?;
    let mut srun = spawn(node, &launch)?;
    if let Some(mut input) = srun.stdin.take() {
        // A step that is refused doesn't read; its own words say why.
        let _ = input.write_all(line.as_bytes()).await;
    }
    let words = tokio::spawn(read_words(srun.stderr.take()));
    let said = tokio::time::timeout(START_PATIENCE, first_word(srun.stdout.take())).await;
    // Whoever gives up drops srun, which kills it, upon which its shepherd ends the step.
    let said = said.with_context(|| {
        let seconds = START_PATIENCE.as_secs();
        format!("Slurm did not start the step within {seconds} s")
    })??;
    match said {
        Some(Word::Running(sandbox)) => {
            leave_alone(srun).await?;
            Ok(sandbox)
        }
        Some(Word::Failed(problem)) => bail!("{problem}"),
        None => Err(why_not(srun, words).await?),
    }
}

/// What a sandbox says of its start.
enum Word {
    Running(SandboxProcess),
    Failed(String),
}

fn spawn(node: &Launchers, launch: &LaunchRequest) -> anyhow::Result<Child> {
    let slurm = Slurm::find()?;
    let mut args = vec!["internal".to_owned(), "sandbox".to_owned()];
    // What else is found by its environment: a sandbox hides that.
    args.push(format!("{POD_MARK}={}", node.mark));
    args.push(node_mark(&node.place));
    args.extend(slurm::JobProcessMarkers::of_current_job().map(|job| job.env_variable));
    let gres = gres(&launch.resources.extended);
    let step = ExactStep {
        job_id: node.job,
        node: &node.node,
        cpus: launch.resources.cpu_millis.div_ceil(1000),
        memory_mb: memory_mb(&launch.resources),
        gres: &gres,
        // Our file may have been a copy that is deleted already; on this node we are its name.
        program: &PathBuf::from(format!("/proc/{}/exe", std::process::id())),
        args: &args,
        name: &format!("{}/{}", launch.namespace, launch.name),
        resource_timeout: BUSY_PATIENCE,
    };
    let names: Vec<String> = std::env::vars_os()
        .map(|(name, _)| name.to_string_lossy().into_owned())
        .collect();
    let invocation = step.invocation(&slurm, names.iter().map(String::as_str));
    tracing::debug!(command = invocation.display(), "starting a pod as a step");
    let mut command = invocation.command();
    command
        .env(POD_MARK, &node.mark)
        .env(NODE_MARK, &node.place.mark)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().context("cannot start srun")
}

/// Zero and nothing are the same to those who say what they need: no share of its own.
fn memory_mb(needs: &PodResources) -> Option<u64> {
    let bytes = Some(needs.memory_bytes).filter(|bytes| *bytes > 0)?;
    Some(bytes.div_ceil(1 << 20).max(LEAST_MEMORY_MB))
}

/// What the node offers under Kubernetes' names, under Slurm's again. Others are not Slurm's to give.
fn gres(extended: &BTreeMap<String, u64>) -> Vec<(String, u64)> {
    let mut gres = BTreeMap::new();
    for (name, count) in extended {
        let name = match name.as_str() {
            "nvidia.com/gpu" | "amd.com/gpu" => "gpu",
            other => match other.strip_prefix("coracle.dev/") {
                Some(name) => name,
                None => continue,
            },
        };
        *gres.entry(name.to_owned()).or_default() += *count;
    }
    gres.into_iter().collect()
}

/// What the sandbox says; nothing if it never ran. A site's prologue may have printed something before it.
async fn first_word(stdout: Option<ChildStdout>) -> anyhow::Result<Option<Word>> {
    let stdout = stdout.context("srun has no standard output")?;
    let mut lines = BufReader::new(stdout.take(MAX_WORDS)).split(b'\n');
    while let Some(line) = lines.next_segment().await? {
        let line = String::from_utf8_lossy(&line);
        if let Some(pid) = line.strip_prefix(RUNNING) {
            let id = pid.trim().parse().unwrap_or_default();
            // It is there: it waits for nothing but us.
            let process = SandboxProcess::with_id(id).context("the sandbox can't be seen from here")?;
            return Ok(Some(Word::Running(process)));
        }
        if let Some(problem) = line.strip_prefix(FAILED) {
            return Ok(Some(Word::Failed(problem.to_owned())));
        }
    }
    Ok(None)
}

async fn read_words(stderr: Option<ChildStderr>) -> String {
    let mut words = Vec::new();
    if let Some(stderr) = stderr {
        let _ = stderr.take(MAX_WORDS).read_to_end(&mut words).await;
    }
    String::from_utf8_lossy(&words).into_owned()
}

/// Slurm's own words for why there is no step.
async fn why_not(mut srun: Child, words: JoinHandle<String>) -> anyhow::Result<anyhow::Error> {
    let status = tokio::time::timeout(START_PATIENCE, srun.wait())
        .await
        .context("srun does not end")??;
    let words = words.await.unwrap_or_default();
    let error = slurm::classify("srun", Some(status), &words);
    let hint = error.hint();
    let error = anyhow::Error::from(error);
    Ok(match hint {
        // An event has one line for all of it.
        Some(hint) => anyhow::anyhow!("{error:#}; {hint}"),
        None => error,
    })
}

/// Ends `srun` so that the step goes on without it.
async fn leave_alone(mut srun: Child) -> anyhow::Result<()> {
    if let Some(pid) = srun.id().and_then(|id| Pid::from_raw(id.cast_signed())) {
        linux::process::kill_from_below(pid)?;
    }
    srun.wait().await?;
    Ok(())
}

fn node_mark(place: &NodePlace) -> String {
    format!("{NODE_MARK}={}", place.mark)
}

/// Ends all steps of pods on this node: they are not below the agent's guard, which ends everything else.
pub fn end_all(place: &NodePlace) {
    let mark = node_mark(place);
    let end = Instant::now() + LAST_BREATH;
    while Instant::now() < end {
        match linux::process::kill_marked(&mark) {
            Ok(0) => return,
            Ok(_) => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => {
                tracing::warn!(%error, "cannot look for the steps of pods");
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_pod_needs_is_asked_of_slurm_in_its_own_units() {
        let needs = |memory_bytes| PodResources {
            memory_bytes,
            ..PodResources::default()
        };
        assert_eq!(memory_mb(&needs(0)), None);
        assert_eq!(memory_mb(&needs(1)), Some(64));
        assert_eq!(memory_mb(&needs((300 << 20) + 1)), Some(301));

        let extended = [
            ("nvidia.com/gpu", 1),
            ("amd.com/gpu", 1),
            ("coracle.dev/shard", 3),
            ("example.com/dongle", 1),
        ]
        .map(|(name, count)| (name.to_owned(), count));
        assert_eq!(
            gres(&extended.into()),
            [("gpu".to_owned(), 2), ("shard".to_owned(), 3)]
        );
    }
}
