//! `coracle internal node`: the agent of one node.
//!
//! It is started by a Slurm step, reads what the leader hands over from its standard input, reports to
//! the leader, and is the node's kubelet until the leader, or Slurm, ends it. It writes no file: what must
//! survive its own death is in memory that its guard holds ([`identity`]).

mod agent;
pub mod cgroup;
mod hub;
mod identity;
pub mod image_gc;
mod image_list;
mod launch;
mod line;
pub mod place;
mod process_limit;
pub mod stacking;
mod streaming;

use std::fs::File;
use std::io::BufRead;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};

use crate::carried;
use crate::exit::Code;
use crate::guard::{self, LEFT_TO_OTHERS, Policy, Side};
use crate::handover::{Handover, VERSION, clock_problem, now};
use crate::janitor_role;
use crate::sandbox_role::lock;
use crate::say::say;
use place::NodePlace;

/// How long the guard of an agent that has just ended may hold the lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// What an agent's last words begin with; the node and the problem follow.
pub const FAILED: &str = "coracle-node failed:";

/// What processes of ours are called.
const NAME: &std::ffi::CStr = c"coracle";

/// The role's entry.
pub fn main() -> anyhow::Result<ExitCode> {
    carried::remove();
    run_sealed();
    be_the_agent().or_else(|error| {
        complain(&error);
        Ok(ExitCode::from(Code::NotStarted as u8))
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
    say(format_args!("{FAILED} {}: {error:#}", name()));
}

fn be_the_agent() -> anyhow::Result<ExitCode> {
    check_environment()?;
    let handover = read_handover()?;
    let kept = identity::Kept::new()?;
    let place = NodePlace::new(&handover.secret, &name());
    place
        .make()
        .with_context(|| format!("cannot make the node's directory {}", place.dir.display()))?;
    let _lock = lock(&place)?;
    let groups = cgroup::set_up();
    // Known to guard and worker alike, until their ends.
    let janitor = janitor_role::start(&place.dir)
        .inspect_err(|error| tracing::warn!(%error, "no janitor for the node's directory"));
    match guard::split(Policy::Restart)? {
        // Where there may be pods. The directory too is the next agent's, or the janitor's.
        Side::Guard(over) if over.left_to_others && place::is_used_below_guard(&place.dir) => {
            Ok(over.code)
        }
        Side::Guard(over) => {
            launch::end_all(&place);
            place.remove();
            NodePlace::sweep();
            drop(janitor);
            if let Some(groups) = groups {
                groups.end();
            }
            Ok(over.code)
        }
        Side::Worker => {
            let groups = groups.map(|groups| groups.theirs().path().to_owned());
            let ended = crate::block_on(agent::run(handover, kept, place, groups));
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
fn lock(place: &NodePlace) -> anyhow::Result<Option<File>> {
    match lock::try_take(&place.dir, LOCK_TIMEOUT) {
        Ok(None) => bail!("its agent still runs, without a connection to the leader"),
        Ok(taken) => Ok(taken),
        // On a full disk, say: pods that write nothing may run there too.
        Err(error) => {
            tracing::warn!(dir = %place.dir.display(), %error, "cannot lock the node's directory");
            Ok(None)
        }
    }
}

/// Refuses settings that make no sense, rather than to have pods or images suffer from them later.
pub fn check_environment() -> anyhow::Result<()> {
    stacking::choice()?;
    streaming::idle_timeout()?;
    image_gc::settings()?;
    crate::image::limits::from_environment()?;
    Ok(())
}

fn read_handover() -> anyhow::Result<Handover> {
    let mut line = String::new();
    std::io::stdin()
        .lock()
        .read_line(&mut line)
        .context("cannot read what the leader hands over")?;
    let handover: Handover =
        serde_json::from_str(&line).context("what the leader hands over is not understood")?;
    if handover.version != VERSION {
        bail!(
            "this is Coracle {VERSION}, the leader is {}",
            handover.version
        );
    }
    if let Some(problem) = clock_problem(handover.time, now()) {
        bail!("{problem}; tell the site's support");
    }
    Ok(handover)
}

/// This node, by Slurm's name for it.
fn name() -> String {
    std::env::var("SLURMD_NODENAME").unwrap_or_else(|_| hostname())
}

fn hostname() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}
