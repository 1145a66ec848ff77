//! `coracle internal sandbox`: one pod.
//!
//! ```text
//!   read the start line → lock the pod → a user namespace below the hub's → mounts of our own → fork the inner process and the
//!     puller
//!     → dial the kubelet, be given the bundle → live the pod's life → be dismissed → remove everything
//! ```
//!
//! As a step of the job it also says on its standard output that it runs, or why not, and ends with the pod's exit code.
//!
//! It outlives the agent that started it. If no agent comes for a while, and no guard will start one, it ends the pod and itself.
//! How the pod's containers stand is kept on disk ([`sandbox::lifecycle::checkpoint`]), for an agent that finds no sandbox any more.

mod eviction;
mod held;
pub mod lock;
mod pod;
mod puller;
mod world;

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use anyhow::Context;
use linux::fresh::{Forked, Fresh};
use rustix::process::{Pid, Signal};
use rustix::thread::UnshareFlags;
use sandbox::lifecycle::checkpoint;
use pod_protocol::connection::{StayConnectedEnd, SandboxService, stay_connected};
use pod_protocol::{SandboxHello, PodState, VERSION};
use sandbox::runtime::{PodDirs, Snapshotter};
use serde::{Deserialize, Serialize};

use self::pod::SandboxPod;
use crate::node::{cgroup, place};

/// How long it waits for an agent.
const PATIENCE: Duration = Duration::from_secs(45);
/// Where the pod's logs are, in its directory.
const LOGS: &str = "logs";
/// A process that doesn't even end when it is killed waits for a disk or a server.
const KILL_PATIENCE: Duration = Duration::from_secs(10);
/// Of memory for secrets, config maps and their kin.
const MEMORY_BYTES: u64 = 1 << 30;

/// What a sandbox says when it runs, if it says so; the number of its process follows.
pub const RUNNING: &str = "coracle-sandbox runs: ";
/// What it says when it can't run, if it says so; the reason follows.
pub const FAILED: &str = "coracle-sandbox failed: ";

/// What it is told on its standard input.
#[derive(Clone, Serialize, Deserialize)]
pub struct Start {
    /// The pod.
    pub uid: String,
    /// Shown to the kubelet.
    pub token: String,
    /// The pod shares the host's process namespace.
    pub host_pid: bool,
    /// Whoever started it isn't its parent, and waits for its word on standard output.
    pub announces: bool,
    /// How many files a process of the job may open. Whoever started it may open more, and so does it.
    pub open_files: u64,
    /// How many processes a container may have, if there is a limit.
    pub processes: Option<u64>,
    /// The node's directory.
    pub node_dir: PathBuf,
    /// Where images are.
    pub store: PathBuf,
    /// The control group in which those of pods are made, if there is one.
    pub groups: Option<PathBuf>,
    /// How their layers become one file system on this node.
    pub stacking: Snapshotter,
}

