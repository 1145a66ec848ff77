//! Finding Slurm's commands and asking them questions.

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;

use crate::classify::classify;
use crate::error::{SlurmError, clean_words};
use crate::{JobDetail, Partition, Version, parse_job_detail, parse_partitions};

/// How long a question to Slurm may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most that we read of an answer. A job on ten thousand nodes takes about one megabyte.
const MAX_ANSWER: u64 = 8 << 20;
/// Most that we read of complaints.
const MAX_COMPLAINT: u64 = 64 << 10;

/// The commands of the Slurm that is installed here.
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
    /// Submits batch jobs.
    pub sbatch: PathBuf,
    /// Ends and signals jobs.
    pub scancel: PathBuf,
}

/// What a command answered.
struct Answer {
    status: ExitStatus,
    stdout: String,
    stderr: String,
}

/// The file that `PATH` (given as its value) would run for a command; nothing is executed.
pub fn on_path(name: &str, path: &std::ffi::OsStr) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let runnable = |file: &PathBuf| {
        file.metadata()
            .is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
    };
    // Relative entries are skipped: what they name depends on where we happen to be.
    std::env::split_paths(path)
        .filter(|dir| dir.is_absolute())
        .map(|dir| dir.join(name))
        .find(runnable)
}

impl Slurm {
    /// Locates the commands on `PATH`. Nothing is executed.
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
            sbatch: locate("sbatch"),
            scancel: locate("scancel"),
        };
        if missing.is_empty() {
            Ok(slurm)
        } else {
            Err(SlurmError::NotInstalled { missing })
        }
    }

    /// The version of the commands. (They need their configuration even for this.)
    pub async fn version(&self) -> Result<Version, SlurmError> {
        let answer = ask(&self.srun, &["--version"]).await?.success(&self.srun)?;
        Version::parse(&answer).ok_or_else(|| {
            unreadable(
                &self.srun,
                format!("no version in {:?}", clean_words(&answer)),
            )
        })
    }

    /// Whether a controller answers; `Err(ControllerDown)` when none does. Fast: one round trip.
    pub async fn ping(&self) -> Result<(), SlurmError> {
        let answer = ask(&self.scontrol, &["ping"]).await?;
        if answer.status.success() {
            return Ok(());
        }
        // A controller that is down is reported on stdout ("Slurmctld(primary) at login is DOWN").
        let words = format!("{}\n{}", answer.stdout, answer.stderr);
        Err(match classify("scontrol", Some(answer.status), &words) {
            SlurmError::Failed { .. } | SlurmError::Refused { .. } => SlurmError::ControllerDown {
                words: clean_words(&words),
            },
            other => other,
        })
    }

    /// What Slurm gave to a job, node by node.
    pub async fn job_detail(&self, job_id: u32) -> Result<JobDetail, SlurmError> {
        let id = job_id.to_string();
        let answer = ask(&self.scontrol, &["show", "job", "-d", &id])
            .await?
            .success(&self.scontrol)?;
        let detail =
            parse_job_detail(&answer).map_err(|problem| unreadable(&self.scontrol, problem))?;
        if detail.job_id != job_id {
            return Err(unreadable(
                &self.scontrol,
                format!("asked for job {job_id}, got job {}", detail.job_id),
            ));
        }
        Ok(detail)
    }

    /// How long Slurm waits between its first signal to a job that ends and the last (KillWait).
    pub async fn kill_wait(&self) -> Result<Option<Duration>, SlurmError> {
        let answer = ask(&self.scontrol, &["show", "config"])
            .await?
            .success(&self.scontrol)?;
        Ok(parse_kill_wait(&answer))
    }

    /// Sends a signal to every task of a step. A step that is over is no error.
    pub async fn signal_step(&self, job: u32, step: u32, signal: &str) -> Result<(), SlurmError> {
        let signal = format!("--signal={signal}");
        ask(
            &self.scancel,
            &["--quiet", &signal, &format!("{job}.{step}")],
        )
        .await?;
        Ok(())
    }

    /// Our own running jobs that have a step of this name.
    pub async fn jobs_with_step(&self, name: &str) -> Result<Vec<u32>, SlurmError> {
        let answer = ask(&self.squeue, crate::steps::ARGS)
            .await?
            .success(&self.squeue)?;
        Ok(crate::steps::jobs_with_step(&answer, name))
    }

    /// The partitions that we may see.
    pub async fn partitions(&self) -> Result<Vec<Partition>, SlurmError> {
        let answer = ask(&self.sinfo, crate::partitions::ARGS)
            .await?
            .success(&self.sinfo)?;
        Ok(parse_partitions(&answer))
    }
}

