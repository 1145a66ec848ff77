//! Clusters on other hosts: a step of the cluster's job runs `coracle logs` on the leader's node.

use console::{Failure, FailureCode, say};
use std::path::Path;
use std::process::{ExitCode, Stdio};

use anyhow::Context;
use slurm::{Slurm, SlurmError, Submission};
use tokio::io::AsyncReadExt;

use super::LogsArgs;
use crate::exit;
use cluster::carry::program::Program;
use cluster::carry::script::{self, SHELL};

/// Limit on standard error of `srun`.
const MAX_WORDS: u64 = 64 * 1024;

/// Finds the job and runs `coracle logs` on the node of its leader.
pub async fn call_again(args: &LogsArgs) -> anyhow::Result<ExitCode> {
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
        .hint("`squeue --me` shows your jobs; logs end with the cluster")
    })?;
    let node = node.node.clone();
    let program = std::env::current_exe().context("cannot find our own program")?;
    let words = words(args, job);
    let ended = match step(&slurm, job, &node, &program, &words, None).await {
        Err(SlurmError::ProgramNotFound { .. }) => {
            // The node does not see this program's file, so a shell there receives a copy of it.
            let ours = Program::own()
                .await
                .context("cannot read our own program")?;
            let words = script::run("error:", &ours, &words);
            step(&slurm, job, &node, Path::new(SHELL), &words, Some(ours)).await
        }
        other => other,
    };
    Ok(exit::code(ended.map_err(cluster::slurm_failure)?))
}

fn no_such_job(job: u32) -> Failure {
    Failure::new(FailureCode::NoWorkload, format!("there is no job {job}"))
        .hint("`squeue --me` shows your jobs; logs end with the cluster, unless `coracle run --logs DIR` keeps them")
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
            Failure::new(FailureCode::NoWorkload, "you have no cluster that runs")
                .hint(
                    "`coracle run` starts one; its logs end with it, unless --logs DIR keeps them",
                )
                .into(),
        ),
        [first, ..] => {
            let names: Vec<String> = jobs.iter().map(u32::to_string).collect();
            let message = format!("you have clusters in the jobs {}", names.join(", "));
            Err(Failure::new(FailureCode::Usage, message)
                .hint(format!("say which one is meant, as in --job {first}"))
                .into())
        }
    }
}

async fn step(
    slurm: &Slurm,
    job: u32,
    node: &str,
    program: &Path,
    args: &[String],
    carried: Option<Program>,
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
    let names: Vec<String> = std::env::vars_os()
        .map(|(name, _)| name.to_string_lossy().into_owned())
        .collect();
    let invocation = submission.invocation(slurm, names.iter().map(String::as_str));
    let start = |source| SlurmError::Start {
        command: invocation.display(),
        source,
    };
    // In this process group, so that Ctrl-C reaches srun, which ends the step.
    let mut child = tokio::process::Command::from(invocation.std_command())
        .stdin(match carried {
            Some(_) => Stdio::piped(),
            None => Stdio::null(),
        })
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(start)?;
    if let Some(program) = carried {
        // A step that exits at once closes the pipe; its standard error gives the reason.
        drop(program.send(child.stdin.take(), |_| Ok(())));
    }
    let mut complaints = Vec::new();
    if let Some(stderr) = child.stderr.take() {
        let mut limited = stderr.take(MAX_WORDS);
        limited.read_to_end(&mut complaints).await.map_err(start)?;
    }
    let status = child.wait().await.map_err(start)?;
    let complaints = String::from_utf8_lossy(&complaints);
    if status.success() {
        return Ok(0);
    }
    // Errors of `coracle logs` on that node are already formatted, so print them unchanged.
    if complaints.lines().any(|line| line.starts_with("error: ")) {
        let ours = complaints.lines().filter(|line| !slurm::is_noise(line));
        for line in ours.filter(|line| !line.starts_with("srun: ")) {
            say(format_args!("{line}"));
        }
        return Ok(exit::of_child(status));
    }
    Err(slurm::classify("srun", Some(status), &complaints))
}

/// The arguments of `coracle` on that node.
fn words(args: &LogsArgs, job: u32) -> Vec<String> {
    let mut words = vec![
        "logs".to_owned(),
        "--here".to_owned(),
        format!("--job={job}"),
    ];
    if args.follow {
        words.push("--follow".to_owned());
    }
    words.extend(args.tail.map(|tail| format!("--tail={tail}")));
    words.extend(args.component.clone());
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_passed_to_the_leaders_node() {
        let args = LogsArgs {
            component: Some("etcd".to_owned()),
            follow: true,
            tail: Some(5),
            job: None,
            here: false,
        };
        let there = words(&args, 12).join(" ");
        assert_eq!(there, "logs --here --job=12 --follow --tail=5 etcd");
    }
}
