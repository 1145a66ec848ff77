//! `coracle internal sandbox`: runs one pod.
//!
//! ```text
//!   read the configuration → lock the pod → enter a user namespace below the hub's → enter a mount namespace
//!     → fork the inner process and the fork servers of image pulls
//!     → connect to the kubelet → receive the bundle → run the pod → exit on dismissal → remove everything
//! ```
//!
//! As a step of the job, it also reports on standard output that it runs, or why not, and exits with the pod's exit code.
//!
//! The sandbox holds the hub's user namespace open and sends it to an agent that finds no hub. It outlives the agent that started it.
//! If no agent starts for a while, and no guard will start one, it ends the pod and exits. It saves the state of the pod's containers
//! to disk ([`sandbox::lifecycle::checkpoint`]), for an agent that finds no sandbox any more.

mod node_services;

use std::fs::File;
use std::io::{BufRead, Write};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use anyhow::Context;
use images::puller::{self, ImagePuller};
use linux::clone::{CloneResult, NewNamespaces};
use linux::signal::BlockedSignals;
use network::hub::HubNamespaces;
use pod_protocol::connection::{KubeletEndpoint, SandboxService, StayConnectedEnd, stay_connected};
use pod_protocol::{
    FailureCause, PROTOCOL_VERSION, PodFailure, PodState, SandboxCredential, SandboxHello,
    SandboxId,
};
use rustix::process::{Pid, Signal};
use rustix::thread::UnshareFlags;
use sandbox::lifecycle::checkpoint;
use sandbox::pod::{ContainerLimits, PodEnvironment, SandboxPod};
use sandbox::runtime::{PodDirs, Snapshotter};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use self::node_services::LocalNodeServices;
use crate::cgroup;
use crate::cleanup;
use crate::node_dir;
use crate::process_lock;

/// Time that the sandbox waits for an agent while no guard runs. A leader that reaches the node starts one in less time. The sandbox cannot
/// wait until Slurm ends it, because Slurm may not know of it any more.
pub const AGENT_TIMEOUT: Duration = Duration::from_secs(45);
/// Name of the logs' directory, in the pod's directory.
const LOGS_DIR: &str = "logs";
/// Time-out of killing processes. A process that exceeds it is blocked in uninterruptible I/O.
const SANDBOX_KILL_TIMEOUT: Duration = Duration::from_secs(10);
/// Time that the kubelet has to receive the last state of a pod whose job ends.
const LAST_STATE_TIMEOUT: Duration = Duration::from_secs(2);
/// `status.message` of such a pod.
const JOB_ENDED: &str = "Slurm ended the job of the pod";
/// Size of the tmpfs for secrets, config maps and other memory-backed volumes.
const TMPFS_BYTES: u64 = 1 << 30;

/// A running sandbox that is a step prints this followed by its pid.
pub const RUNNING_PREFIX: &str = "coracle-sandbox runs: ";
/// A sandbox that is a step and fails to start prints this followed by the reason.
pub const FAILED_PREFIX: &str = "coracle-sandbox failed: ";

/// The sandbox's configuration, one line of JSON on its standard input.
#[derive(Clone, Serialize, Deserialize)]
pub struct SandboxConfig {
    /// The pod's uid.
    pub uid: String,
    /// The id that the launcher of a job has chosen for the sandbox, if it runs in a job of its own: then SIGTERM, which Slurm sends
    /// before it kills a job, ends the pod within its grace period.
    pub job_sandbox: Option<SandboxId>,
    /// Where the sandbox connects to its kubelet.
    pub kubelet: KubeletEndpoint,
    /// Authenticates the sandbox's first connection to the kubelet.
    pub token: String,
    /// The host's addresses, at most one per family, the preferred one first.
    pub host_ips: Vec<IpAddr>,
    /// The pod shares the host's pid namespace.
    pub host_pid: bool,
    /// The sandbox is a step: the agent is not its parent, and waits for a report on standard output.
    pub is_step: bool,
    /// The job's limit on open files. Containers get it; the agent and the sandbox raise their own.
    pub open_files: u64,
    /// The process limit of a container, if there is one.
    pub process_limit: Option<u64>,
    /// The node's directory.
    pub node_dir: PathBuf,
    /// The path of the image store.
    pub store: PathBuf,
    /// The parent cgroup of the pods' cgroups, if there is one.
    pub pods_cgroup: Option<PathBuf>,
    /// The snapshotter of this node.
    pub snapshotter: Snapshotter,
}

impl SandboxConfig {
    fn pod_dirs(&self) -> PodDirs {
        let pod = self.pod_dir();
        PodDirs {
            memory: pod.join("memory"),
            logs: pod.join(LOGS_DIR),
            cgroup: self.pods_cgroup.clone(),
            disk: pod,
        }
    }

