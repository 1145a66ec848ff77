//! `coracle internal hub-inside`: the hub's process inside the namespaces of the node's pods.
//!
//! It is the last process of a node: it outlives the hub's process outside and the agent. If the node has had none of them for a
//! while and no pod runs, it removes the node's directory and exits.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use network::hub::Inside;

use super::hub::{read_config, report};
use super::sandbox::AGENT_TIMEOUT;
use crate::guard;
use crate::node_dir;

/// How often the process checks for an agent while no process outside is connected, and how many checks in a row must fail. With
/// pods it waits as long as they wait for a new agent. Without pods it waits briefly, because Slurm does not end the job before
/// this process exits.
const CHECK_INTERVAL: Duration = Duration::from_secs(3);
const MAX_FAILED_CHECKS_WITH_PODS: u32 = 20;
const MAX_FAILED_CHECKS: u32 = 2;
const _: () = assert!(
    CHECK_INTERVAL.as_secs() * MAX_FAILED_CHECKS_WITH_PODS as u64 > AGENT_TIMEOUT.as_secs(),
    "pods that wait for an agent keep their network"
);

/// Entry point of the role.
pub fn main() -> anyhow::Result<ExitCode> {
    let _blocked = guard::block_job_signals()?;
    let (config, previous) = read_config()?;
    if let Some(limit) = config.process_limit {
        linux::process_limit::lower(limit)?;
    }
    let inside = Inside::enter(previous);
    report(inside.as_ref().err().map(ToString::to_string))?;
    let Ok(inside) = inside else {
        return Ok(ExitCode::FAILURE);
    };
    let mut abandonment = Abandonment::default();
    let socket = node_dir::hub_sockets(&config.dir).inside;
    inside.serve(&socket, CHECK_INTERVAL, || abandonment.check(&config.dir))?;
    Ok(ExitCode::SUCCESS)
}

/// Counts the checks in a row that found no agent.
#[derive(Default)]
struct Abandonment {
    failed_checks: u32,
}

impl Abandonment {
    /// Whether the node has had no agent for a while and no pod runs. If so, removes its directory.
    fn check(&mut self, dir: &Path) -> bool {
        let has_agent = UnixStream::connect(node_dir::kubelet_socket(dir)).is_ok();
        if has_agent || node_dir::is_guarded(dir) {
            self.failed_checks = 0;
            return false;
        }
        self.failed_checks += 1;
        let max = match node_dir::has_pods(dir) {
            false => MAX_FAILED_CHECKS,
            true => MAX_FAILED_CHECKS_WITH_PODS,
        };
        if self.failed_checks < max {
            return false;
        }
        self.failed_checks = 0;
        if let Err(error) = node_dir::ensure_no_pods(dir) {
            tracing::warn!(dir = %dir.display(), %error, "the node has no agent, but its directory is in use");
            return false;
        }
        if let Err(error) = linux::remove::tree(dir) {
            tracing::warn!(dir = %dir.display(), %error, "cannot remove the node's directory");
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node_dir::testing::LockedPod;

    #[test]
    fn directory_is_removed_when_no_pod_runs() {
        let test = "roles::hub_inside::tests::directory_is_removed_when_no_pod_runs";
        if LockedPod::is_this_process() {
            return;
        }
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("node");
        let pod = LockedPod::start(test, &dir.join("pods/uid"));
        let mut abandonment = Abandonment::default();
        for _ in 0..3 * MAX_FAILED_CHECKS_WITH_PODS {
            assert!(!abandonment.check(&dir));
        }
        assert!(dir.join("pods/uid").exists());
        pod.end();
        let checks = (0..=MAX_FAILED_CHECKS).filter(|_| abandonment.check(&dir));
        assert!(checks.count() >= 1);
        assert!(!dir.exists());
    }
}
