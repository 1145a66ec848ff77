//! `coracle internal janitor`: removes the directory of a node whose agent and guard were killed, if no other agent starts: as soon as the
//! hub and the pods, which wait for one, have exited ([`crate::cleanup`]).
//!
//! The janitor is a daemon (reparented, in its own session), so Slurm does not kill it with the agent, the guard and the hub where it
//! tracks processes by their parents. Where Slurm tracks them by cgroup, it kills the janitor too, and the user's next cluster on the node
//! removes the directory.

use std::io::{BufRead, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::Context;
use linux::process::ForkResult;

use crate::cleanup;

const JANITOR_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Starts a janitor for the directory `dir`. It waits until every copy of the returned pipe is closed.
pub fn start_process(dir: &Path) -> anyhow::Result<ChildStdin> {
    let mut child = Command::new("/proc/self/exe")
        .args(["internal", "janitor"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .current_dir("/")
        .spawn()
        .context("cannot start a process")?;
    let mut input = child.stdin.take().context("no pipe")?;
    writeln!(input, "{}", dir.display())?;
    // The child forks the janitor and exits immediately.
    child.wait()?;
    Ok(input)
}

/// Entry point of the role.
pub fn main() -> anyhow::Result<ExitCode> {
    let mut input = std::io::stdin().lock();
    let mut line = String::new();
    input.read_line(&mut line)?;
    if let ForkResult::Parent(_) = linux::process::fork()? {
        return Ok(ExitCode::SUCCESS);
    }
    rustix::process::setsid()?;
    // The pipe closes when the agent, its guard and all their replacements have exited.
    input.read_to_end(&mut Vec::new())?;
    let dir = PathBuf::from(line.trim_end());
    // The guard of a new agent has started a new janitor.
    while !cleanup::is_guarded(&dir) && !cleanup::remove_unused(&dir)? {
        std::thread::sleep(JANITOR_POLL_INTERVAL);
    }
    Ok(ExitCode::SUCCESS)
}
