//! `coracle internal hub`: the hub's process outside the namespaces of the node's pods.
//!
//! The agent starts it, and starts it again if it exits. It outlives the agent, and the next agent connects to its socket. It
//! starts the process inside ([`super::hub_inside`]), which outlives both.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::Context;
use network::hub::{Hub, HubNamespaces};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use crate::guard;
use crate::node_dir;
use crate::process_lock;

/// The hub's configuration: one packet on the standard input of each process, which is a socket. The packet also carries
/// descriptors of the previous hub's namespaces, if there was one.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HubConfig {
    /// The node's directory.
    pub dir: PathBuf,
    /// The CIDR of the node's pods.
    pub pod_cidr: String,
    /// `RLIMIT_NPROC` of the hub's user namespace, if there is a limit.
    pub process_limit: Option<u64>,
}

/// Entry point of the role.
pub fn main() -> anyhow::Result<ExitCode> {
    // Slurm may signal every process of a job at once; the hub exits on the agent's request instead.
    let _blocked = guard::block_job_signals()?;
    let (config, previous) = read_config()?;
    let _lock = match lock(&config.dir) {
        Ok(lock) => lock,
        Err(error) => {
            report(Some(format!("{error:#}")))?;
            return Ok(ExitCode::FAILURE);
        }
    };
    crate::block_on(async {
        let spawn = {
            let config = config.clone();
            Box::new(move |previous: Option<&HubNamespaces>| spawn_inside(&config, previous))
        };
        let sockets = node_dir::hub_sockets(&config.dir);
        let pod_cidr = config.pod_cidr.parse().map_err(anyhow::Error::msg)?;
        let hub = Hub::set_up(pod_cidr, &sockets, previous, spawn).await;
        report(hub.as_ref().err().map(ToString::to_string))?;
        match hub {
            Ok(hub) => {
                hub.serve().await;
                Ok(ExitCode::SUCCESS)
            }
            Err(_) => Ok(ExitCode::FAILURE),
        }
    })
}

/// Takes the hub's lock: two agents may find the last hub dead at the same time.
fn lock(dir: &Path) -> anyhow::Result<File> {
    let [dir, _] = node_dir::hub_locks(dir);
    let lock = process_lock::try_acquire(&dir, Duration::ZERO)
        .with_context(|| format!("cannot lock {}", dir.display()))?;
    lock.context("another hub of this node is running")
}

/// Reports on standard output that this process is ready, or why it failed.
pub fn report(failure: Option<String>) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", failure.as_deref().unwrap_or(READY))?;
    out.flush()
}

/// The report of a process that is ready.
pub const READY: &str = "ready";

/// Reads the configuration of a process of the hub, and the namespaces that it has to enter.
pub fn read_config() -> anyhow::Result<(HubConfig, Option<HubNamespaces>)> {
    let message = linux::packet::receive(rustix::stdio::stdin())?;
    let message = message.context("the process that started the hub has exited")?;
    anyhow::ensure!(
        message.is_complete,
        "no free descriptors for the namespaces of the previous hub"
    );
    let config = serde_json::from_slice(&message.text).context("malformed configuration")?;
    Ok((config, HubNamespaces::from_descriptors(message.descriptors)))
}

/// Starts the process inside. The receiver gets its report if it fails.
fn spawn_inside(
    config: &HubConfig,
    previous: Option<&HubNamespaces>,
) -> std::io::Result<oneshot::Receiver<String>> {
    let (ours, theirs) = linux::packet::pair()?;
    let mut child = Command::new("/proc/self/exe")
        .args(["internal", "hub-inside"])
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::piped())
        .spawn()?;
    let descriptors = previous.map(HubNamespaces::descriptors).unwrap_or_default();
    linux::packet::send(ours.as_fd(), 0, &serde_json::to_vec(config)?, &descriptors)?;
    let (failed, failure) = oneshot::channel();
    // Also reaps the process when it exits.
    std::thread::Builder::new().spawn(move || {
        let mut report = String::new();
        if let Some(output) = child.stdout.take() {
            let _ = BufReader::new(output).read_line(&mut report);
        }
        match report.trim() {
            READY => {}
            "" => _ = failed.send("it exited at once".to_owned()),
            reason => _ = failed.send(reason.to_owned()),
        }
        let _ = child.wait();
    })?;
    Ok(failure)
}