    /// The first message to the kubelet.
    fn hello(&self) -> SandboxHello {
        SandboxHello {
            version: PROTOCOL_VERSION,
            uid: self.uid.clone(),
            id: match &self.job_sandbox {
                Some(id) => id.clone(),
                None => sandbox_id(&self.uid, std::process::id().cast_signed()),
            },
            credential: SandboxCredential::LaunchToken(self.token.clone()),
        }
    }

    fn pod_dir(&self) -> PathBuf {
        node_dir::pod(&self.node_dir, &self.uid)
    }
}

/// The id of the sandbox of pod `uid` with this process, on its node.
pub fn sandbox_id(uid: &str, pid: i32) -> SandboxId {
    SandboxId::new(format!("{uid}/{pid}"))
}

/// Entry point of the role.
pub fn main() -> anyhow::Result<ExitCode> {
    // Slurm may signal every process of a job at once; the sandbox ends on the agent's request instead.
    let blocked = crate::guard::block_job_signals()?;
    let mut config = read_config()?;
    linux::descriptors::raise_limit(Some(config.open_files))?;
    if let Some(limit) = config.process_limit {
        linux::process_limit::set_for_programs(limit);
    }
    // A step has its own cgroup.
    let delegated = config.is_step.then(cgroup::set_up).flatten();
    if let Some(delegated) = &delegated {
        config.pods_cgroup = Some(delegated.workloads().path().to_owned());
    }
    let pod_dirs = config.pod_dirs();
    let set_up_result = set_up(&config, &pod_dirs);
    if config.is_step {
        report_start(set_up_result.as_ref().err())?;
    }
    let (_lock, namespaces, processes) = set_up_result?;
    let pod_dir = config.pod_dir();
    let result = crate::block_on(async {
        let local = tokio::task::LocalSet::new();
        local
            .run_until(async {
                tokio::select! {
                    result = run_pod(config, pod_dirs, processes, blocked) => result,
                    never = namespaces.serve(&pod_dir) => match never {},
                }
            })
            .await
    });
    if let Some(delegated) = delegated {
        delegated.tear_down();
    }
    result
}

/// The processes that a sandbox forks.
pub struct SandboxProcesses {
    /// The inner process.
    inner: Pid,
    /// The socket for requests to the inner process.
    inner_socket: OwnedFd,
    /// The fork servers of image pulls.
    fork_servers: Vec<puller::ForkServer>,
}

/// The part of the start that requires a single thread.
fn set_up(
    config: &SandboxConfig,
    pod_dirs: &PodDirs,
) -> anyhow::Result<(File, HubNamespaces, SandboxProcesses)> {
    let context = || format!("the sandbox of pod {}", config.uid);
    let lock = lock_pod(config).with_context(context)?;
    let namespaces = enter_namespaces(config, pod_dirs).with_context(context)?;
    // Before the inner process, which exits when its socket closes: the fork servers must not inherit the other end.
    let fork_servers = puller::fork().context("cannot fork the servers of image pulls")?;
    let (inner, inner_socket) = fork_inner(config.host_pid)?;
    let processes = SandboxProcesses {
        inner,
        inner_socket,
        fork_servers,
    };
    Ok((lock, namespaces, processes))
}

/// Takes the pod's lock. Fails if the node's directory has been removed: the cluster has ended.
fn lock_pod(config: &SandboxConfig) -> std::io::Result<File> {
    match std::fs::create_dir(node_dir::pods(&config.node_dir)) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
        created => created?,
    }
    process_lock::acquire(&config.pod_dir())
}

/// Prints one line for the agent that started this step.
fn report_start(problem: Option<&anyhow::Error>) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    match problem {
        None => writeln!(out, "{RUNNING_PREFIX}{}", std::process::id())?,
        Some(problem) => writeln!(
            out,
            "{FAILED_PREFIX}{}",
            format!("{problem:#}").replace('\n', " ")
        )?,
    }
    out.flush()
}

fn read_config() -> anyhow::Result<SandboxConfig> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    let config: SandboxConfig =
        serde_json::from_str(&line).context("cannot parse the configuration")?;
    anyhow::ensure!(
        config
            .uid
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || c == '-')
            && !config.uid.is_empty(),
        "{} is not the uid of a pod",
        config.uid
    );
    Ok(config)
}

fn enter_own_namespaces() -> std::io::Result<()> {
    if linux::mount_tree::root_is_rootfs()? {
        // The root is the initramfs, which `pivot_root` cannot replace. Lock it, or privileged containers could get back to it.
        linux::namespace::unshare(UnshareFlags::NEWNS)?;
        linux::mount::make_all_slave()?;
        return linux::mount_tree::lock_root();
    }
    linux::namespace::enter_nested(UnshareFlags::NEWNS)
}

