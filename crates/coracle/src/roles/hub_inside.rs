//! `coracle internal hub-inside`: the hub's process inside the namespaces of the node's pods.
//!
//! It outlives the hub's process outside and the agent. If the node has had no agent for a while and no pod runs, it ends the hub.
//! Then no process holds a lock of the node's directory any more, and the janitor removes it.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use network::hub::Inside;

use super::hub::{read_config, report};
use super::sandbox::AGENT_TIMEOUT;
use crate::cleanup;
use crate::guard;
use crate::node_dir;
use crate::process_lock;

/// How often the process checks for the guard of an agent.
const GUARD_CHECK_INTERVAL: Duration = Duration::from_secs(3);
/// How long the process waits for another agent on a node without data of pods. Brief, because the job ends only after this
/// process exits. With data, it waits as long as pods do.
const IDLE_AGENT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the last process inside may still hold the lock.
const INSIDE_LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// Entry point of the role.
pub fn main() -> anyhow::Result<ExitCode> {
    let _blocked = guard::block_job_signals()?;
    let (config, previous) = read_config()?;
    if let Some(limit) = config.process_limit {
        linux::process_limit::lower(limit)?;
    }
    let [outside, lock_dir] = node_dir::hub_locks(&config.dir);
    let locked = process_lock::try_acquire(&lock_dir, INSIDE_LOCK_TIMEOUT);
    let entered = match &locked {
        Ok(Some(_)) => Inside::enter(previous).map_err(|error| error.to_string()),
        Ok(None) => Err("the last process inside has not exited".to_owned()),
        Err(error) => Err(format!("cannot lock {}: {error}", lock_dir.display())),
    };
    report(entered.as_ref().err().cloned())?;
    let Ok(inside) = entered else {
        return Ok(ExitCode::FAILURE);
    };
    let mut unguarded = Unguarded::default();
    let socket = node_dir::hub_sockets(&config.dir).inside;
    inside.serve(&socket, GUARD_CHECK_INTERVAL, || {
        let is_abandoned = unguarded.is_abandoned(&config.dir, Instant::now());
        if is_abandoned {
            // The process outside would start another one inside.
            process_lock::kill_holder(&outside);
        }
        is_abandoned
    })?;
    Ok(ExitCode::SUCCESS)
}

/// The time since which the node has had no guard of an agent.
#[derive(Default)]
struct Unguarded(Option<Instant>);

impl Unguarded {
    /// Whether the node has had no guard for too long and no pod runs.
    fn is_abandoned(&mut self, dir: &Path, now: Instant) -> bool {
        // The guard has no lock if the file system has none, or was full when it started.
        if cleanup::is_guarded(dir) || cleanup::has_agent(dir) {
            self.0 = None;
            return false;
        }
        let timeout = match cleanup::has_data(dir) {
            true => AGENT_TIMEOUT,
            false => IDLE_AGENT_TIMEOUT,
        };
        now - *self.0.get_or_insert(now) >= timeout && !cleanup::has_pods(dir)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process_lock::testing::LockHolder;

    #[test]
    fn node_is_abandoned_without_guard_and_pods() {
        let test = "roles::hub_inside::tests::node_is_abandoned_without_guard_and_pods";
        if LockHolder::is_this_process() {
            return;
        }
        let home = tempfile::tempdir().unwrap();
        let dir = home.path();
        let began = Instant::now();
        let mut unguarded = Unguarded::default();
        let guard = LockHolder::start(test, dir);
        assert!(!unguarded.is_abandoned(dir, began));
        guard.end();
        assert!(!unguarded.is_abandoned(dir, began));
        assert!(unguarded.is_abandoned(dir, began + IDLE_AGENT_TIMEOUT));

        // Volumes that no pod uses at the moment, and logs of pods that have ended, are kept for another agent too.
        for data in ["local/volume", "pods/uid"] {
            std::fs::create_dir_all(dir.join(data)).unwrap();
            assert!(!unguarded.is_abandoned(dir, began + IDLE_AGENT_TIMEOUT));
            assert!(unguarded.is_abandoned(dir, began + AGENT_TIMEOUT));
        }
        let pod = LockHolder::start(test, &dir.join("pods/uid"));
        assert!(!unguarded.is_abandoned(dir, began + 2 * AGENT_TIMEOUT));
        pod.end();
        assert!(unguarded.is_abandoned(dir, began + 2 * AGENT_TIMEOUT));
    }
}