/// `KillWait                = 30 sec`
fn parse_kill_wait(config: &str) -> Option<Duration> {
    config.lines().find_map(|line| {
        let (name, value) = line.split_once('=')?;
        let seconds = value.split_whitespace().next()?;
        (name.trim() == "KillWait").then(|| seconds.parse().ok().map(Duration::from_secs))?
    })
}

impl Answer {
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

fn unreadable(program: &Path, problem: impl Into<String>) -> SlurmError {
    SlurmError::Unreadable {
        command: name_of(program),
        problem: problem.into(),
    }
}

/// Runs one command to its end: no shell, no standard input, in the C locale, bounded in time and in size.
async fn ask(program: &Path, args: &[&str]) -> Result<Answer, SlurmError> {
    let start = |source| SlurmError::Start {
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
    // Times as seconds since 1970: Slurm prints local time with no zone otherwise.
    command.env("LC_ALL", "C").env("SLURM_TIME_FORMAT", "%s");
    for (name, _) in std::env::vars_os() {
        if changes_output(&name.to_string_lossy()) {
            command.env_remove(name);
        }
    }
    let mut child = command.spawn().map_err(start)?;
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let work = async {
        tokio::try_join!(
            read_bounded(out, MAX_ANSWER, &mut stdout),
            read_bounded(err, MAX_COMPLAINT, &mut stderr)
        )?;
        child.wait().await
    };
    let ended = tokio::time::timeout(PATIENCE, work).await;
    let stderr = String::from_utf8_lossy(&stderr).into_owned();
    let Ok(status) = ended else {
        // A command that keeps trying has often said why.
        return Err(match classify(&name_of(program), None, &stderr) {
            SlurmError::Failed { .. } => SlurmError::Timeout {
                command: name_of(program),
                seconds: PATIENCE.as_secs(),
            },
            known => known,
        });
    };
    let status = status.map_err(start)?;
    tracing::debug!(command = %program.display(), ?args, %status, "asked Slurm");
    if stdout.len() as u64 >= MAX_ANSWER {
        return Err(unreadable(program, "it is too long"));
    }
    Ok(Answer {
        status,
        stdout: String::from_utf8_lossy(&stdout).into_owned(),
        stderr,
    })
}

/// Variables with which users choose formats, filters or other clusters for these commands.
fn changes_output(name: &str) -> bool {
    ["SQUEUE_", "SINFO_", "SCONTROL_"]
        .iter()
        .any(|prefix| name.starts_with(prefix))
        || matches!(
            name,
            "SLURM_CLUSTERS" | "SLURM_JSON" | "SLURM_YAML" | "SLURM_DEBUG_FLAGS"
        )
}

/// Reads up to `limit` bytes and throws the rest away, so that the command is never blocked by a full pipe.
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
    fn the_time_to_end_is_found_in_the_configuration() {
        let config = "KeepAliveTime           = SYSTEM_DEFAULT\nKillOnBadExit           = 0\nKillWait                = 15 sec\n";
        assert_eq!(parse_kill_wait(config), Some(Duration::from_secs(15)));
        for odd in [
            "",
            "KillWait",
            "KillWait = ",
            "KillWait = soon",
            "xKillWait = 3 sec",
        ] {
            assert_eq!(parse_kill_wait(odd), None, "{odd}");
        }
    }

    #[test]
    fn missing_commands_are_named() {
        let dir = tempfile::tempdir().unwrap();
        script(dir.path(), "srun", "exit 0");
        std::fs::write(dir.path().join("sinfo"), "not executable").unwrap();
        let error = Slurm::find_on(dir.path().as_os_str()).unwrap_err();
        insta::assert_snapshot!(error, @"Slurm is not installed on this host: scontrol, squeue, sinfo, sbatch, scancel not found on PATH");
        assert!(error.hint().is_some());
    }

    #[tokio::test]
    async fn answers_are_bounded_and_complaints_understood() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["squeue", "sinfo", "sbatch", "scancel"] {
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
            Err(SlurmError::Unreadable { .. })
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
