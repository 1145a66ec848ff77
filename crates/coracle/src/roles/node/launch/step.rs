//! Starts a pod's sandbox as a step of the Slurm job, so that Slurm enforces and accounts the pod's resources.
//!
//! ```text
//!   agent ── srun ◄─────────────► slurmstepd ── coracle internal sandbox
//!              └ srun's child       reports on standard output that it runs
//! ```
//!
//! `srun` runs only until the sandbox reports that it runs. Then the agent kills first `srun`'s child process, which would end the
//! step with `srun`, and then `srun` itself. A step does not need its `srun`; with one, the pod would die with it, and at the end of a
//! job Slurm signals `srun` before the pod's grace period has passed. Accounting and limits are unaffected.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use kubelet::{LaunchRequest, PodResources, SandboxProcess};
use rustix::process::Pid;
use slurm::{ExactStep, Slurm};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStderr, ChildStdout};
use tokio::task::JoinHandle;

use super::Launchers;
use crate::node_dir;
use crate::roles::sandbox::{FAILED, RUNNING};

/// How long `srun` waits for resources. A step that has just ended may not have released them yet; beyond this, other steps hold them.
const BUSY_PATIENCE: Duration = Duration::from_secs(3);
/// Time-out of starting a step. Slurm's controller may be unavailable.
const START_PATIENCE: Duration = Duration::from_secs(20);
/// Limit on the output that is read from srun.
const MAX_WORDS: u64 = 16 * 1024;
/// Minimum memory of a step: with less, the sandbox itself would be OOM-killed or could not unpack an image.
const LEAST_MEMORY_MB: u64 = 64;

/// Starts a sandbox and waits until it runs or has failed.
pub async fn start(node: &Launchers, launch: LaunchRequest) -> anyhow::Result<SandboxProcess> {
    let line = node.start_line(&launch).await?;
    let mut srun = spawn(node, &launch)?;
    if let Some(mut input) = srun.stdin.take() {
        // A refused step does not read. srun's error output says why.
        let _ = input.write_all(line.as_bytes()).await;
    }
    let words = tokio::spawn(read_words(srun.stderr.take()));
    let said = tokio::time::timeout(START_PATIENCE, first_word(srun.stdout.take())).await;
    // On a time-out srun is dropped and thereby killed, and its child then ends the step.
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

/// A sandbox's report about its start.
enum Word {
    Running(SandboxProcess),
    Failed(String),
}

fn spawn(node: &Launchers, launch: &LaunchRequest) -> anyhow::Result<Child> {
    let slurm = Slurm::find()?;
    let mut args = vec!["internal".to_owned(), "sandbox".to_owned()];
    // As arguments, because the environment of a non-dumpable process cannot be read.
    args.push(node.place.mark_argument());
    args.extend(slurm::JobProcessMarkers::of_current_job().map(|job| job.env_variable));
    let gres = gres(&launch.resources.extended);
    let step = ExactStep {
        job_id: node.job,
        node: &node.node,
        cpus: launch.resources.cpu_millis.div_ceil(1000),
        memory_mb: memory_mb(&launch.resources),
        gres: &gres,
        // The agent's executable may be deleted already, but it is available under /proc on this node.
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
        .env(node_dir::MARK, &node.place.mark)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().context("cannot start srun")
}

/// The step's memory. `None` without a request or with a request of zero: the step then shares the job's memory.
fn memory_mb(needs: &PodResources) -> Option<u64> {
    let bytes = Some(needs.memory_bytes).filter(|bytes| *bytes > 0)?;
    Some(bytes.div_ceil(1 << 20).max(LEAST_MEMORY_MB))
}

/// Translates extended resources to Slurm's GRES. Skips resources that Slurm does not manage.
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

/// Reads the sandbox's report; `None` if it never ran. Skips output of a site's prolog.
async fn first_word(stdout: Option<ChildStdout>) -> anyhow::Result<Option<Word>> {
    let stdout = stdout.context("srun has no standard output")?;
    let mut lines = BufReader::new(stdout.take(MAX_WORDS)).split(b'\n');
    while let Some(line) = lines.next_segment().await? {
        let line = String::from_utf8_lossy(&line);
        if let Some(pid) = line.strip_prefix(RUNNING) {
            let id = pid.trim().parse().unwrap_or_default();
            // The sandbox has not exited: it waits for this agent to send the bundle.
            let process =
                SandboxProcess::with_id(id).context("the sandbox can't be seen from here")?;
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

/// Makes an error from srun's output.
async fn why_not(mut srun: Child, words: JoinHandle<String>) -> anyhow::Result<anyhow::Error> {
    let status = tokio::time::timeout(START_PATIENCE, srun.wait())
        .await
        .context("srun does not end")??;
    let words = words.await.unwrap_or_default();
    let error = slurm::classify("srun", Some(status), &words);
    let hint = error.hint();
    let error = anyhow::Error::from(error);
    Ok(match hint {
        // One line, because the error becomes the message of an Event.
        Some(hint) => anyhow::anyhow!("{error:#}; {hint}"),
        None => error,
    })
}

/// Kills `srun` without ending the step.
async fn leave_alone(mut srun: Child) -> anyhow::Result<()> {
    if let Some(pid) = srun.id().and_then(|id| Pid::from_raw(id.cast_signed())) {
        linux::process::kill_from_below(pid)?;
    }
    srun.wait().await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pod_resources_are_converted_to_slurm_units() {
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
