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
use linux::signal::Held;
use network::hub::Hub;
use rustix::process::PidfdFlags;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;

use crate::guard::{self, Policy, Side};
use crate::node::place;

/// How often it looks whether there still is an agent, and how often it must have been missing in a row.
const LOOK_EVERY: Duration = Duration::from_secs(15);
const MISSING_AT_MOST: u32 = 4;

/// What it is told on its standard input.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Start {
    /// The node's directory.
    pub dir: PathBuf,
    /// Where to listen.
    pub socket: PathBuf,
    /// The addresses of the node's pods.
    pub range: String,
}

/// The role's entry.
pub fn main() -> anyhow::Result<ExitCode> {
    // Slurm may signal every process of a job at once; the agent's word counts.
    let _deaf = Held::new(&[
        Signal::TERM,
        Signal::INT,
        Signal::HUP,
        Signal::USR1,
        Signal::USR2,
    ])?;
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
        if let Side::Guard(code) = guard::split(Policy::Restart)? {
            return Ok(code);
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
            if let Err(error) = place::remove_as_root(&start.dir) {
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
    while missing < MISSING_AT_MOST {
        tokio::time::sleep(LOOK_EVERY).await;
        missing = match UnixStream::connect(&socket).await {
            Ok(_) => 0,
            Err(_) => missing + 1,
        };
    }
}
