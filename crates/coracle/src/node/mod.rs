//! `coracle internal node`: the agent of one node.
//!
//! It is started by a Slurm step, reads what the leader hands over from its standard input, reports to
//! the leader, and is the node's kubelet until the leader, or Slurm, ends it. It writes no file: what must
//! survive its own death is in memory that its guard holds ([`identity`]).

mod agent;
mod identity;
mod line;

use std::io::BufRead;
use std::process::ExitCode;

use anyhow::{Context, bail};

use crate::guard::{self, Policy, Side};
use crate::handover::{Handover, VERSION, clock_problem, now};

/// The role's entry.
pub fn main() -> anyhow::Result<ExitCode> {
    remove_carried_program();
    let handover = read_handover()?;
    let kept = identity::Kept::new()?;
    match guard::split(Policy::Restart)? {
        Side::Guard(code) => Ok(code),
        Side::Worker => crate::block_on(agent::run(handover, kept)),
    }
}

/// A copy that Slurm carried here for this one run is not left behind; we go on without its name.
fn remove_carried_program() {
    let Ok(program) = std::env::current_exe() else {
        return;
    };
    let name = program
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    // The name that the leader chose: 256 random bits.
    let token = name.strip_prefix("coracle-").unwrap_or_default();
    if token.len() == 64 && token.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        let _ = std::fs::remove_file(program);
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
        bail!("node {}: {problem}; tell the site's support", name());
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
