//! Clusters on other hosts: a step of the cluster's job runs this program on the leader's node.

use console::{Failure, FailureCode, print_stderr};
use std::path::Path;
use std::process::Stdio;

use anyhow::Context;
use slurm::{JobState, Slurm, SlurmError, Submission};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::ClusterSelector;
use crate::exit;
use crate::foreground_srun;
use cluster::carry::program_stream::ProgramStream;
use cluster::carry::script::{self, SHELL};

/// Limit on each captured stream of `srun`.
const MAX_OUTPUT: u64 = 64 * 1024;
/// Limit on the nodes of a job that are searched for the leader, which runs on the first one unless it was told otherwise.
const MAX_SEARCHED_NODES: usize = 8;
/// The name of the step.
const STEP_NAME: &str = "coracle-access";

/// The standard output of a step on the leader's node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepOutput {
    /// It is the standard output of this process.
    Inherited,
    /// It is returned.
    Captured,
}

/// A step on the leader's node that has ended.
#[derive(Debug, Default)]
pub struct EndedStep {
    /// Its exit code.
    pub code: i32,
    /// Its output, if it was captured.
    pub stdout: Vec<u8>,
    /// Its error messages.
    stderr: String,
}

/// Finds the cluster's job and runs `coracle COMMAND ARGS` on the node of its leader, which is one of the job's first nodes.
pub async fn run_on_leader_node(
    selector: &ClusterSelector,
    command: &str,
    args: &[String],
    output: StepOutput,
) -> anyhow::Result<EndedStep> {
    let slurm = Slurm::find().map_err(cluster::slurm_failure)?;
    let job = match selector.job() {
        Some(job) => job,
        None => only_job(&slurm).await?,
    };
    let detail = slurm.job_detail(job).await.map_err(|error| match error {
        SlurmError::JobGone { .. } => no_such_job(job),
        other => cluster::slurm_failure(other),
    })?;
    if detail.nodes.is_empty() {
        let state = detail.state.as_ref().map_or("not known", JobState::as_str);
        return Err(Failure::new(
            FailureCode::Slurm,
            format!("job {job} has no nodes; its state is {state}"),
        )
        .with_hint("`squeue --me` shows your jobs; a cluster ends with its job")
        .into());
    }
    let mut remote_args = vec![command.to_owned()];
    remote_args.extend(selector.remote_args(job));
    remote_args.extend_from_slice(args);
    let mut last = EndedStep::default();
    // Several clusters in one job may have their leaders on different nodes.
    for share in detail.nodes.iter().take(MAX_SEARCHED_NODES) {
        last = run_program(&slurm, job, &share.node, &remote_args, output).await?;
        if last.code != FailureCode::NoWorkload as i32 {
            break;
        }
    }
    for line in last.stderr.lines() {
        print_stderr(format_args!("{line}"));
    }
    Ok(last)
}

/// Runs this program on a node, which may not see its file.
async fn run_program(
    slurm: &Slurm,
    job: u32,
    node: &str,
    args: &[String],
    output: StepOutput,
) -> anyhow::Result<EndedStep> {
    let program = std::env::current_exe().context("cannot find our own program")?;
    let step = match run_step(slurm, job, node, &program, args, None, output).await {
        Err(SlurmError::ProgramNotFound { .. }) => {
            // A shell there receives a copy of the program.
            let copy = ProgramStream::of_this_program()
                .await
                .context("cannot read our own program")?;
            let shell = script::run_command("error:", &copy, args);
            let copy = Some((copy, shell.variable()));
            let program = Path::new(SHELL);
            run_step(slurm, job, node, program, &shell.args, copy, output).await
        }
        other => other,
    };
    Ok(step.map_err(cluster::slurm_failure)?)
}

fn no_such_job(job: u32) -> Failure {
    Failure::new(FailureCode::NoWorkload, format!("there is no job {job}"))
        .with_hint("`squeue --me` shows your jobs; a cluster and its logs end with its job, unless `coracle run --logs DIR` keeps the logs")
}

/// The user's only job with a cluster; an error if there are none or several.
async fn only_job(slurm: &Slurm) -> anyhow::Result<u32> {
    let jobs = slurm
        .jobs_with_step("coracle-node")
        .await
        .map_err(cluster::slurm_failure)?;
    match jobs.as_slice() {
        [job] => Ok(*job),
        [] => Err(
            Failure::new(FailureCode::NoWorkload, "no running cluster found")
                .with_hint(
                    "`coracle run` starts one; a cluster and its logs end with its job, unless --logs DIR keeps the logs",
                )
                .into(),
        ),
        [first, ..] => {
            let ids: Vec<String> = jobs.iter().map(u32::to_string).collect();
            let message = format!("you have clusters in the jobs {}", ids.join(", "));
            Err(Failure::new(FailureCode::Usage, message)
                .with_hint(format!("choose one, for example with --job {first}"))
                .into())
        }
    }
}

async fn run_step(
    slurm: &Slurm,
    job: u32,
    node: &str,
    program: &Path,
    args: &[String],
    copy: Option<(ProgramStream, (String, String))>,
    output: StepOutput,
) -> Result<EndedStep, SlurmError> {
    let options = ["--chdir=/", "--quiet"].map(str::to_owned);
    let submission = Submission {
        options: &options,
        within: Some((job, node)),
        program,
        args,
        terminal: false,
        name: STEP_NAME,
    };
    let names = slurm::environment_names();
    let mut invocation = submission.invocation(slurm, names.iter().map(String::as_str));
    let (copy, variable) = copy.unzip();
    invocation.env_set.extend(variable);
    let start_error = |source| foreground_srun::start_error(&invocation, source);
    let stdout = match output {
        StepOutput::Inherited => Stdio::inherit(),
        StepOutput::Captured => Stdio::piped(),
    };
    let mut child = foreground_srun::spawn(&invocation, copy, stdout)?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let (stdout, stderr) = tokio::join!(read_limited(stdout), read_limited(stderr));
    let (stdout, stderr) = (stdout.map_err(start_error)?, stderr.map_err(start_error)?);
    let status = child.wait().await.map_err(start_error)?;
    let stderr = String::from_utf8_lossy(&stderr);
    // Errors of this program on that node are already formatted, so they are printed unchanged.
    let is_ours = stderr.lines().any(|line| line.starts_with("error: "));
    if !status.success() && !is_ours {
        return Err(slurm::classify("srun", Some(status), &stderr));
    }
    let messages = stderr.lines().filter(|line| !slurm::is_noise(line));
    let messages = messages.filter(|line| !line.starts_with("srun: "));
    Ok(EndedStep {
        code: exit::of_child(status),
        stdout,
        stderr: match status.success() {
            true => String::new(),
            false => messages.collect::<Vec<_>>().join("\n"),
        },
    })
}

async fn read_limited(pipe: Option<impl AsyncRead + Unpin>) -> std::io::Result<Vec<u8>> {
    let mut text = Vec::new();
    if let Some(pipe) = pipe {
        pipe.take(MAX_OUTPUT).read_to_end(&mut text).await?;
    }
    Ok(text)
}
