//! Locates Slurm's commands and runs those that query it.

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;

use crate::classify::classify;
use crate::error::{SlurmError, sanitize};
use crate::srun_options::SrunOptions;
use crate::{JobDetail, Partition, PendingJob, SlurmVersion, parse_job_detail, parse_partitions};

/// How long a command may run.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);
/// Limit for stdout, in bytes. A job on ten thousand nodes takes about one megabyte.
const MAX_COMMAND_STDOUT: u64 = 8 << 20;
/// Limit for stderr, in bytes. The rest is discarded.
const MAX_COMMAND_STDERR: u64 = 64 << 10;

/// The paths of Slurm's commands on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slurm {
    /// Starts jobs and steps.
    pub srun: PathBuf,
    /// Shows jobs and pings controllers.
    pub scontrol: PathBuf,
    /// Lists jobs.
    pub squeue: PathBuf,
    /// Lists partitions and nodes.
    pub sinfo: PathBuf,
    /// Cancels and signals jobs and steps.
    pub scancel: PathBuf,
}

/// The result of a command.
struct CommandOutput {
    status: ExitStatus,
    stdout: String,
    stderr: String,
}

/// The file that a shell would execute for a command, given the value of `PATH`.
pub fn on_path(name: &str, path: &std::ffi::OsStr) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let is_executable = |file: &PathBuf| {
        file.metadata()
            .is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
    };
    // Skip relative entries: they depend on the working directory.
    std::env::split_paths(path)
        .filter(|dir| dir.is_absolute())
        .map(|dir| dir.join(name))
        .find(is_executable)
}

impl Slurm {
    /// Locates the commands on `PATH` without running them.
    pub fn find() -> Result<Self, SlurmError> {
        Self::find_on(&std::env::var_os("PATH").unwrap_or_default())
    }

    /// As [`Slurm::find`], with the value of `PATH` given.
    pub fn find_on(path: &std::ffi::OsStr) -> Result<Self, SlurmError> {
        let mut missing = Vec::new();
        let mut locate = |name| {
            on_path(name, path).unwrap_or_else(|| {
                missing.push(name);
                PathBuf::new()
            })
        };
        let slurm = Self {
            srun: locate("srun"),
            scontrol: locate("scontrol"),
            squeue: locate("squeue"),
            sinfo: locate("sinfo"),
            scancel: locate("scancel"),
        };
        if missing.is_empty() {
            Ok(slurm)
        } else {
            Err(SlurmError::NotInstalled { missing })
        }
    }

    /// The version of the commands. They need their configuration even for this.
    pub async fn version(&self) -> Result<SlurmVersion, SlurmError> {
        let stdout = run(&self.srun, &["--version"]).await?.success(&self.srun)?;
        SlurmVersion::parse(&stdout).ok_or_else(|| {
            unexpected_output(&self.srun, format!("no version in {:?}", sanitize(&stdout)))
        })
    }

    /// The options of this `srun`, which include those of the site's SPANK plugins.
    pub async fn srun_options(&self) -> Result<SrunOptions, SlurmError> {
        let help = run(&self.srun, &["--help"]).await?.success(&self.srun)?;
        let mut options = SrunOptions::built_in();
        options.add_from_help(&help);
        Ok(options)
    }

    /// Checks that a controller answers; `Err(ControllerDown)` if none does. Takes one round trip.
    pub async fn ping(&self) -> Result<(), SlurmError> {
        let output = run(&self.scontrol, &["ping"]).await?;
        if output.status.success() {
            return Ok(());
        }
        // scontrol reports a controller that is down on stdout ("Slurmctld(primary) at login is DOWN").
        let text = format!("{}\n{}", output.stdout, output.stderr);
        Err(match classify("scontrol", Some(output.status), &text) {
            SlurmError::Failed { .. } | SlurmError::Refused { .. } => SlurmError::ControllerDown {
                message: sanitize(&text),
            },
            other => other,
        })
    }

    /// The resources that Slurm allocated to a job on each of its nodes.
    pub async fn job_detail(&self, job_id: u32) -> Result<JobDetail, SlurmError> {
        let id = job_id.to_string();
        let stdout = run(&self.scontrol, &["show", "job", "-d", &id])
            .await?
            .success(&self.scontrol)?;
        let detail = parse_job_detail(&stdout)
            .map_err(|problem| unexpected_output(&self.scontrol, problem))?;
        if detail.job_id != job_id {
            return Err(unexpected_output(
                &self.scontrol,
                format!("requested job {job_id}, got job {}", detail.job_id),
            ));
        }
        Ok(detail)
    }

