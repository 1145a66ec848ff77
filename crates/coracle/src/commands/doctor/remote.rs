//! `coracle doctor --partition`: `srun` starts this program on a compute node.

use console::print_stderr;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use slurm::{Invocation, Slurm, SlurmError, Submission};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::report::DoctorReport;
use crate::foreground_srun;
use cluster::carry::program_stream::ProgramStream;
use cluster::carry::script::{self, SHELL};

/// Limit on the report, and on standard error of `srun`.
const MAX_OUTPUT: u64 = 1 << 20;
/// Delay before a message says that the job is queued.
const QUEUED_MESSAGE_DELAY: Duration = Duration::from_secs(3);

/// Runs the doctor on a node of `partition` and returns its report.
pub async fn run_on_node(partition: &str) -> anyhow::Result<DoctorReport> {
    let slurm = Slurm::find().map_err(cluster::slurm_failure)?;
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let args = ["doctor".to_owned(), "--json".to_owned()];
    match attempt(&slurm, partition, &program, &args, None).await {
        Err(SlurmError::ProgramNotFound { .. }) => {
            // The node does not see this program's file, so a shell there receives a copy of it.
            let copy = ProgramStream::of_this_program()
                .await
                .context("cannot read our own program")?;
            let shell = script::run_command("error:", &copy, &args);
            let copy = Some((copy, shell.variable()));
            attempt(&slurm, partition, Path::new(SHELL), &shell.args, copy).await
        }
        other => other,
    }
    .map_err(|error| cluster::slurm_failure(error).into())
}

async fn attempt(
    slurm: &Slurm,
    partition: &str,
    program: &Path,
    args: &[String],
    copy: Option<(ProgramStream, (String, String))>,
) -> Result<DoctorReport, SlurmError> {
    let mut invocation = invocation(slurm, partition, program, args);
    let (copy, variable) = copy.unzip();
    invocation.env_set.extend(variable);
    let start_error = |source| foreground_srun::start_error(&invocation, source);
    let mut child = foreground_srun::spawn(&invocation, copy, Stdio::piped())?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let work = async {
        let (stdout, stderr) =
            tokio::try_join!(read_bounded(stdout), read_bounded(stderr)).map_err(start_error)?;
        let status = child.wait().await.map_err(start_error)?;
        Ok::<_, SlurmError>((stdout, stderr, status))
    };
    tokio::pin!(work);
    let output = tokio::select! {
        output = &mut work => output,
        () = tokio::time::sleep(QUEUED_MESSAGE_DELAY) => {
            print_stderr(format_args!("waiting for Slurm to allocate a node of partition {partition:?} (Ctrl-C cancels)"));
            work.await
        }
    };
    let (stdout, stderr, status) = output?;
    // The doctor itself exits with 1 too if pods can't run, so a report on standard output decides.
    find_report(&stdout).ok_or_else(|| slurm::classify("srun", Some(status), &stderr))
}

/// Finds the report in a task's output: the site's prologs and shells may print lines before and after it.
fn find_report(stdout: &str) -> Option<DoctorReport> {
    let starts = stdout.match_indices('{').map(|(at, _)| at);
    let at_line_start = |&at: &usize| at == 0 || stdout.as_bytes()[at - 1] == b'\n';
    starts.filter(at_line_start).take(100).find_map(|at| {
        serde_json::Deserializer::from_str(&stdout[at..])
            .into_iter::<DoctorReport>()
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
    // Start a new job even inside a job: srun must not see the variables that make it start a step.
    let describes_job = |name: &String| {
        name.starts_with("SLURM_JOB")
            || name == "SLURM_NODELIST"
            || !slurm::is_inherited_by_steps(name)
    };
    invocation.env_remove = slurm::environment_names()
        .into_iter()
        .filter(describes_job)
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
    fn report_is_found_among_other_output() {
        let report = r#"{"schema":1,"coracle":"0","host":"n","podsCanRun":true,"slurmUsable":true,"findings":[]}"#;
        let found = |text: &str| find_report(text).map(|report| report.host);
        assert_eq!(found(report).as_deref(), Some("n"));
        let with_noise = format!("{{ welcome }}\n{report}\nbye {{\n");
        assert_eq!(found(&with_noise).as_deref(), Some("n"));
        assert_eq!(found("{\n{}\n"), None);
        assert_eq!(found(""), None);
    }

    #[test]
    fn srun_starts_one_task_in_new_job() {
        let dir = Path::new("/usr/bin");
        let at = |name: &str| dir.join(name);
        let slurm = Slurm {
            srun: at("srun"),
            scontrol: at("scontrol"),
            squeue: at("squeue"),
            sinfo: at("sinfo"),
            scancel: at("scancel"),
        };
        let args = ["doctor".to_owned(), "--json".to_owned()];
        let invocation = invocation(&slurm, "gpu", Path::new("/c/coracle"), &args);
        insta::assert_snapshot!(invocation.display());
    }
}
