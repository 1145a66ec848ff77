//! `coracle internal sandbox`: runs one pod.
//!
//! ```text
//!   read the configuration → lock the pod → enter a user namespace below the hub's → enter a mount namespace
//!     → fork the inner process and the fork servers of image pulls
//!     → connect to the kubelet → receive the bundle → run the pod → be dismissed → remove everything
//! ```
//!
//! As a step of the job, it also reports on standard output that it runs, or why not, and exits with the pod's exit code.
//!
//! The sandbox holds the hub's user namespace open and sends it to an agent that finds no hub. It outlives the agent that started it.
//! If no agent comes for a while, and no guard will start one, it ends the pod and exits. It saves the state of the pod's containers
//! to disk ([`sandbox::checkpoint`]), for an agent that finds no sandbox any more.

mod eviction;
mod held;
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
use network::hub::HubNamespaces;
use pod_protocol::connection::{SandboxService, StayConnectedEnd, stay_connected};
use pod_protocol::{PodState, SandboxHello, VERSION};
use rustix::process::{Pid, Signal};
use rustix::thread::UnshareFlags;
use sandbox::checkpoint;
use sandbox::runtime::{PodDirs, Snapshotter};
use serde::{Deserialize, Serialize};

use self::pod::SandboxPod;
use crate::node_dir;
use crate::pod_lock;
use crate::roles::node::cgroup;

/// How long the sandbox waits for an agent.
const PATIENCE: Duration = Duration::from_secs(45);
/// Name of the logs' directory, in the pod's directory.
const LOGS: &str = "logs";
/// Time-out of killing processes. A process that exceeds it is blocked in uninterruptible I/O.
const KILL_PATIENCE: Duration = Duration::from_secs(10);
/// Size of the tmpfs for secrets, config maps and other memory-backed volumes.
const MEMORY_BYTES: u64 = 1 << 30;

/// With [`SandboxStart::announces`], a running sandbox prints this followed by its pid.
pub const RUNNING: &str = "coracle-sandbox runs: ";
/// With [`SandboxStart::announces`], a sandbox that fails to start prints this followed by the reason.
pub const FAILED: &str = "coracle-sandbox failed: ";

/// The sandbox's configuration, one line of JSON on its standard input.
#[derive(Clone, Serialize, Deserialize)]
pub struct SandboxStart {
    /// The pod's uid.
    pub uid: String,
    /// Authenticates the sandbox to the kubelet.
    pub token: String,
    /// The pod shares the host's pid namespace.
    pub host_pid: bool,
    /// The sandbox is a step: the agent is not its parent, and waits for a report on standard output.
    pub announces: bool,
    /// The job's limit on open files. Containers get it; the agent and the sandbox raise their own.
    pub open_files: u64,
    /// The process limit of a container, if there is one.
    pub processes: Option<u64>,
    /// The node's directory.
    pub node_dir: PathBuf,
    /// The path of the image store.
    pub store: PathBuf,
    /// The parent cgroup of the pods' cgroups, if there is one.
    pub groups: Option<PathBuf>,
    /// The snapshotter of this node.
    pub stacking: Snapshotter,
}

impl SandboxStart {
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

/// Entry point of the role.
pub fn main() -> anyhow::Result<ExitCode> {
    // Slurm may signal every process of a job at once; the sandbox ends on the agent's request instead.
    let _deaf = crate::guard::deaf()?;
    let mut start = read_start()?;
    linux::descriptors::raise_limit(Some(start.open_files))?;
    if let Some(limit) = start.processes {
        linux::process_limit::choose_for_programs(limit);
    }
    // A step has its own cgroup.
    let division = start.announces.then(cgroup::set_up).flatten();
    if let Some(division) = &division {
        start.groups = Some(division.theirs().path().to_owned());
    }
    let places = start.places();
    let begun = begin(&start, &places);
    if start.announces {
        announce(begun.as_ref().err())?;
    }
    let (_lock, namespaces, forked) = begun?;
    let pod_dir = start.pod_dir();
    let ended = crate::block_on(async {
        let local = tokio::task::LocalSet::new();
        local
            .run_until(async {
                tokio::select! {
                    ended = live(start, places, forked) => ended,
                    never = namespaces.hand_over(&pod_dir) => match never {},
                }
            })
            .await
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
    /// The socket for requests to the inner process.
    line: OwnedFd,
    /// The fork servers of image pulls.
    fork_servers: Vec<puller::ForkServer>,
}

/// The part of the start that requires a single thread.
fn begin(
    start: &SandboxStart,
    places: &PodDirs,
) -> anyhow::Result<(File, HubNamespaces, Processes)> {
    let context = || format!("the sandbox of pod {}", start.uid);
    let lock = pod_lock::take(&start.pod_dir()).with_context(context)?;
    let namespaces = move_in(start, places).with_context(context)?;
    // Before the inner process, which exits when its socket closes: the fork servers must not inherit the other end.
    let fork_servers = puller::fork().context("cannot fork the servers of image pulls")?;
    let (inner, line) = fork_inner(start.host_pid)?;
    let forked = Processes {
        inner,
        line,
        fork_servers,
    };
    Ok((lock, namespaces, forked))
}

/// Prints one line for the agent that started this step.
fn announce(problem: Option<&anyhow::Error>) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    match problem {
        None => writeln!(out, "{RUNNING}{}", std::process::id())?,
        Some(problem) => writeln!(out, "{FAILED}{}", format!("{problem:#}").replace('\n', " "))?,
    }
    out.flush()
}

fn read_start() -> anyhow::Result<SandboxStart> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    let start: SandboxStart =
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
        // The root is the initramfs, which `pivot_root` cannot replace. Lock it, or privileged containers could get back to it.
        linux::namespace::unshare(UnshareFlags::NEWNS)?;
        linux::mount::follow_outside()?;
        return linux::tree::lock_root();
    }
    linux::namespace::enter_below(UnshareFlags::NEWNS)
}

