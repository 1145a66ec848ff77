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
use kubelet::{LaunchRequest, PodResources};
use rustix::process::Pid;
use slurm::{ExactStep, Slurm};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStderr, ChildStdout};
use tokio::task::JoinHandle;

use super::NodeLauncher;
use super::process::SandboxProcess;
use crate::roles::sandbox::{FAILED_PREFIX, RUNNING_PREFIX};

/// How long `srun` waits for resources. A step that has just ended may not have released them yet; beyond this, other steps hold them.
const RESOURCE_TIMEOUT: Duration = Duration::from_secs(3);
/// Time-out of starting a step. Slurm's controller may be unavailable.
const STEP_START_TIMEOUT: Duration = Duration::from_secs(20);
/// Limit on the output that is read from srun.
const MAX_SRUN_OUTPUT: u64 = 16 * 1024;
/// Minimum memory of a step: with less, the sandbox itself would be OOM-killed or could not unpack an image.
const MIN_MEMORY_MB: u64 = 64;

/// Starts a sandbox and waits until it runs or has failed.
pub async fn start(
    launcher: &NodeLauncher,
    request: &LaunchRequest,
) -> anyhow::Result<SandboxProcess> {
    let line = launcher.config_line(request).await?;
    let mut srun = spawn(launcher, request)?;
    if let Some(mut input) = srun.stdin.take() {
        // A refused step does not read. srun's error output gives the reason.
        let _ = input.write_all(line.as_bytes()).await;
    }
    let stderr = tokio::spawn(read_stderr(srun.stderr.take()));
    let report =
        tokio::time::timeout(STEP_START_TIMEOUT, read_start_report(srun.stdout.take())).await;
    // On a time-out srun is dropped and thereby killed, and its child then ends the step.
    let report = report.with_context(|| {
        let seconds = STEP_START_TIMEOUT.as_secs();
        format!("Slurm did not start the step within {seconds} s")
    })??;
    match report {
        Some(StartReport::Running(sandbox)) => {
            detach_step(srun).await?;
            Ok(sandbox)
        }
        Some(StartReport::Failed(problem)) => bail!("{problem}"),
        None => Err(start_error(srun, stderr).await?),
    }
}

/// Other steps of the job hold the pod's resources.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ResourcesBusy(String);

/// A sandbox's report about its start.
enum StartReport {
    Running(SandboxProcess),
    Failed(String),
}

fn spawn(launcher: &NodeLauncher, request: &LaunchRequest) -> anyhow::Result<Child> {
    let slurm = Slurm::find()?;
    let mut args = vec!["internal".to_owned(), "sandbox".to_owned()];
    // As an argument, because the environment of a non-dumpable process cannot be read.
    args.extend(slurm::JobProcessMarkers::of_current_job().map(|job| job.env_variable));
    let gres = gres(&request.resources.extended);
    let step = ExactStep {
        job_id: launcher.job,
        node: &launcher.node,
        cpus: request.resources.cpu_millis.div_ceil(1000),
        memory_mb: memory_mb(&request.resources),
        gres: &gres,
        // The agent's executable may be deleted already, but it is available under /proc on this node.
        program: &PathBuf::from(format!("/proc/{}/exe", std::process::id())),
        args: &args,
        name: &format!("{}/{}", request.namespace, request.name),
        resource_timeout: RESOURCE_TIMEOUT,
    };
    let names = slurm::environment_names();
    let invocation = step.invocation(&slurm, names.iter().map(String::as_str));
    tracing::debug!(command = invocation.display(), "starting a pod as a step");
    let mut command = invocation.command();
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().context("cannot start srun")
}

/// The step's memory. `None` without a request or with a request of zero: the step then shares the job's memory.
fn memory_mb(resources: &PodResources) -> Option<u64> {
    let bytes = Some(resources.memory_bytes).filter(|bytes| *bytes > 0)?;
    Some(bytes.div_ceil(1 << 20).max(MIN_MEMORY_MB))
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
async fn read_start_report(stdout: Option<ChildStdout>) -> anyhow::Result<Option<StartReport>> {
    let stdout = stdout.context("srun has no standard output")?;
    let mut lines = BufReader::new(stdout.take(MAX_SRUN_OUTPUT)).split(b'\n');
    while let Some(line) = lines.next_segment().await? {
        let line = String::from_utf8_lossy(&line);
        if let Some(pid) = line.strip_prefix(RUNNING_PREFIX) {
            let pid = pid.trim().parse().unwrap_or_default();
            // The sandbox has not exited: it waits for this agent to send the bundle.
            let process = SandboxProcess::open(pid).context("cannot open the sandbox's process")?;
            return Ok(Some(StartReport::Running(process)));
        }
        if let Some(problem) = line.strip_prefix(FAILED_PREFIX) {
            return Ok(Some(StartReport::Failed(problem.to_owned())));
        }
    }
    Ok(None)
}

async fn read_stderr(pipe: Option<ChildStderr>) -> String {
    let mut stderr = Vec::new();
    if let Some(pipe) = pipe {
        let _ = pipe.take(MAX_SRUN_OUTPUT).read_to_end(&mut stderr).await;
    }
    String::from_utf8_lossy(&stderr).into_owned()
}

/// Makes an error from srun's output.
async fn start_error(mut srun: Child, stderr: JoinHandle<String>) -> anyhow::Result<anyhow::Error> {
    let status = tokio::time::timeout(STEP_START_TIMEOUT, srun.wait())
        .await
        .context("srun does not exit")??;
    let stderr = stderr.await.unwrap_or_default();
    let error = slurm::classify("srun", Some(status), &stderr);
    let (hint, is_busy) = (error.hint(), error.is_busy());
    let error = anyhow::Error::from(error);
    // One line, because the error becomes the message of an Event.
    let text = match hint {
        Some(hint) => format!("{error:#}; {hint}"),
        None => format!("{error:#}"),
    };
    Ok(match is_busy {
        true => ResourcesBusy(text).into(),
        false => anyhow::Error::msg(text),
    })
}

/// Kills `srun` without ending the step.
async fn detach_step(mut srun: Child) -> anyhow::Result<()> {
    if let Some(pid) = srun.id().and_then(|id| Pid::from_raw(id.cast_signed())) {
        linux::process::kill_tree(pid)?;
    }
    srun.wait().await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pod_resources_are_converted_to_slurm_units() {
        let resources = |memory_bytes| PodResources {
            memory_bytes,
            ..PodResources::default()
        };
        assert_eq!(memory_mb(&resources(0)), None);
        assert_eq!(memory_mb(&resources(1)), Some(64));
        assert_eq!(memory_mb(&resources((300 << 20) + 1)), Some(301));

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
