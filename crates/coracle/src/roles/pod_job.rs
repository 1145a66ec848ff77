//! `coracle internal pod-job`: runs the sandbox of one pod on a machine that has no agent.
//!
//! It does for one pod what an agent does for its node: it finds out what this machine offers, starts a hub, and starts the sandbox,
//! which connects to a kubelet on another machine. It ends with the sandbox, removes everything, and exits with the pod's exit code.
//! SIGTERM, which Slurm sends before it kills a job, ends the pod within its grace period.

use std::io::BufRead;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use kubelet::{LaunchRequest, LauncherKind, PodResources};
use pod_protocol::SandboxId;
use pod_protocol::connection::KubeletEndpoint;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use tokio::signal::unix::{SignalKind, signal};

use crate::cgroup;
use crate::cleanup;
use crate::guard::{self, GuardPolicy, GuardedProcess};
use crate::launch::{self, NodeLauncher};
use crate::node_dir::{self, NodeDir};
use crate::node_hub::NodeHub;
use crate::process_lock;
use crate::sealed_program;

/// How long another process may still hold the lock of a directory with the same name.
const POD_JOB_LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// The role's configuration, one line of JSON on its standard input.
#[derive(Clone, Serialize, Deserialize)]
pub struct PodJobConfig {
    /// The pod's uid.
    pub uid: String,
    /// The sandbox's id, by which the launcher of this job knows it.
    pub id: SandboxId,
    /// The pod shares the host's pid namespace.
    pub host_pid: bool,
    /// Where the sandbox connects to its kubelet.
    pub kubelet: KubeletEndpoint,
    /// Authenticates the sandbox's first connection to the kubelet.
    pub token: String,
    /// The CIDR of the pod's address.
    pub pod_cidr: String,
}

/// Entry point of the role.
pub fn main() -> anyhow::Result<ExitCode> {
    sealed_program::run_from_sealed_copy();
    let config = read_config()?;
    // The token makes the directory's name unguessable and unique.
    let node_dir = NodeDir::new(&config.token, &node_dir::hostname());
    let context = || format!("cannot create directory {}", node_dir.dir.display());
    node_dir.create().with_context(context)?;
    // The sandbox waits for its kubelet for as long as this lock is held.
    let lock = process_lock::try_acquire(&node_dir.dir, POD_JOB_LOCK_TIMEOUT)?
        .context("another process uses the pod's directory")?;
    let cgroups = cgroup::set_up();
    match guard::fork_worker(GuardPolicy::Exit)? {
        GuardedProcess::Worker => {
            let pods_cgroup = cgroups.map(|cgroups| cgroups.workloads().path().to_owned());
            crate::block_on(run(config, node_dir, pods_cgroup))
        }
        GuardedProcess::Guard(result) => {
            cleanup::kill_processes(&node_dir.dir);
            drop(lock);
            cleanup::remove_own_and_abandoned(&node_dir.dir);
            if let Some(cgroups) = cgroups {
                cgroups.tear_down();
            }
            Ok(result.code)
        }
    }
}

fn read_config() -> anyhow::Result<PodJobConfig> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    serde_json::from_str(&line).context("cannot parse the configuration")
}

async fn run(
    config: PodJobConfig,
    node_dir: NodeDir,
    pods_cgroup: Option<std::path::PathBuf>,
) -> anyhow::Result<ExitCode> {
    let mut terminated = signal(SignalKind::terminate())?;
    let hub = Arc::new(NodeHub::new(&node_dir.dir, &config.pod_cidr));
    let launcher = NodeLauncher {
        kubelet: config.kubelet,
        hub: Arc::clone(&hub),
        store: images::ImageStore::default_path()
            .context("no directory for images: neither XDG_DATA_HOME nor HOME is set")?,
        images: Arc::default(),
        pods_cgroup,
        snapshotter: Arc::default(),
        host_ips: launch::one_per_family(&linux::address::host_addresses()?),
        job: 0,
        node: node_dir::hostname(),
        open_files: linux::descriptors::raise_limit(None)?,
        job_sandbox: Some(config.id),
        node_dir,
    };
    let request = LaunchRequest {
        uid: config.uid,
        namespace: String::new(),
        name: String::new(),
        host_pid: config.host_pid,
        launcher: LauncherKind::Fork,
        resources: PodResources::default(),
        token: config.token,
    };
    let mut sandbox = launcher
        .fork(&request)
        .await
        .context("cannot start the sandbox")?;
    let pid = sandbox
        .id()
        .and_then(|pid| Pid::from_raw(pid.cast_signed()));
    let exited = async {
        loop {
            tokio::select! {
                status = sandbox.wait() => break status,
                _ = terminated.recv() => {
                    // A child that was not waited for keeps its pid.
                    let _ = pid.map(|pid| kill_process(pid, Signal::TERM));
                }
            }
        }
    };
    let status = tokio::select! {
        status = exited => status?,
        () = hub.supervise() => anyhow::bail!("the hub is not supervised any more"),
    };
    hub.shut_down().await;
    let code = status.code().or(status.signal().map(|signal| 128 + signal));
    Ok(crate::exit::code(code.unwrap_or(1)))
}