/// Enters the hub's user namespace, then a user namespace of the sandbox below it, in which processes are counted apart from those of
/// other pods, and a mount namespace with the tmpfs of the pod. Returns the hub's namespaces.
fn move_in(start: &SandboxStart, places: &PodDirs) -> std::io::Result<HubNamespaces> {
    // Become non-dumpable before joining the hub's user namespace. The sandbox's root is still the host's, and containers with
    // `hostPID` may have all capabilities in that namespace, so they could access the host through `/proc/PID`.
    linux::credentials::hide()?;
    let namespaces = network::hub::join_user_namespace(&start.node_dir.join("hub.sock"))?;
    // Dumpable again while creating the user namespace, because a non-dumpable process cannot write its id maps in /proc. Containers
    // of other pods have no capabilities in the hub's user namespace, and this pod has no containers yet.
    linux::credentials::unhidden(enter_own_namespaces)??;
    linux::mount::follow_outside()?;
    std::fs::create_dir_all(&places.memory)?;
    linux::mount::tmpfs(&places.memory, MEMORY_BYTES)?;
    // Containers that do not run as root must be able to traverse it.
    linux::mount::passable(&places.memory)?;
    Ok(namespaces)
}

/// Forks the inner process. The calling process must have a single thread.
fn fork_inner(host_pid: bool) -> anyhow::Result<(Pid, OwnedFd)> {
    let (ours, theirs) = linux::packet::pair()?;
    let fresh = Fresh {
        pid: !host_pid,
        ..Default::default()
    };
    if host_pid {
        // If the inner process is killed, its children are reparented to the sandbox.
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

/// Runs the inner process in the host's pid namespace, where its exit does not kill its descendants. So it has no parent death
/// signal: it returns when the sandbox closes the socket, and kills all its descendants.
fn serve_among_all(socket: OwnedFd) -> std::io::Result<()> {
    linux::process::become_subreaper()?;
    let served = sandbox::inner::run(socket);
    let killed = linux::process::kill_all_below(KILL_PATIENCE);
    served.and(killed)
}

async fn live(start: SandboxStart, places: PodDirs, forked: Processes) -> anyhow::Result<ExitCode> {
    let hello = SandboxHello {
        version: VERSION,
        token: start.token.clone(),
        uid: start.uid.clone(),
    };
    let kubelet = node_dir::kubelet_socket(&start.node_dir);
    let (dir, memory) = (start.pod_dir(), places.memory.clone());
    let node_dir = start.node_dir.clone();
    let pod = Rc::new(SandboxPod::new(start, places, forked));
    let parting = loop {
        let dismissed = pod.dismissed();
        let parting = stay_connected(&kubelet, &hello, pod.clone(), PATIENCE, dismissed).await;
        // As long as the agent's guard runs, there will be an agent again.
        if parting == StayConnectedEnd::Done || !node_dir::is_guarded(&node_dir) {
            break parting;
        }
    };
    tracing::debug!(?parting, "the sandbox ends");
    let is_forsaken = parting == StayConnectedEnd::KubeletLost;
    if is_forsaken {
        // Save the state before the containers are stopped, so that an agent that still comes continues by the pod's restart policy.
        pod.save_for_good();
    }
    pod.end().await;
    let code = exit_code(&pod.state().borrow());
    // A mount point cannot be removed.
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

/// Removes the pod's data on disk, except for its logs and its checkpoint.
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

/// The pod's exit code for Slurm's accounting: the first non-zero exit code of its containers.
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
    fn exit_code_is_that_of_the_first_failure() {
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
