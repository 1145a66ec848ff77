//! `coracle doctor`: checks whether this host, or a node of a partition, can run pods, and with which features.
//!
//! Three steps, a file each: [`survey`] collects facts about kernel, file systems and Slurm; [`findings`] derives findings from them;
//! [`report`] prints the result. [`remote`] runs the first two on a compute node.

mod findings;
mod remote;
mod report;
pub mod survey;

use std::process::ExitCode;

use clap_complete::engine::ArgValueCandidates;

use crate::completion_values;
use report::{DoctorReport, ReportFormat};

/// The command line of `coracle doctor`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit codes:
  0   pods can run there: user namespaces work, and there is space for their file systems
  1   pods cannot run there; the findings name what is missing
  69  Slurm is missing, does not respond, or refused (only with -p)

Examples:
  coracle doctor                  what this host lacks for Coracle
  coracle doctor -v               all findings
  coracle doctor -p gpu           what a compute node of the partition gpu offers
  coracle doctor --json | jq '.findings[] | select(.status != \"ok\")'")]
pub struct DoctorArgs {
    /// Check a node of this Slurm partition instead of this host
    ///
    /// Login nodes and compute nodes often differ in kernel and settings; pods run on the latter. This asks Slurm for one
    /// node for a moment, and waits in the queue if none is free.
    #[arg(short, long, value_name = "PARTITION", add = ArgValueCandidates::new(completion_values::partitions))]
    partition: Option<String>,

    /// Show all findings, not only what is missing or degraded
    #[arg(short, long, conflicts_with = "json")]
    verbose: bool,

    /// Print all findings as JSON
    ///
    /// One object: schema (1), coracle (version), host, podsCanRun, slurmUsable, and findings, each with id, area, title,
    /// status (ok, degraded, missing), found, with, without, and next where something can be done. Fields may be
    /// added, and are never renamed or removed within a schema number.
    #[arg(long)]
    json: bool,
}

/// Entry point of the command. The exit code says whether pods can run there.
pub fn main(args: DoctorArgs) -> anyhow::Result<ExitCode> {
    crate::block_on(run(args))
}

async fn run(args: DoctorArgs) -> anyhow::Result<ExitCode> {
    cluster::carry::remove();
    let report = match &args.partition {
        Some(partition) => remote::run_on_node(partition).await?,
        None => report_on_this_host().await,
    };
    report.print(match args.json {
        true => ReportFormat::Json,
        false => ReportFormat::Text {
            verbose: args.verbose,
        },
    })?;
    Ok(ExitCode::from(u8::from(!report.pods_can_run)))
}

/// The report on this host.
async fn report_on_this_host() -> DoctorReport {
    let survey = survey::collect().await;
    findings::make_report(&survey)
}
