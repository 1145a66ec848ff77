//! Clusters on other hosts: a step of the cluster's job runs `coracle logs` on the leader's node.

use console::{Failure, FailureCode, print_stderr};
use std::path::Path;
use std::process::{ExitCode, Stdio};

use anyhow::Context;
use slurm::{Slurm, SlurmError, Submission};
use tokio::io::AsyncReadExt;

use super::LogsArgs;
use crate::exit;
use crate::foreground_srun;
use cluster::carry::program_stream::ProgramStream;
use cluster::carry::script::{self, SHELL};

/// Limit on standard error of `srun`.
const MAX_STDERR: u64 = 64 * 1024;

/// Finds the job and runs `coracle logs` on the node of its leader.
pub async fn run_on_leader_node(args: &LogsArgs) -> anyhow::Result<ExitCode> {
    let slurm = Slurm::find().map_err(cluster::slurm_failure)?;
    let job = match args.job {
        Some(job) => job,
        None => only_job(&slurm).await?,
    };
    let detail = slurm.job_detail(job).await.map_err(|error| match error {
        SlurmError::JobGone { .. } => no_such_job(job),
        other => cluster::slurm_failure(other),
    })?;
    let node = detail.nodes.first().ok_or_else(|| {
        let state = detail.state.as_deref().unwrap_or("not known");
        Failure::new(
            FailureCode::Slurm,
            format!("job {job} has no nodes; its state is {state}"),
        )
        .with_hint("`squeue --me` shows your jobs; logs end with the cluster")
    })?;
    let node = node.node.clone();
    let program = std::env::current_exe().context("cannot find our own program")?;
    let remote_args = remote_args(args, job);
    let code = match run_step(&slurm, job, &node, &program, &remote_args, None).await {
        Err(SlurmError::ProgramNotFound { .. }) => {
            // The node does not see this program's file, so a shell there receives a copy of it.
            let copy = ProgramStream::of_this_program()
                .await
                .context("cannot read our own program")?;
            let shell = script::run_command("error:", &copy, &remote_args);
            let copy = Some((copy, shell.variable()));
            run_step(&slurm, job, &node, Path::new(SHELL), &shell.args, copy).await
        }
        other => other,
    };
    Ok(exit::code(code.map_err(cluster::slurm_failure)?))
}

fn no_such_job(job: u32) -> Failure {
    Failure::new(FailureCode::NoWorkload, format!("there is no job {job}"))
        .with_hint("`squeue --me` shows your jobs; logs end with the cluster, unless `coracle run --logs DIR` keeps them")
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
                    "`coracle run` starts one; its logs end with it, unless --logs DIR keeps them",
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
) -> Result<i32, SlurmError> {
    let options = ["--chdir=/", "--quiet"].map(str::to_owned);
    let submission = Submission {
        options: &options,
        within: Some((job, node)),
        program,
        args,
        terminal: false,
        name: "coracle-logs",
    };
    let names = slurm::environment_names();
    let mut invocation = submission.invocation(slurm, names.iter().map(String::as_str));
    let (copy, variable) = copy.unzip();
    invocation.env_set.extend(variable);
    let start_error = |source| foreground_srun::start_error(&invocation, source);
    let mut child = foreground_srun::spawn(&invocation, copy, Stdio::inherit())?;
    let mut stderr = Vec::new();
    if let Some(pipe) = child.stderr.take() {
        let mut limited = pipe.take(MAX_STDERR);
        limited
            .read_to_end(&mut stderr)
            .await
            .map_err(start_error)?;
    }
    let status = child.wait().await.map_err(start_error)?;
    let stderr = String::from_utf8_lossy(&stderr);
    if status.success() {
        return Ok(0);
    }
    // Errors of `coracle logs` on that node are already formatted, so print them unchanged.
    if stderr.lines().any(|line| line.starts_with("error: ")) {
        let messages = stderr.lines().filter(|line| !slurm::is_noise(line));
        for line in messages.filter(|line| !line.starts_with("srun: ")) {
            print_stderr(format_args!("{line}"));
        }
        return Ok(exit::of_child(status));
    }
    Err(slurm::classify("srun", Some(status), &stderr))
}

/// The arguments of `coracle` on that node.
fn remote_args(args: &LogsArgs, job: u32) -> Vec<String> {
    let mut remote_args = vec![
        "logs".to_owned(),
        "--here".to_owned(),
        format!("--job={job}"),
    ];
    if args.follow {
        remote_args.push("--follow".to_owned());
    }
    remote_args.extend(args.tail.map(|tail| format!("--tail={tail}")));
    remote_args.extend(args.component.clone());
    remote_args
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_passed_to_leader_node() {
        let args = LogsArgs {
            component: Some("etcd".to_owned()),
            follow: true,
            tail: Some(5),
            job: None,
            here: false,
        };
        let line = remote_args(&args, 12).join(" ");
        assert_eq!(line, "logs --here --job=12 --follow --tail=5 etcd");
    }
}
