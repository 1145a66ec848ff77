//! `coracle internal janitor`: removes a node's directory if all other processes of the node are killed at once.
//!
//! After a second Ctrl-C, `srun` has Slurm kill all processes of the job, including the agent and its guard. The janitor is a
//! daemon (reparented, in its own session), so Slurm does not kill it where it tracks processes by their parents. Where Slurm
//! tracks them by cgroup, it kills the janitor too, and the user's next cluster on the node removes the directory.

use std::io::{BufRead, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::Context;
use linux::process::ForkResult;

use crate::node_dir;

/// The janitor checks every [`POLL_INTERVAL`] whether any process uses the directory, removes it after [`UNUSED_POLLS`] negative checks in a
/// row, and exits after [`MAX_POLLS`] checks. If the node continues, a new agent has started a new janitor by then.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
const UNUSED_POLLS: u32 = 5;
const MAX_POLLS: u32 = 1200;

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
    let mut unused_polls = 0;
    for _ in 0..MAX_POLLS {
        if !dir.exists() {
            break;
        }
        unused_polls = if node_dir::is_in_use(&dir) {
            0
        } else {
            unused_polls + 1
        };
        if unused_polls == UNUSED_POLLS {
            node_dir::remove_node(&dir)?;
            break;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(ExitCode::SUCCESS)
}