impl Start {
    fn places(&self) -> PodDirs {
        let pod = self.pod_dir();
        PodDirs {
            memory: pod.join("memory"),
            logs: pod.join(LOGS),
            cgroup: self.groups.clone(),
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
    let _deaf = crate::guard::deaf()?;
    let mut start = read_start()?;
    linux::descriptors::raise_limit(Some(start.open_files))?;
    if let Some(limit) = start.processes {
        linux::process_limit::choose_for_programs(limit);
    }
    // A step has a control group of its own.
    let division = start.announces.then(cgroup::set_up).flatten();
    if let Some(division) = &division {
        start.groups = Some(division.theirs().path().to_owned());
    }
    let places = start.places();
    let begun = begin(&start, &places);
    if start.announces {
        announce(begun.as_ref().err())?;
    }
    let (_lock, forked) = begun?;
    let ended = crate::block_on(async {
        let local = tokio::task::LocalSet::new();
        local.run_until(live(start, places, forked)).await
    });
    if let Some(division) = division {
        division.end();
    }
    ended
}

/// The processes that a sandbox forks.
pub struct Processes {
    /// The inner process.
    inner: Pid,
    /// Where it is asked.
    line: OwnedFd,
    /// Where the puller is asked.
    puller: OwnedFd,
}

/// All that must be done while there is one thread.
fn begin(start: &Start, places: &PodDirs) -> anyhow::Result<(File, Processes)> {
    let context = || format!("the sandbox of pod {}", start.uid);
    let lock = lock::take(&start.pod_dir()).with_context(context)?;
    move_in(start, places).with_context(context)?;
    // First, so that it holds nothing of the line to the inner process, which ends with that.
    let puller = puller::fork().context("cannot fork the puller of images")?;
    let (inner, line) = fork_inner(start.host_pid)?;
    let forked = Processes {
        inner,
        line,
        puller,
    };
    Ok((lock, forked))
}

/// One line to whoever waits for it.
fn announce(problem: Option<&anyhow::Error>) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    match problem {
        None => writeln!(out, "{RUNNING}{}", std::process::id())?,
        Some(problem) => writeln!(out, "{FAILED}{}", format!("{problem:#}").replace('\n', " "))?,
    }
    out.flush()
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

fn enter_own_namespaces() -> std::io::Result<()> {
    if linux::tree::root_is_first()? {
        // Privileged containers could get back to it.
        linux::namespace::unshare(UnshareFlags::NEWNS)?;
        linux::mount::follow_outside()?;
        return linux::tree::lock_root();
    }
    linux::namespace::enter_below(UnshareFlags::NEWNS)
}

/// Enters the node's user namespace, one of our own below it, in which processes are counted apart from those of other pods, and a
/// mount namespace with memory that ends with us.
fn move_in(start: &Start, places: &PodDirs) -> std::io::Result<()> {
    // Our root is the host's, and containers that see the host's processes may have all rights in the namespace that we join.
    linux::credentials::hide()?;
    network::hub::join_user_namespace(&start.node_dir.join("hub.sock"))?;
    // The maps of the new user namespace are written through /proc, which is closed to processes that hide. Containers of other
    // pods have no rights in the hub's user namespace, and ours does not have any yet.
    linux::credentials::unhidden(enter_own_namespaces)??;
    linux::mount::follow_outside()?;
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
    if host_pid {
        // What the inner process leaves if it is killed comes to us.
        linux::process::become_subreaper()?;
    }
    match linux::fresh::fork_into(fresh).context("cannot fork the inner process")? {
        Forked::Parent(pid, _) => Ok((pid, ours)),
        Forked::Child => {
            drop(ours);
            let served = match host_pid {
                true => serve_among_all(theirs),
                false => rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
                    .map_err(Into::into)
                    .and_then(|()| sandbox::inner::run(theirs)),
            };
            std::process::exit(i32::from(served.is_err()))
        }
    }
}

/// In the host's process namespace nothing ends with the inner process but its own children. So it is not killed when the
/// sandbox dies, but hears of it, and kills all that descends from it.
fn serve_among_all(socket: OwnedFd) -> std::io::Result<()> {
    linux::process::become_subreaper()?;
    let served = sandbox::inner::run(socket);
    let killed = linux::process::kill_all_below(KILL_PATIENCE);
    served.and(killed)
}

async fn live(start: Start, places: PodDirs, forked: Processes) -> anyhow::Result<ExitCode> {
    let hello = SandboxHello {
        version: VERSION,
        token: start.token.clone(),
        uid: start.uid.clone(),
    };
    let kubelet = place::kubelet_socket(&start.node_dir);
    let (dir, memory) = (start.pod_dir(), places.memory.clone());
    let node_dir = start.node_dir.clone();
    let pod = Rc::new(SandboxPod::new(start, places, forked));
    let parting = loop {
        let dismissed = pod.dismissed();
        let parting = stay_connected(&kubelet, &hello, pod.clone(), PATIENCE, dismissed).await;
        // As long as the agent's guard lives, there will be an agent again.
        if parting == StayConnectedEnd::Done || !place::is_guarded(&node_dir) {
            break parting;
        }
    };
    tracing::debug!(?parting, "the sandbox ends");
    let is_forsaken = parting == StayConnectedEnd::KubeletLost;
    if is_forsaken {
        // What ends now was not the pod's to end, and an agent that does come goes on from here by the pod's policy.
        pod.save_for_good();
    }
    pod.end().await;
    let code = exit_code(&pod.state().borrow());
    // A directory on which something is mounted can't be removed.
    if let Err(error) = linux::mount::detach(&memory) {
        tracing::debug!(%error, "the pod's memory is not mounted");
    }
    let removed = match pod.keeps_logs() || is_forsaken {
        true => {
            pod.save_for_good();
            remove_volumes(&dir)
        }
        false => linux::remove::tree(&dir),
    };
    if let Err(error) = removed
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(dir = %dir.display(), %error, "cannot remove the pod's directory");
    }
    Ok(code)
}

/// Removes what a pod has on disk, except for what is asked for when it is over: its logs, and how it ended.
fn remove_volumes(dir: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if [LOGS, checkpoint::NAME]
            .map(OsStr::new)
            .contains(&&*entry.file_name())
        {
            continue;
        }
        linux::remove::tree(&entry.path())?;
    }
    Ok(())
}

