//! `coracle internal hub`: two processes that own the user and network namespaces of a node's pods.
//!
//! One is the worker, the other its guard ([`pair`]). Both are in the namespaces, so if one is killed, the other replaces it and
//! pods keep their network. If both are killed at once, the agent, which holds the namespaces open, starts a new hub in them. The
//! hub outlives the agent that started it, and the next agent connects to its socket. If the node has no agent for a while and no
//! pods, the hub removes the node's directory and exits.

mod pair;

use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use network::hub::{Hub, HubNamespaces};
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;

use self::pair::Side;
use crate::guard;
use crate::node_dir;

/// Retry interval of listening after the guard was killed: the disk may be full for a while.
const LISTEN_PAUSE: Duration = Duration::from_secs(1);

/// How often the hub checks for an agent, and how many checks in a row must fail. With pods, the hub waits as long as they wait for
/// a new agent. Without pods, it waits briefly, because Slurm does not end the job before the hub exits.
const LOOK_EVERY: Duration = Duration::from_secs(3);
const MISSING_WITH_PODS: u32 = 20;
const MISSING_WITHOUT: u32 = 2;

/// The hub's configuration: one packet on its standard input, which is a socket. The packet also carries descriptors of the
/// previous hub's namespaces, if there was one.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HubStart {
    /// The node's directory.
    pub dir: PathBuf,
    /// The socket to listen on.
    pub socket: PathBuf,
    /// The CIDR of the node's pods.
    pub range: String,
    /// `RLIMIT_NPROC` of the hub's user namespace, if there is a limit.
    pub processes: Option<u64>,
}

/// Entry point of the role.
pub fn main() -> anyhow::Result<ExitCode> {
    // Slurm may signal every process of a job at once; the hub exits on the agent's request instead.
    let _deaf = guard::deaf()?;
    let (start, before) = read_start()?;
    if let Some(limit) = start.processes {
        linux::process_limit::lower(limit)?;
    }
    let range = start.range.parse().map_err(anyhow::Error::msg);
    let set_up = range.and_then(|range| Ok(Hub::set_up(range, &start.socket, before)?));
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
        let Side::Worker { guard } = pair::split()? else {
            return Ok(ExitCode::SUCCESS);
        };
        match crate::block_on(serve(&hub, &start, guard))? {
            End::Served => return Ok(ExitCode::SUCCESS),
            End::Unguarded => {
                tracing::warn!("the hub's guard was killed");
                while let Err(error) = hub.listen_again() {
                    tracing::warn!(%error, "the hub cannot listen");
                    std::thread::sleep(LISTEN_PAUSE);
                }
            }
        }
    }
}

fn read_start() -> anyhow::Result<(HubStart, Option<HubNamespaces>)> {
    let message = linux::packet::receive(rustix::stdio::stdin())?;
    let message = message.context("the agent ended before it said what to do")?;
    anyhow::ensure!(
        message.is_whole,
        "no descriptors are left for the namespaces of the last hub"
    );
    let start =
        serde_json::from_slice(&message.text).context("what the agent says is not understood")?;
    Ok((start, HubNamespaces::from_descriptors(message.descriptors)))
}

/// Why a worker stops serving.
enum End {
    /// The node ends.
    Served,
    /// The worker's guard was killed, so the worker becomes the guard of a new worker.
    Unguarded,
}

async fn serve(hub: &Hub, start: &HubStart, guard: OwnedFd) -> anyhow::Result<End> {
    let local = tokio::task::LocalSet::new();
    tokio::select! {
        served = local.run_until(hub.serve()) => {
            served?;
            Ok(End::Served)
        }
        gone = crate::ended(guard) => {
            gone?;
            Ok(End::Unguarded)
        }
        () = remove_abandoned(start, LOOK_EVERY) => Ok(End::Served),
    }
}

/// Removes the node's directory when the node has had no agent for a while, and returns. As long as a pod runs, the hub is needed, so
/// this keeps checking.
async fn remove_abandoned(start: &HubStart, look_every: Duration) {
    loop {
        forsaken(start, look_every).await;
        if let Err(error) = node_dir::refuse_with_pods(&start.dir) {
            tracing::warn!(dir = %start.dir.display(), %error, "the node has no agent, but its directory is in use");
            continue;
        }
        if let Err(error) = linux::remove::tree(&start.dir) {
            tracing::warn!(dir = %start.dir.display(), %error, "cannot remove the node's directory");
        }
        return;
    }
}

/// Returns when the node has had no agent for a while.
async fn forsaken(start: &HubStart, look_every: Duration) {
    let socket = node_dir::kubelet_socket(&start.dir);
    let mut missing = 0;
    loop {
        tokio::time::sleep(look_every).await;
        if UnixStream::connect(&socket).await.is_ok() || node_dir::is_guarded(&start.dir) {
            missing = 0;
            continue;
        }
        missing += 1;
        let patience = match node_dir::has_pods(&start.dir) {
            false => MISSING_WITHOUT,
            true => MISSING_WITH_PODS,
        };
        if missing >= patience {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node_dir::testing::LockedPod;

    #[tokio::test]
    async fn hub_serves_until_no_pod_runs() {
        let test = "roles::hub::tests::hub_serves_until_no_pod_runs";
        if LockedPod::is_this_process() {
            return;
        }
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("node");
        let pod = LockedPod::start(test, &dir.join("pods/uid"));
        let start = HubStart {
            socket: dir.join("hub.sock"),
            dir: dir.clone(),
            range: String::new(),
            processes: None,
        };
        let mut removed = std::pin::pin!(remove_abandoned(&start, Duration::from_millis(1)));
        let meanwhile = Duration::from_millis(500);
        let ended = tokio::time::timeout(meanwhile, &mut removed).await;
        assert!(ended.is_err() && dir.join("pods/uid").exists());
        pod.end();
        let limit = Duration::from_secs(60);
        tokio::time::timeout(limit, removed).await.unwrap();
        assert!(!dir.exists());
    }
}
