//! `coracle internal node`: the agent of one node.
//!
//! A Slurm step starts it. It reads the leader's join configuration from standard input, enrols, and is the node's kubelet until the
//! leader or Slurm ends it. State that must survive its death is not written to a file but kept in memory that its guard holds
//! ([`SavedIdentity`]).

mod agent;
mod image_gc;

use console::{FailureCode, print_stderr};
use std::fs::File;
use std::io::BufRead;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};

use cluster::carry;

use crate::cgroup;
use crate::cleanup;
use crate::guard::{self, EXIT_HANDED_OVER, GuardPolicy, GuardedProcess};
use crate::node_dir::{self, NodeDir};
use crate::process_lock;
use crate::roles::janitor;
use crate::sealed_program;
use crate::settings;
use cluster::AGENT_FAILED;
use cluster::enrolment::{COMPATIBLE_VERSION, JoinConfig, SavedIdentity, clock_problem, unix_time};

/// How long the guard of an agent that has just exited may still hold the lock.
const AGENT_LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// Entry point of the role.
pub fn main() -> anyhow::Result<ExitCode> {
    carry::remove();
    sealed_program::run_from_sealed_copy();
    run_agent().or_else(|error| {
        report_failure(&error);
        Ok(ExitCode::from(FailureCode::NotStarted as u8))
    })
}

/// Prints one line that the leader recognises in srun's output.
fn report_failure(error: &anyhow::Error) {
    print_stderr(format_args!("{AGENT_FAILED} {}: {error:#}", node_name()));
}

fn run_agent() -> anyhow::Result<ExitCode> {
    settings::check()?;
    let join_config = read_join_config()?;
    let saved = SavedIdentity::new()?;
    let node_dir = NodeDir::new(&join_config.secret, &node_name());
    node_dir.create().with_context(|| {
        format!(
            "cannot create the node's directory {}",
            node_dir.dir.display()
        )
    })?;
    let lock = lock(&node_dir)?;
    // Again, because the janitor of an earlier agent may have removed the directory before it was locked.
    node_dir.create()?;
    let cgroups = cgroup::set_up();
    // The pipe is open in both guard and worker until they exit.
    let janitor = janitor::start_process(&node_dir.dir)
        .inspect_err(|error| tracing::warn!(%error, "no janitor for the node's directory"));
    match guard::fork_worker(GuardPolicy::Restart)? {
        // Pods may still run. The next agent, or the janitor, takes over the directory.
        GuardedProcess::Guard(result)
            if result.handed_over && cleanup::has_processes(&node_dir.dir) =>
        {
            Ok(result.code)
        }
        GuardedProcess::Guard(result) => {
            cleanup::kill_processes(&node_dir.dir);
            drop(lock);
            cleanup::remove_own_and_abandoned(&node_dir.dir);
            drop(janitor);
            if let Some(cgroups) = cgroups {
                cgroups.tear_down();
            }
            Ok(result.code)
        }
        GuardedProcess::Worker => {
            let cgroups = cgroups.map(|cgroups| cgroups.workloads().path().to_owned());
            let result = crate::block_on(agent::run(join_config, saved, node_dir, cgroups));
            // The leader starts another agent, and running pods wait for it.
            result.or_else(|error| {
                report_failure(&error);
                Ok(ExitCode::from(EXIT_HANDED_OVER))
            })
        }
    }
}

/// Takes the node's lock, which the calling process, the guard, holds until it exits. A second agent would compete for the pods and
/// would have no better connection to the leader than the first.
fn lock(node_dir: &NodeDir) -> anyhow::Result<Option<File>> {
    match process_lock::try_acquire(&node_dir.dir, AGENT_LOCK_TIMEOUT) {
        Ok(None) => bail!("the node's agent still runs, without a connection to the leader"),
        Ok(lock) => Ok(lock),
        // For example on a full disk, where pods that write nothing can still run.
        Err(error) => {
            tracing::warn!(dir = %node_dir.dir.display(), %error, "cannot lock the node's directory");
            Ok(None)
        }
    }
}

fn read_join_config() -> anyhow::Result<JoinConfig> {
    let mut line = String::new();
    std::io::stdin()
        .lock()
        .read_line(&mut line)
        .context("cannot read the join configuration")?;
    let join_config: JoinConfig =
        serde_json::from_str(&line).context("cannot parse the join configuration")?;
    if join_config.version != COMPATIBLE_VERSION {
        bail!(
            "this is Coracle {COMPATIBLE_VERSION}, the leader is {}",
            join_config.version
        );
    }
    if let Some(problem) = clock_problem(join_config.time, unix_time()) {
        bail!("{problem}; report it to the site's support");
    }
    Ok(join_config)
}

/// Slurm's name of this node.
fn node_name() -> String {
    std::env::var("SLURMD_NODENAME").unwrap_or_else(|_| node_dir::hostname())
}
