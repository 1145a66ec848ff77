//! `coracle internal sandbox`: one pod.
//!
//! ```text
//!   read the start line → join the hub's user namespace → mounts of our own → fork the inner process
//!     → dial the kubelet, be given the bundle → live the pod's life → be dismissed → remove everything
//! ```
//!
//! It outlives the agent that started it. If no agent comes for a while it ends the pod and itself.

mod eviction;
mod pod;
mod world;

use std::io::BufRead;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use anyhow::Context;
use linux::fresh::{Forked, Fresh};
use linux::signal::Held;
use rustix::process::{DumpableBehavior, Pid, Signal};
use rustix::thread::UnshareFlags;
use sandbox::connection::stay_connected;
use sandbox::protocol::{Hello, VERSION};
use sandbox::runtime::Places;
use serde::{Deserialize, Serialize};

use self::pod::SandboxPod;
use crate::node::place;

/// How long it waits for an agent.
const PATIENCE: Duration = Duration::from_secs(45);
/// Of memory for secrets, config maps and their kin.
const MEMORY_BYTES: u64 = 1 << 30;

/// What it is told on its standard input.
#[derive(Clone, Serialize, Deserialize)]
pub struct Start {
    /// The pod.
    pub uid: String,
    /// Shown to the kubelet.
    pub token: String,
    /// The pod shares the host's process namespace.
    pub host_pid: bool,
    /// The node's directory.
    pub node_dir: PathBuf,
    /// Where images are.
    pub store: PathBuf,
}

impl Start {
    fn places(&self) -> Places {
        let pod = self.pod_dir();
        Places {
            memory: pod.join("memory"),
            logs: pod.join("logs"),
            disk: pod,
        }
    }

    fn pod_dir(&self) -> PathBuf {
        self.node_dir.join("pods").join(&self.uid)
    }
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
    let start = read_start()?;
    let places = start.places();
    move_in(&start, &places).with_context(|| format!("the sandbox of pod {}", start.uid))?;
    let (inner, socket) = fork_inner(start.host_pid)?;
    crate::block_on(async {
        let local = tokio::task::LocalSet::new();
        local.run_until(live(start, places, inner, socket)).await
    })
}

fn read_start() -> anyhow::Result<Start> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    let start: Start =
        serde_json::from_str(&line).context("what the agent says is not understood")?;
    anyhow::ensure!(
        start
            .uid
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || c == '-')
            && !start.uid.is_empty(),
        "{} is no pod's uid",
        start.uid
    );
    Ok(start)
}

/// Enters the node's user namespace, and a mount namespace of our own with memory that ends with us.
fn move_in(start: &Start, places: &Places) -> std::io::Result<()> {
    network::hub::join(&start.node_dir.join("hub.sock"))?;
    linux::namespace::unshare(UnshareFlags::NEWNS)?;
    linux::mount::follow_outside()?;
    // Our own inner process is looked at by its /proc entries.
    rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    std::fs::create_dir_all(&places.memory)?;
    linux::mount::tmpfs(&places.memory, MEMORY_BYTES)?;
    // Containers of other users than root look through it.
    linux::mount::passable(&places.memory)
}

/// Forks the inner process while there is one thread.
fn fork_inner(host_pid: bool) -> anyhow::Result<(Pid, OwnedFd)> {
    let (ours, theirs) = linux::packet::pair()?;
    let fresh = Fresh {
        pid: !host_pid,
        ..Default::default()
    };
    match linux::fresh::fork_into(fresh).context("cannot fork the inner process")? {
        Forked::Parent(pid, _) => Ok((pid, ours)),
        Forked::Child => {
            drop(ours);
            let served = rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
                .map_err(Into::into)
                .and_then(|()| sandbox::inner::run(theirs));
            std::process::exit(i32::from(served.is_err()))
        }
    }
}

async fn live(
    start: Start,
    places: Places,
    inner: Pid,
    socket: OwnedFd,
) -> anyhow::Result<ExitCode> {
    let hello = Hello {
        version: VERSION,
        token: start.token.clone(),
        uid: start.uid.clone(),
    };
    let kubelet = place::kubelet_socket(&start.node_dir);
    let (dir, memory) = (start.pod_dir(), places.memory.clone());
    let pod = Rc::new(SandboxPod::new(start, places, inner, socket));
    let parting = stay_connected(&kubelet, &hello, pod.clone(), PATIENCE, pod.dismissed()).await;
    tracing::debug!(?parting, "the sandbox ends");
    pod.end().await;
    // A directory on which something is mounted can't be removed.
    if let Err(error) = linux::mount::detach(&memory) {
        tracing::debug!(%error, "the pod's memory is not mounted");
    }
    if let Err(error) = place::remove_as_root(&dir)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(dir = %dir.display(), %error, "cannot remove the pod's directory");
    }
    Ok(ExitCode::SUCCESS)
}