/// Enters the hub's user namespace, then a user namespace of the sandbox below it, in which processes are counted apart from those of
/// other pods, and a mount namespace with the tmpfs of the pod. Returns the hub's namespaces.
fn enter_namespaces(config: &SandboxConfig, pod_dirs: &PodDirs) -> std::io::Result<HubNamespaces> {
    // Become non-dumpable before joining the hub's user namespace. The sandbox's root is still the host's, and containers with
    // `hostPID` may have all capabilities in that namespace, so they could access the host through `/proc/PID`.
    linux::credentials::set_non_dumpable()?;
    let namespaces =
        network::hub::join_user_namespace(&node_dir::hub_sockets(&config.node_dir).outside)?;
    // Dumpable again while creating the user namespace, because a non-dumpable process cannot write its id maps in /proc. Containers
    // of other pods have no capabilities in the hub's user namespace, and this pod has no containers yet.
    linux::credentials::while_dumpable(enter_own_namespaces)??;
    linux::mount::make_all_slave()?;
    std::fs::create_dir_all(&pod_dirs.memory)?;
    linux::mount::tmpfs(&pod_dirs.memory, TMPFS_BYTES)?;
    // Containers that do not run as root must be able to traverse it.
    linux::mount::allow_traversal(&pod_dirs.memory)?;
    Ok(namespaces)
}

/// Forks the inner process. The calling process must have a single thread.
fn fork_inner(host_pid: bool) -> anyhow::Result<(Pid, OwnedFd)> {
    let (sandbox_socket, inner_socket) = linux::packet::pair()?;
    let namespaces = NewNamespaces {
        pid: !host_pid,
        ..Default::default()
    };
    if host_pid {
        // If the inner process is killed, its children are reparented to the sandbox.
        linux::process::become_subreaper()?;
    }
    match linux::clone::fork_into(namespaces).context("cannot fork the inner process")? {
        CloneResult::Parent(pid, _) => Ok((pid, sandbox_socket)),
        CloneResult::Child => {
            drop(sandbox_socket);
            let served = match host_pid {
                true => run_inner_in_host_pid_namespace(inner_socket),
                false => rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
                    .map_err(Into::into)
                    .and_then(|()| sandbox::runtime::inner::run(inner_socket)),
            };
            std::process::exit(i32::from(served.is_err()))
        }
    }
}

/// Runs the inner process in the host's pid namespace, where its exit does not kill its descendants. So it has no parent death
/// signal: it returns when the sandbox closes the socket, and kills all its descendants.
fn run_inner_in_host_pid_namespace(socket: OwnedFd) -> std::io::Result<()> {
    linux::process::become_subreaper()?;
    let served = sandbox::runtime::inner::run(socket);
    let killed = linux::process::kill_descendants(SANDBOX_KILL_TIMEOUT);
    served.and(killed)
}

async fn run_pod(
    config: SandboxConfig,
    pod_dirs: PodDirs,
    processes: SandboxProcesses,
    signals: BlockedSignals,
) -> anyhow::Result<ExitCode> {
    let mut hello = config.hello();
    let kubelet = config.kubelet.clone();
    let (dir, memory) = (config.pod_dir(), pod_dirs.memory.clone());
    let node_dir = config.node_dir.clone();
    let puller = ImagePuller::new(processes.fork_servers)?;
    let pod = Rc::new(SandboxPod::new(PodEnvironment {
        services: LocalNodeServices::new(&config, &pod_dirs, puller),
        dirs: pod_dirs,
        inner: processes.inner,
        inner_socket: processes.inner_socket,
        snapshotter: config.snapshotter,
        limits: ContainerLimits {
            open_files: config.open_files,
            processes: config.process_limit,
        },
        is_step: config.is_step,
    }));
    if config.job_sandbox.is_some() {
        let terminated = termination_signal(signals)?;
        tokio::task::spawn_local(end_with_job(Rc::clone(&pod), terminated));
    }
    let end = loop {
        let dismissed = pod.dismissed();
        let end = stay_connected(&kubelet, &mut hello, pod.clone(), AGENT_TIMEOUT, dismissed).await;
        // As long as the agent's guard runs, there will be an agent again.
        if end == StayConnectedEnd::Done || !cleanup::is_guarded(&node_dir) {
            break end;
        }
    };
    tracing::debug!(?end, "the sandbox ends");
    let kubelet_lost = end == StayConnectedEnd::KubeletLost;
    if kubelet_lost {
        // Save the state before the containers are stopped, so that an agent that starts later continues by the pod's restart policy.
        pod.save_final_checkpoint();
    }
    pod.end().await;
    let code = exit_code(&pod.state().borrow());
    // A mount point cannot be removed.
    if let Err(error) = linux::mount::detach(&memory) {
        tracing::debug!(%error, "cannot unmount the pod's tmpfs");
    }
    let keeps_records = pod.keeps_logs() || kubelet_lost;
    if keeps_records {
        pod.save_final_checkpoint();
    }
    if let Err(error) = remove_data(&dir, keeps_records)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(dir = %dir.display(), %error, "cannot remove the pod's directory");
    }
    Ok(code)
}

