//! The doctor on a compute node: the same program, started there by `srun`.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use slurm::{Invocation, Slurm, SlurmError, Submission};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::report::Report;
use crate::carried::program::Program;
use crate::carried::script::{self, SHELL};
use crate::exit::Failure;
use crate::say::say;

/// Most that we read of a report, and of complaints.
const MAX_OUTPUT: u64 = 1 << 20;
/// After this we say that we wait.
const SILENCE: Duration = Duration::from_secs(3);

/// The report on some node of a partition.
pub async fn look(partition: &str) -> anyhow::Result<Report> {
    let slurm = Slurm::find().map_err(Failure::from)?;
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let args = ["doctor".to_owned(), "--json".to_owned()];
    match attempt(&slurm, partition, &program, &args, None).await {
        Err(SlurmError::ProgramNotFound { .. }) => {
            // No shared file system holds us, so a shell there receives us.
            let ours = Program::own()
                .await
                .context("cannot read our own program")?;
            let args = script::run("error:", &ours, &args);
            attempt(&slurm, partition, Path::new(SHELL), &args, Some(ours)).await
        }
        other => other,
    }
    .map_err(|error| Failure::from(error).into())
}

async fn attempt(
    slurm: &Slurm,
    partition: &str,
    program: &Path,
    args: &[String],
    carried: Option<Program>,
) -> Result<Report, SlurmError> {
    let invocation = invocation(slurm, partition, program, args);
    let start = |source| SlurmError::Start {
        command: invocation.display(),
        source,
    };
    // In our own process group: Ctrl-C must reach srun, which then gives the job back.
    let mut child = tokio::process::Command::from(invocation.std_command())
        .stdin(match carried {
            Some(_) => Stdio::piped(),
            None => Stdio::null(),
        })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(start)?;
    if let Some(program) = carried {
        // A step that ends at once doesn't read; its own words say why.
        drop(program.send(child.stdin.take(), |_| Ok(())));
    }
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let work = async {
        let (stdout, stderr) =
            tokio::try_join!(read_bounded(stdout), read_bounded(stderr)).map_err(start)?;
        let status = child.wait().await.map_err(start)?;
        Ok::<_, SlurmError>((stdout, stderr, status))
    };
    tokio::pin!(work);
    let ended = tokio::select! {
        ended = &mut work => ended,
        () = tokio::time::sleep(SILENCE) => {
            say(format_args!("waiting for Slurm to give a node of partition {partition:?} (Ctrl-C gives up)"));
            work.await
        }
    };
    let (stdout, stderr, status) = ended?;
    // Exit code 1 is also the doctor's own, so the report decides.
    find_report(&stdout).ok_or_else(|| slurm::classify("srun", Some(status), &stderr))
}

/// The report in what a task printed: prologs and shells of the site may say something before and after it.
fn find_report(stdout: &str) -> Option<Report> {
    let starts = stdout.match_indices('{').map(|(at, _)| at);
    let at_line_start = |&at: &usize| at == 0 || stdout.as_bytes()[at - 1] == b'\n';
    starts.filter(at_line_start).take(100).find_map(|at| {
        serde_json::Deserializer::from_str(&stdout[at..])
            .into_iter::<Report>()
            .next()?
            .ok()
    })
}

fn invocation(slurm: &Slurm, partition: &str, program: &Path, args: &[String]) -> Invocation {
    let options = [
        format!("--partition={partition}"),
        "--nodes=1".into(),
        "--ntasks=1".into(),
        "--time=5".into(),
        "--chdir=/".into(),
        "--quiet".into(),
    ];
    let submission = Submission {
        options: &options,
        program,
        args,
        within: None,
        terminal: false,
        name: "coracle-doctor",
    };
    let mut invocation = submission.invocation(slurm, []);
    // From inside a job too, a new job is meant and not a step: the job must not be seen.
    let describes_a_job = |name: &String| {
        name.starts_with("SLURM_JOB") || name == "SLURM_NODELIST" || !slurm::is_kept_in_steps(name)
    };
    invocation.env_remove = std::env::vars_os()
        .map(|(name, _)| name.to_string_lossy().into_owned())
        .filter(describes_a_job)
        .collect();
    invocation
}

async fn read_bounded(source: Option<impl AsyncRead + Unpin>) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    if let Some(mut source) = source {
        (&mut source)
            .take(MAX_OUTPUT)
            .read_to_end(&mut bytes)
            .await?;
        tokio::io::copy(&mut source, &mut tokio::io::sink()).await?;
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_found_among_other_words() {
        let report = r#"{"schema":1,"coracle":"0","host":"n","podsCanRun":true,"slurmUsable":true,"findings":[]}"#;
        let found = |text: &str| find_report(text).map(|report| report.host);
        assert_eq!(found(report).as_deref(), Some("n"));
        let noisy = format!("{{ welcome }}\n{report}\nbye {{\n");
        assert_eq!(found(&noisy).as_deref(), Some("n"));
        assert_eq!(found("{\n{}\n"), None);
        assert_eq!(found(""), None);
    }

    #[test]
    fn one_task_of_a_new_job() {
        let dir = Path::new("/usr/bin");
        let at = |name: &str| dir.join(name);
        let slurm = Slurm {
            srun: at("srun"),
            scontrol: at("scontrol"),
            squeue: at("squeue"),
            sinfo: at("sinfo"),
            sbatch: at("sbatch"),
            scancel: at("scancel"),
        };
        let args = ["doctor".to_owned(), "--json".to_owned()];
        let invocation = invocation(&slurm, "gpu", Path::new("/c/coracle"), &args);
        insta::assert_snapshot!(invocation.display());
    }
}
