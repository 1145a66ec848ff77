//! `coracle internal janitor`: removes a node's directory if everybody else is killed at once.
//!
//! A second Ctrl-C makes `srun` have all processes of a job killed, the agent and its guard among them. The janitor
//! has left its parents, so that Slurm doesn't see it where it tracks processes by their parents. Where Slurm tracks them
//! otherwise, it is killed with the rest, and the user's next cluster on the node sweeps.

use std::io::{BufRead, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::Context;
use linux::process::Fork;

use crate::node_dir;

/// How often it looks whether somebody is there, how often nobody must have been, and for how long it looks at all: a node
/// that goes on has a new agent, and thereby a new janitor, by then.
const LOOK_EVERY: Duration = Duration::from_millis(100);
const NOBODY: u32 = 5;
const LOOKS: u32 = 1200;

/// Starts one for the directory `dir`. It waits for as long as any process has what this returns.
pub fn start(dir: &Path) -> anyhow::Result<ChildStdin> {
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
    // It leaves us at once, by ending; what it leaves behind goes on.
    child.wait()?;
    Ok(input)
}

/// The role's entry.
pub fn main() -> anyhow::Result<ExitCode> {
    let mut input = std::io::stdin().lock();
    let mut line = String::new();
    input.read_line(&mut line)?;
    if let Fork::Parent(_) = linux::process::fork()? {
        return Ok(ExitCode::SUCCESS);
    }
    rustix::process::setsid()?;
    // Ends when the agent, its guard, and all that took their places have ended.
    input.read_to_end(&mut Vec::new())?;
    let dir = PathBuf::from(line.trim_end());
    let mut nobody = 0;
    for _ in 0..LOOKS {
        if !dir.exists() {
            break;
        }
        nobody = if node_dir::is_in_use(&dir) {
            0
        } else {
            nobody + 1
        };
        if nobody == NOBODY {
            node_dir::remove_node(&dir)?;
            break;
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(ExitCode::SUCCESS)
}
