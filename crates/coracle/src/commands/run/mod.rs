//! `coracle run`: a cluster for one workload.
//!
//! Outside of any job it submits one in which it runs again ([`submit`]). In the first task of a job it is the leader ([`leader`]). In
//! all other tasks of the same `srun` it waits for a signal of the leader ([`waiting_tasks`]).

mod addons;
mod end_reason;
mod file_check;
mod leader;
mod manifests;
mod metrics;
mod object_ref;
mod pod_logs;
mod progress;
mod send_bundle;
mod settings;
mod srun;
mod storage;
mod submit;
mod workload;

use console::{Failure, FailureCode, print_stderr};
use std::io::IsTerminal;
use std::process::ExitCode;

use slurm::{Allocation, JobLocation};

pub use self::settings::RunSettings;
use self::workload::Workload;
use crate::cli::RunArgs;
use cluster::carry;

use crate::guard::{self, GuardPolicy, GuardResult, GuardedProcess};
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
    let Some(allocation) = Allocation::from_process_env().map_err(cluster::slurm_failure)? else {
        return crate::block_on(submit::new_job(&settings, &workload));
    };
    if !settings.slurm.is_empty() && allocation.location != JobLocation::OffNode {
        print_stderr(format_args!(
            "coracle: already inside job {}, so these Slurm options have no effect: {}",
            allocation.job_id,
            settings.slurm.join(" ")
        ));
    }
    match allocation.location {
        JobLocation::OffNode => {
            crate::block_on(submit::first_node(&settings, &workload, &allocation))
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
