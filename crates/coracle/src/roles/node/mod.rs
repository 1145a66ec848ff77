//! `coracle internal node`: the agent of one node.
//!
//! It is started by a Slurm step, reads what the leader hands over from its standard input, reports to
//! the leader, and is the node's kubelet until the leader, or Slurm, ends it. It writes no file: what must
//! survive its own death is in memory that its guard holds ([`identity`]).

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

/// How long the guard of an agent that has just ended may hold the lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// What processes of ours are called.
const NAME: &std::ffi::CStr = c"coracle";

/// The role's entry.
pub fn main() -> anyhow::Result<ExitCode> {
    carry::remove();
    run_sealed();
    be_the_agent().or_else(|error| {
        complain(&error);
        Ok(ExitCode::from(FailureCode::NotStarted as u8))
    })
}

/// Begins anew from a copy of our program that nobody can change, as do the hubs and sandboxes that we start: containers get to
/// see what they run from. Where that can't be, their runtime still refuses to run it for them.
fn run_sealed() {
    if linux::sealed::is_sealed().is_ok_and(|sealed| sealed) {
        // It was named after a descriptor.
        let _ = rustix::thread::set_name(NAME);
        return;
    }
    let error = linux::sealed::run_from_copy(&NAME.to_string_lossy());
    tracing::warn!(%error, "cannot run from a sealed copy of this program");
}

/// One line that the leader recognises among all that comes through srun.
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
    // Known to guard and worker alike, until their ends.
    let janitor = janitor::start(&place.dir)
        .inspect_err(|error| tracing::warn!(%error, "no janitor for the node's directory"));
    match guard::split(Policy::Restart)? {
        // Where there may be pods. The directory too is the next agent's, or the janitor's.
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
            // The leader starts another agent, and pods that are there already wait for that.
            ended.or_else(|error| {
                complain(&error);
                Ok(ExitCode::from(LEFT_TO_OTHERS))
            })
        }
    }
}

/// Takes the node's lock, which the calling process, the guard, then holds to its end. A second agent would compete for the pods, and
/// would have no better connection to the leader than the first.
fn lock(place: &NodeDir) -> anyhow::Result<Option<File>> {
    match pod_lock::try_take(&place.dir, LOCK_TIMEOUT) {
        Ok(None) => bail!("its agent still runs, without a connection to the leader"),
        Ok(taken) => Ok(taken),
        // On a full disk, say: pods that write nothing may run there too.
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

/// This node, by Slurm's name for it.
fn name() -> String {
    std::env::var("SLURMD_NODENAME").unwrap_or_else(|_| node_dir::hostname())
}
