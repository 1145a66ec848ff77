//! `coracle run`: a cluster for one workload.
//!
//! Where it is called decides what it does: outside of any job it asks Slurm for one in which it is
//! called again ([`submit`]); in the first task of a job it leads ([`lead`]); in all other tasks of the
//! same `srun` it only waits to be dismissed ([`follow`]).

mod agents;
mod carry;
mod cluster;
mod complaints;
mod control_plane;
mod follow;
mod grace;
mod join;
mod lead;
mod look;
mod manifests;
mod metrics;
pub mod objects;
mod plan;
mod settings;
mod srun;
mod storage;
mod submit;
mod workload;

use std::process::ExitCode;

use crate::say::say;
use slurm::{Allocation, JobLocation};

pub use self::control_plane::ControlPlane;
pub use self::follow::dismiss;
pub use self::settings::Settings;
use self::workload::Workload;
use crate::carried;
use crate::cli::RunArgs;
use crate::exit::{Code, Failure};
use crate::guard::{self, Over, Policy, Side};
use crate::node::check_environment;

/// The command's entry.
pub fn main(args: RunArgs) -> anyhow::Result<ExitCode> {
    if carried::is_ours() {
        // The shell that became us holds our directory open (`look.rs`), which the workload must not inherit.
        linux::descriptors::close_all_on_exec()?;
    }
    // A copy of ours doesn't stay, however early it ends.
    run(args).inspect_err(|_| carried::remove())
}

fn run(args: RunArgs) -> anyhow::Result<ExitCode> {
    let mut settings = Settings::resolve(args)?;
    check_environment().map_err(|error| {
        Failure::new(Code::Usage, format!("{error:#}"))
            .hint("correct the variable or unset it; `coracle run --help` lists them")
    })?;
    if let Some(releases) = carried::releases() {
        settings.options.kubernetes = Some(releases);
    }
    if let Some((_, path)) = carried::workload() {
        settings.workload = path.into();
    }
    // Looked at first, also outside: a missing file should not cost a place in the queue.
    let workload = Workload::find(&settings.workload, &settings.args)?;
    let Some(allocation) = Allocation::from_process_env().map_err(Failure::from)? else {
        return crate::block_on(submit::new_job(&settings, &workload));
    };
    if !settings.slurm.is_empty() && allocation.location != JobLocation::OffNode {
        say(format_args!(
            "coracle: already inside job {}, so these Slurm options have no effect: {}",
            allocation.job_id,
            settings.slurm.join(" ")
        ));
    }
    match allocation.location {
        JobLocation::OffNode => {
            crate::block_on(submit::first_node(&settings, &workload, &allocation))
        }
        JobLocation::Task { procid, .. } if procid > 0 => follow::until_dismissed(&allocation),
        JobLocation::Task { .. } | JobLocation::Batch => match guard::split(Policy::End)? {
            Side::Worker => crate::block_on(lead::lead(settings, workload, allocation)),
            Side::Guard(Over { code, .. }) => {
                carried::remove();
                crate::block_on(async {
                    follow::dismiss_all(&allocation).await;
                    Ok(code)
                })
            }
        },
    }
}