/// How the pod ended, for Slurm's accounts: with the first of its containers' exit codes that isn't 0.
fn exit_code(state: &PodState) -> ExitCode {
    let containers = state.init_containers.iter().chain(&state.containers);
    let failed = containers.filter_map(|container| {
        let states = [container.state.as_ref(), container.last_state.as_ref()];
        let ended = states
            .into_iter()
            .flatten()
            .find_map(|state| state.terminated.as_ref());
        ended.map(|ended| ended.exit_code).filter(|code| *code != 0)
    });
    let code = failed.map(|code| u8::try_from(code).unwrap_or(1)).next();
    ExitCode::from(code.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_logs_and_checkpoint_of_a_retired_pod_stay() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["logs/c", "volumes/v", "containers/c/0"] {
            std::fs::create_dir_all(dir.path().join(name)).unwrap();
        }
        std::fs::write(dir.path().join("logs/c/0.log"), "text").unwrap();
        std::fs::write(dir.path().join("note"), "text").unwrap();
        std::fs::write(dir.path().join(checkpoint::NAME), "text").unwrap();
        remove_volumes(dir.path()).unwrap();
        let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().flatten().collect();
        assert_eq!(left.len(), 2, "{left:?}");
        assert!(dir.path().join(checkpoint::NAME).exists());
        assert!(dir.path().join("logs/c/0.log").exists());
    }

    #[test]
    fn a_pod_ends_like_the_first_container_that_failed() {
        let ended = |code: i32| serde_json::json!({"terminated": {"exitCode": code}});
        let container = |name: &str, state: serde_json::Value, last: serde_json::Value| {
            let status = serde_json::json!({"name": name, "image": "", "imageID": "", "ready": false,
                "restartCount": 0, "state": state, "lastState": last});
            serde_json::from_value(status).unwrap()
        };
        let mut state = PodState::default();
        assert_eq!(exit_code(&state), ExitCode::SUCCESS);
        state.containers = vec![container("a", ended(0), ended(9))];
        assert_eq!(exit_code(&state), ExitCode::SUCCESS);
        let waiting = serde_json::json!({"waiting": {"reason": "CrashLoopBackOff"}});
        state.containers.push(container("b", waiting, ended(6)));
        state.containers.push(container("c", ended(7), ended(0)));
        assert_eq!(exit_code(&state), ExitCode::from(6));
    }
}
