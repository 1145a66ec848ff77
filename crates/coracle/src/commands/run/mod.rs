//! `coracle run`: a cluster for one workload.
//!
//! Outside of any job it submits one in which it runs again ([`submit`]). In the first task of a job it is the leader ([`leader`]). In
//! all other tasks of the same `srun` it waits for a signal of the leader ([`waiting_tasks`]).

mod addons;
mod dry_run;
mod end_reason;
mod file_check;
mod leader;
mod manifest_check;
mod manifest_documents;
mod manifests;
mod metrics;
mod networks;
mod object_ref;
mod pod_logs;
mod progress;
mod queue_watch;
mod send_archive;
mod settings;
mod split_args;
mod srun;
mod srun_stderr;
mod storage;
mod submit;
mod workload;

use console::{Failure, FailureCode, print_stderr};
use std::io::{IsTerminal, Read};
use std::process::ExitCode;

use anyhow::Context;
use slurm::{Allocation, JobLocation};

pub use self::settings::RunSettings;
use self::workload::{Manifests, Workload};
use crate::cli::RunArgs;
use cluster::carry;

use crate::guard::{self, GuardPolicy, GuardResult, GuardedProcess};
use crate::running_clusters::{enclosing_cluster, job_of};
use crate::waiting_tasks;

/// Entry point of the command.
pub fn main(args: RunArgs) -> anyhow::Result<ExitCode> {
    if carry::is_carried() {
        // The shell that executed this program holds its directory open (`file_check.rs`). The workload must not inherit that descriptor.
        linux::descriptors::close_all_on_exec()?;
    }
    // Remove a carried copy of this program on every error.
    run(args).inspect_err(|_| carry::remove())
}

fn run(args: RunArgs) -> anyhow::Result<ExitCode> {
    let mut settings = RunSettings::resolve(args)?;
    crate::settings::check().map_err(|error| {
        Failure::new(FailureCode::Usage, format!("{error:#}"))
            .with_hint("correct the variable or unset it; `coracle run --help` lists them")
    })?;
    settings.options.log_colour |=
        std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    if let Some(releases) = carry::releases() {
        settings.options.kubernetes = Some(releases);
    }
    if let Some((_, path)) = carry::workload() {
        settings.workload = path.into();
    }
    // Check before submitting too, so that a missing file fails before the job is queued.
    let workload = Workload::find(&settings.workload, &settings.args)?;
    if let Workload::Manifests(manifests) = &workload {
        manifest_check::check(manifests)?;
    }
    let allocation = Allocation::from_process_env().map_err(cluster::slurm_failure)?;
    let location = allocation.as_ref().map(|allocation| &allocation.location);
    let submits = matches!(location, None | Some(JobLocation::OffNode));
    // The leader reads standard input itself.
    let stdin = if submits || settings.options.dry_run {
        checked_stdin(&workload)?
    } else {
        None
    };
    if settings.options.dry_run {
        if matches!(location, Some(JobLocation::Task { procid, .. }) if *procid > 0) {
            return Ok(ExitCode::SUCCESS);
        }
        let in_job = allocation.is_some();
        return crate::block_on(dry_run::run(&settings, &workload, in_job, stdin.as_deref()));
    }
    let Some(allocation) = allocation else {
        return crate::block_on(submit::new_job(&settings, &workload, stdin));
    };
    let is_first_task =
        !matches!(allocation.location, JobLocation::Task { procid, .. } if procid > 0);
    if is_first_task
        && allocation.location != JobLocation::OffNode
        && let Some(enclosing) = enclosing_cluster()
        && job_of(&enclosing) == Some(allocation.job_id)
    {
        print_stderr(format_args!(
            "coracle: this starts another cluster inside of {enclosing}, whose workload can already use that one with kubectl"
        ));
    }
    if !settings.slurm.is_empty() && is_first_task {
        print_stderr(format_args!(
            "coracle: already inside job {}, so these Slurm options have no effect: {}",
            allocation.job_id,
            settings.slurm.join(" ")
        ));
    }
    match allocation.location {
        JobLocation::OffNode => {
            crate::block_on(submit::first_node(&settings, &workload, &allocation, stdin))
        }
        JobLocation::Task { procid, .. } if procid > 0 => waiting_tasks::wait_for_end(&allocation),
        JobLocation::Task { .. } | JobLocation::Batch => {
            match guard::fork_worker(GuardPolicy::Exit)? {
                GuardedProcess::Worker => {
                    crate::block_on(leader::run(settings, workload, allocation))
                }
                GuardedProcess::Guard(GuardResult { code, .. }) => {
                    carry::remove();
                    crate::block_on(async {
                        waiting_tasks::end_all(&allocation).await;
                        Ok(code)
                    })
                }
            }
        }
    }
}

/// Reads and checks manifests from standard input.
fn checked_stdin(workload: &Workload) -> anyhow::Result<Option<Vec<u8>>> {
    if *workload != Workload::Manifests(Manifests::Stdin) {
        return Ok(None);
    }
    let mut text = Vec::new();
    std::io::stdin()
        .read_to_end(&mut text)
        .context("cannot read manifests from standard input")?;
    manifest_check::check_text(&text)?;
    Ok(Some(text))
}
