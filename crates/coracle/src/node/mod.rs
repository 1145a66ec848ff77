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
pub mod stacking;
mod streaming;

use std::io::BufRead;
use std::process::ExitCode;

use anyhow::{Context, bail};

use crate::carried;
use crate::exit::Code;
use crate::guard::{self, Policy, Side};
use crate::handover::{Handover, VERSION, clock_problem, now};
use crate::janitor_role;
use crate::say::say;
use place::NodePlace;

/// What an agent's last words begin with; the node and the problem follow.
pub const FAILED: &str = "coracle-node failed:";

/// The role's entry.
pub fn main() -> anyhow::Result<ExitCode> {
    carried::remove();
    be_the_agent().or_else(|error| {
        // One line that the leader recognises among all that comes through srun.
        say(format_args!("{FAILED} {}: {error:#}", name()));
        Ok(ExitCode::from(Code::NotStarted as u8))
    })
}

fn be_the_agent() -> anyhow::Result<ExitCode> {
    let handover = read_handover()?;
    let kept = identity::Kept::new()?;
    let place = NodePlace::new(&handover.secret, &name());
    let groups = cgroup::set_up();
    // Known to guard and worker alike, until their ends.
    let janitor = janitor_role::start(&place.dir)
        .inspect_err(|error| tracing::warn!(%error, "no janitor for the node's directory"));
    match guard::split(Policy::Restart)? {
        Side::Guard(code) => {
            launch::end_steps(&place);
            place.remove();
            NodePlace::sweep();
            drop(janitor);
            if let Some(groups) = groups {
                groups.end();
            }
            Ok(code)
        }
        Side::Worker => {
            let groups = groups.map(|groups| groups.theirs().path().to_owned());
            crate::block_on(agent::run(handover, kept, place, groups))
        }
    }
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