    /// How long Slurm waits between SIGTERM and SIGKILL when it ends a job (`KillWait`).
    pub async fn kill_wait(&self) -> Result<Option<Duration>, SlurmError> {
        let stdout = run(&self.scontrol, &["show", "config"])
            .await?
            .success(&self.scontrol)?;
        Ok(parse_kill_wait(&stdout))
    }

    /// Sends a signal to every task of a step. Succeeds if the step has already ended.
    pub async fn signal_step(&self, job: u32, step: u32, signal: &str) -> Result<(), SlurmError> {
        let signal = format!("--signal={signal}");
        run(
            &self.scancel,
            &["--quiet", &signal, &format!("{job}.{step}")],
        )
        .await?;
        Ok(())
    }

    /// Asks whether Slurm would accept a job with these options of `srun`, without submitting it. Returns Slurm's estimate.
    pub async fn test_request(&self, options: &[String]) -> Result<String, SlurmError> {
        let options = options.iter().map(String::as_str);
        let args: Vec<&str> = ["--test-only"]
            .into_iter()
            .chain(options)
            .chain(["true"])
            .collect();
        let output = run(&self.srun, &args).await?;
        if !output.status.success() {
            return Err(classify("srun", Some(output.status), &output.stderr));
        }
        Ok(parse_test_estimate(&output.stderr).to_owned())
    }

    /// Why a job is pending; `None` if it is not.
    pub async fn pending_job(&self, job: u32) -> Result<Option<PendingJob>, SlurmError> {
        let jobs = format!("--jobs={job}");
        let args = ["--noheader", &jobs, crate::pending_job::SQUEUE_FORMAT];
        let stdout = run(&self.squeue, &args).await?.success(&self.squeue)?;
        Ok(crate::pending_job::parse_pending_job(&stdout))
    }

    /// Our own running jobs that have a step of this name.
    pub async fn jobs_with_step(&self, name: &str) -> Result<Vec<u32>, SlurmError> {
        let stdout = run(&self.squeue, crate::step_list::SQUEUE_ARGS)
            .await?
            .success(&self.squeue)?;
        Ok(crate::step_list::jobs_with_step(&stdout, name))
    }

    /// The partitions that are visible to this user.
    pub async fn partitions(&self) -> Result<Vec<Partition>, SlurmError> {
        let stdout = run(&self.sinfo, crate::partitions::SINFO_ARGS)
            .await?
            .success(&self.sinfo)?;
        Ok(parse_partitions(&stdout))
    }
}

/// The resources in `srun: Job 1 to start at 1794946176 using 2 processors on nodes node[1-2] in partition main`.
fn parse_test_estimate(stderr: &str) -> &str {
    let line = stderr.lines().find(|line| line.contains(" to start at "));
    line.and_then(|line| line.split_once(" using "))
        .map_or("", |(_, resources)| resources.trim())
}

/// `KillWait                = 30 sec`
fn parse_kill_wait(config: &str) -> Option<Duration> {
    config.lines().find_map(|line| {
        let (name, value) = line.split_once('=')?;
        let seconds = value.split_whitespace().next()?;
        (name.trim() == "KillWait").then(|| seconds.parse().ok().map(Duration::from_secs))?
    })
}

impl CommandOutput {
    fn success(self, program: &Path) -> Result<String, SlurmError> {
        if self.status.success() {
            Ok(self.stdout)
        } else {
            Err(classify(&name_of(program), Some(self.status), &self.stderr))
        }
    }
}

fn name_of(program: &Path) -> String {
    program.file_name().map_or_else(
        || program.display().to_string(),
        |name| name.to_string_lossy().into_owned(),
    )
}

fn unexpected_output(program: &Path, problem: impl Into<String>) -> SlurmError {
    SlurmError::UnexpectedOutput {
        command: name_of(program),
        problem: problem.into(),
    }
}

