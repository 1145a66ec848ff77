//! `coracle internal node`: the agent of one node.
//!
//! A Slurm step starts it. It reads the leader's join configuration from standard input, enrols, and is the node's kubelet until the
//! leader or Slurm ends it. State that must survive its death is not written to a file but kept in memory that its guard holds
//! ([`SavedIdentity`]).

mod agent;
pub mod cgroup;
mod hub;
pub mod image_gc;
mod image_list;
mod launch;
mod process_limit;

use console::{FailureCode, say};
use std::fs::File;
use std::io::BufRead;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};

use cluster::carry;

use crate::guard::{self, LEFT_TO_OTHERS, Policy, Side};
use crate::node_dir::{self, NodeDir};
use crate::pod_lock;
use crate::roles::janitor;
use crate::settings;
use cluster::AGENT_FAILED;
use cluster::enrolment::{COMPATIBLE_VERSION, JoinConfig, SavedIdentity, clock_problem, unix_time};

/// How long the guard of an agent that has just exited may still hold the lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// The name of our processes (`comm`).
const NAME: &std::ffi::CStr = c"coracle";

/// Entry point of the role.
pub fn main() -> anyhow::Result<ExitCode> {
    carry::remove();
    run_sealed();
    be_the_agent().or_else(|error| {
        complain(&error);
        Ok(ExitCode::from(FailureCode::NotStarted as u8))
    })
}

/// Re-executes this program from a sealed copy (memfd), as the hub and sandboxes do then too, because containers could modify the
/// executable of a process that enters them (CVE-2019-5736). If that fails, the container runtime still refuses to execute it.
fn run_sealed() {
    if linux::sealed::is_sealed().is_ok_and(|sealed| sealed) {
        // After execution from a memfd, `comm` is a descriptor's number.
        let _ = rustix::thread::set_name(NAME);
        return;
    }
    let error = linux::sealed::run_from_copy(&NAME.to_string_lossy());
    tracing::warn!(%error, "cannot run from a sealed copy of this program");
}

/// Prints one line that the leader recognises in srun's output.
fn complain(error: &anyhow::Error) {
    say(format_args!("{AGENT_FAILED} {}: {error:#}", name()));
}

fn be_the_agent() -> anyhow::Result<ExitCode> {
    settings::check()?;
    let join_config = read_join_config()?;
    let saved = SavedIdentity::new()?;
    let place = NodeDir::new(&join_config.secret, &name());
    place
        .make()
        .with_context(|| format!("cannot make the node's directory {}", place.dir.display()))?;
    let _lock = lock(&place)?;
    let groups = cgroup::set_up();
    // The pipe is open in both guard and worker until they exit.
    let janitor = janitor::start(&place.dir)
        .inspect_err(|error| tracing::warn!(%error, "no janitor for the node's directory"));
    match guard::split(Policy::Restart)? {
        // Pods may still run. The next agent, or the janitor, takes over the directory.
        Side::Guard(over) if over.left_to_others && node_dir::is_used_below_guard(&place.dir) => {
            Ok(over.code)
        }
        Side::Guard(over) => {
            launch::end_all(&place);
            place.remove();
            NodeDir::sweep();
            drop(janitor);
            if let Some(groups) = groups {
                groups.end();
            }
            Ok(over.code)
        }
        Side::Worker => {
            let groups = groups.map(|groups| groups.theirs().path().to_owned());
            let ended = crate::block_on(agent::run(join_config, saved, place, groups));
            // The leader starts another agent, and running pods wait for it.
            ended.or_else(|error| {
                complain(&error);
                Ok(ExitCode::from(LEFT_TO_OTHERS))
            })
        }
    }
}

/// Takes the node's lock, which the calling process, the guard, holds until it exits. A second agent would compete for the pods and
/// would have no better connection to the leader than the first.
fn lock(place: &NodeDir) -> anyhow::Result<Option<File>> {
    match pod_lock::try_take(&place.dir, LOCK_TIMEOUT) {
        Ok(None) => bail!("its agent still runs, without a connection to the leader"),
        Ok(taken) => Ok(taken),
        // For example on a full disk, where pods that write nothing can still run.
        Err(error) => {
            tracing::warn!(dir = %place.dir.display(), %error, "cannot lock the node's directory");
            Ok(None)
        }
    }
}

fn read_join_config() -> anyhow::Result<JoinConfig> {
    let mut line = String::new();
    std::io::stdin()
        .lock()
        .read_line(&mut line)
        .context("cannot read what the leader hands over")?;
    let join_config: JoinConfig =
        serde_json::from_str(&line).context("what the leader hands over is not understood")?;
    if join_config.version != COMPATIBLE_VERSION {
        bail!(
            "this is Coracle {COMPATIBLE_VERSION}, the leader is {}",
            join_config.version
        );
    }
    if let Some(problem) = clock_problem(join_config.time, unix_time()) {
        bail!("{problem}; tell the site's support");
    }
    Ok(join_config)
}

/// Slurm's name of this node.
fn name() -> String {
    std::env::var("SLURMD_NODENAME").unwrap_or_else(|_| node_dir::hostname())
}