/// Ends the pod when Slurm ends its job.
async fn end_with_job(pod: Rc<SandboxPod<LocalNodeServices>>, terminated: oneshot::Receiver<()>) {
    if terminated.await.is_ok() {
        let failure = PodFailure::new(FailureCause::JobEnded, JOB_ENDED);
        pod.terminate(failure).await;
        // The kubelet ends the sandbox earlier, when it has received the pod's last state.
        tokio::time::sleep(LAST_STATE_TIMEOUT).await;
        pod.dismiss();
    }
}

/// Removes the pod's directory, or all of its entries but the logs and the checkpoint.
fn remove_data(dir: &Path, keeps_records: bool) -> std::io::Result<()> {
    match keeps_records {
        true => remove_all_but(dir, &[LOGS_DIR, checkpoint::FILE_NAME]),
        false => remove_all_but(dir, &[]).and_then(|()| linux::remove::tree(dir)),
    }
}

/// Waits for SIGTERM on a thread, because it is blocked in all threads.
fn termination_signal(signals: BlockedSignals) -> std::io::Result<oneshot::Receiver<()>> {
    let (sender, receiver) = oneshot::channel();
    std::thread::Builder::new().spawn(move || {
        while let Ok(received) = signals.wait() {
            if received.signal == Signal::TERM {
                let _ = sender.send(());
                return;
            }
        }
    })?;
    Ok(receiver)
}

/// Removes the pod's data on disk, except for some entries. The lock comes last: without it another sandbox may start in the directory.
fn remove_all_but(dir: &Path, kept: &[&str]) -> std::io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let name = entry?.file_name();
        if name != process_lock::LOCK_FILE && !kept.iter().any(|kept| name == *kept) {
            linux::remove::tree(&dir.join(name))?;
        }
    }
    linux::remove::tree(&dir.join(process_lock::LOCK_FILE))
}

/// The pod's exit code for Slurm's accounting: the first non-zero exit code of its containers.
fn exit_code(state: &PodState) -> ExitCode {
    let containers = state.init_containers.iter().chain(&state.containers);
    let failed = containers.filter_map(|container| {
        let states = [container.state.as_ref(), container.last_state.as_ref()];
        let terminated = states
            .into_iter()
            .flatten()
            .find_map(|state| state.terminated.as_ref());
        terminated
            .map(|state| state.exit_code)
            .filter(|code| *code != 0)
    });
    let code = failed.map(|code| u8::try_from(code).unwrap_or(1)).next();
    ExitCode::from(code.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retired_pod_keeps_logs_and_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["logs/c", "volumes/v", "containers/c/0"] {
            std::fs::create_dir_all(dir.path().join(name)).unwrap();
        }
        std::fs::write(dir.path().join("logs/c/0.log"), "text").unwrap();
        std::fs::write(dir.path().join("note"), "text").unwrap();
        std::fs::write(dir.path().join(checkpoint::FILE_NAME), "text").unwrap();
        remove_data(dir.path(), true).unwrap();
        let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().flatten().collect();
        assert_eq!(left.len(), 2, "{left:?}");
        assert!(dir.path().join(checkpoint::FILE_NAME).exists());
        assert!(dir.path().join("logs/c/0.log").exists());
    }

    #[test]
    fn exit_code_is_that_of_first_failure() {
        let terminated = |code: i32| serde_json::json!({"terminated": {"exitCode": code}});
        let container = |name: &str, state: serde_json::Value, last: serde_json::Value| {
            let status = serde_json::json!({"name": name, "image": "", "imageID": "", "ready": false,
                "restartCount": 0, "state": state, "lastState": last});
            serde_json::from_value(status).unwrap()
        };
        let mut state = PodState::default();
        assert_eq!(exit_code(&state), ExitCode::SUCCESS);
        state.containers = vec![container("a", terminated(0), terminated(9))];
        assert_eq!(exit_code(&state), ExitCode::SUCCESS);
        let waiting = serde_json::json!({"waiting": {"reason": "CrashLoopBackOff"}});
        state
            .containers
            .push(container("b", waiting, terminated(6)));
        state
            .containers
            .push(container("c", terminated(7), terminated(0)));
        assert_eq!(exit_code(&state), ExitCode::from(6));
    }
}