/// Runs one command to its end: without a shell or standard input, in the C locale, with limits on time and output size.
async fn run(program: &Path, args: &[&str]) -> Result<CommandOutput, SlurmError> {
    let cannot_start = |source| SlurmError::Start {
        command: program.display().to_string(),
        source,
    };
    let mut command = Command::new(program);
    command
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    // Without this format Slurm prints local time without a zone.
    command.env("LC_ALL", "C").env("SLURM_TIME_FORMAT", "%s");
    for (name, _) in std::env::vars_os() {
        if changes_output(&name.to_string_lossy()) {
            command.env_remove(name);
        }
    }
    let mut child = command.spawn().map_err(cannot_start)?;
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let work = async {
        tokio::try_join!(
            read_bounded(out, MAX_COMMAND_STDOUT, &mut stdout),
            read_bounded(err, MAX_COMMAND_STDERR, &mut stderr)
        )?;
        child.wait().await
    };
    let finished = tokio::time::timeout(COMMAND_TIMEOUT, work).await;
    let stderr = String::from_utf8_lossy(&stderr).into_owned();
    let Ok(status) = finished else {
        // A command that retries may have printed the reason.
        return Err(match classify(&name_of(program), None, &stderr) {
            SlurmError::Failed { .. } => SlurmError::Timeout {
                command: name_of(program),
                seconds: COMMAND_TIMEOUT.as_secs(),
            },
            known => known,
        });
    };
    let status = status.map_err(cannot_start)?;
    tracing::debug!(command = %program.display(), ?args, %status, "ran Slurm command");
    if stdout.len() as u64 >= MAX_COMMAND_STDOUT {
        return Err(unexpected_output(program, "it is too long"));
    }
    Ok(CommandOutput {
        status,
        stdout: String::from_utf8_lossy(&stdout).into_owned(),
        stderr,
    })
}

/// Whether a variable selects a format, a filter or another cluster for these commands.
fn changes_output(name: &str) -> bool {
    ["SQUEUE_", "SINFO_", "SCONTROL_"]
        .iter()
        .any(|prefix| name.starts_with(prefix))
        || matches!(
            name,
            "SLURM_CLUSTERS" | "SLURM_JSON" | "SLURM_YAML" | "SLURM_DEBUG_FLAGS"
        )
}

/// Reads up to `limit` bytes and discards the rest, so that the command never blocks on a full pipe.
async fn read_bounded(
    source: Option<impl AsyncRead + Unpin>,
    limit: u64,
    bytes: &mut Vec<u8>,
) -> std::io::Result<()> {
    let Some(mut source) = source else {
        return Ok(());
    };
    (&mut source).take(limit).read_to_end(bytes).await?;
    tokio::io::copy(&mut source, &mut tokio::io::sink()).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn script(dir: &Path, name: &str, body: &str) -> PathBuf {
        let file = dir.join(name);
        std::fs::write(&file, format!("#!/bin/sh\n{body}\n")).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        file
    }

    #[test]
    fn kill_wait_is_parsed_from_configuration() {
        let config = "KeepAliveTime           = SYSTEM_DEFAULT\nKillOnBadExit           = 0\nKillWait                = 15 sec\n";
        assert_eq!(parse_kill_wait(config), Some(Duration::from_secs(15)));
        for invalid in [
            "",
            "KillWait",
            "KillWait = ",
            "KillWait = soon",
            "xKillWait = 3 sec",
        ] {
            assert_eq!(parse_kill_wait(invalid), None, "{invalid}");
        }
    }

    #[test]
    fn estimate_of_test_request_is_parsed() {
        let line = "srun: Job 1 to start at 1794946176 using 2 processors on nodes node[1-2] in partition main\n";
        assert_eq!(
            parse_test_estimate(line),
            "2 processors on nodes node[1-2] in partition main"
        );
        assert_eq!(parse_test_estimate("srun: other"), "");
    }

    #[test]
    fn error_lists_missing_commands() {
        let dir = tempfile::tempdir().unwrap();
        script(dir.path(), "srun", "exit 0");
        std::fs::write(dir.path().join("sinfo"), "not executable").unwrap();
        let error = Slurm::find_on(dir.path().as_os_str()).unwrap_err();
        insta::assert_snapshot!(error, @"Slurm is not installed on this host: scontrol, squeue, sinfo, scancel not found on PATH");
        assert!(error.hint().is_some());
    }

    #[tokio::test]
    async fn output_is_bounded_and_failures_are_classified() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["squeue", "sinfo", "scancel"] {
            script(dir.path(), name, "exit 0");
        }
        script(dir.path(), "srun", "yes x | head -c 20000000");
        script(
            dir.path(),
            "scontrol",
            "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1",
        );
        let slurm = Slurm::find_on(dir.path().as_os_str()).unwrap();
        assert!(matches!(
            slurm.version().await,
            Err(SlurmError::UnexpectedOutput { .. })
        ));
        assert!(matches!(
            slurm.job_detail(1).await,
            Err(SlurmError::ControllerDown { .. })
        ));
        assert!(matches!(
            slurm.ping().await,
            Err(SlurmError::ControllerDown { .. })
        ));
    }
}
