//! `coracle internal hub`: two processes that own the user and network namespace of a node's pods.
//!
//! One serves, the other is its guard. Whichever is killed, the other has the namespaces still and replaces it, so that pods
//! keep their network. They outlive the agent that started them, and the next one finds them at their socket. If no agent
//! comes for a while, they remove what is left of the node and end.

use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use network::hub::Hub;
use rustix::process::PidfdFlags;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;

use crate::guard::{self, Policy, Side};
use crate::handover::POD_MARK;
use crate::node::place;

/// How often it looks whether there still is an agent, and how often it must have been missing in a row: for as long as pods wait
/// for a new one, or shortly if there is no pod, for Slurm waits for us too.
const LOOK_EVERY: Duration = Duration::from_secs(3);
const MISSING_WITH_PODS: u32 = 20;
const MISSING_WITHOUT: u32 = 2;

/// What it is told on its standard input.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Start {
    /// The node's directory.
    pub dir: PathBuf,
    /// Where to listen.
    pub socket: PathBuf,
    /// The addresses of the node's pods.
    pub range: String,
    /// What sandboxes carry in their environment, as the value of [`POD_MARK`].
    pub mark: String,
}

/// The role's entry.
pub fn main() -> anyhow::Result<ExitCode> {
    // Slurm may signal every process of a job at once; the agent's word counts.
    let _deaf = guard::deaf()?;
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    let start: Start =
        serde_json::from_str(&line).context("what the agent says is not understood")?;
    let range = start.range.parse().map_err(anyhow::Error::msg);
    let set_up = range.and_then(|range| Ok(Hub::set_up(range, &start.socket)?));
    let (hub, answer) = match set_up {
        Ok(hub) => (Some(hub), "ready".to_owned()),
        Err(error) => (None, format!("{error:#}")),
    };
    let mut out = std::io::stdout().lock();
    writeln!(out, "{answer}")?;
    out.flush()?;
    drop(out);
    let Some(mut hub) = hub else {
        return Ok(ExitCode::FAILURE);
    };
    loop {
        if let Side::Guard(over) = guard::split(Policy::Restart)? {
            return Ok(over.code);
        }
        match crate::block_on(serve(&hub, &start))? {
            End::Served => return Ok(ExitCode::SUCCESS),
            // With the next turn we are the guard of a new one.
            End::Unguarded => hub.listen_again()?,
        }
    }
}

/// Why a process serves no longer.
enum End {
    /// The node ends.
    Served,
    /// Its guard was killed.
    Unguarded,
}

async fn serve(hub: &Hub, start: &Start) -> anyhow::Result<End> {
    let local = tokio::task::LocalSet::new();
    tokio::select! {
        served = local.run_until(hub.serve()) => {
            served?;
            Ok(End::Served)
        }
        gone = guard_is_gone() => {
            gone?;
            Ok(End::Unguarded)
        }
        () = forsaken(start) => {
            if let Err(error) = linux::remove::tree(&start.dir) {
                tracing::warn!(dir = %start.dir.display(), %error, "cannot remove the node's directory");
            }
            Ok(End::Served)
        }
    }
}

async fn guard_is_gone() -> std::io::Result<()> {
    let Some(guard) = rustix::process::getppid() else {
        return Ok(());
    };
    match rustix::process::pidfd_open(guard, PidfdFlags::NONBLOCK) {
        Err(rustix::io::Errno::SRCH) => Ok(()),
        guard => crate::ended(guard?).await,
    }
}

/// Returns when there has been no agent for a while.
async fn forsaken(start: &Start) {
    let socket = place::kubelet_socket(&start.dir);
    let mut missing = 0;
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        if UnixStream::connect(&socket).await.is_ok() {
            missing = 0;
            continue;
        }
        missing += 1;
        // Who can't look takes it that there are some.
        let mark = format!("{POD_MARK}={}", start.mark);
        let pods = linux::process::is_running(&["internal", "sandbox"], &mark);
        let patience = match pods {
            Ok(false) => MISSING_WITHOUT,
            _ => MISSING_WITH_PODS,
        };
        if missing >= patience {
            return;
        }
    }
}
