//! The cgroups of a pod, if a cgroup is delegated to us: one for the pod, and below it one per attempt of a container.
//!
//! The sandbox itself stays outside: its resource usage is not the pod's, and it must survive to report how the pod ended.

use std::io;
use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, PodSpec};
use linux::cgroup::Cgroup;

use super::limits;

/// A cgroup can be removed only after the kernel has finished the exit of its killed processes.
const CGROUP_REMOVE_INTERVAL: Duration = Duration::from_millis(20);
const MAX_REMOVALS: u32 = 100;

/// The cgroup of a pod, below the cgroup of all pods.
pub fn pod_cgroup(pods: &Path, uid: &str) -> Cgroup {
    Cgroup::at(pods).child(&format!("pod-{uid}"))
}

/// Creates the pod's cgroup. If an earlier sandbox of the pod left it, kills and removes the containers in it.
pub fn create_pod_cgroup(cgroup: &Cgroup, spec: &PodSpec) -> io::Result<()> {
    cgroup.create()?;
    cgroup.set_limits(&limits::pod_limits(spec))?;
    // Enable all controllers of the pod for its containers.
    cgroup.enable_controllers(&cgroup.controllers())?;
    for old in cgroup.children() {
        old.kill();
        let _ = old.remove();
    }
    Ok(())
}

/// Creates the cgroup of one attempt of a container.
pub async fn create_container_cgroup(
    pod: &Cgroup,
    container: &Container,
    attempt: u32,
) -> io::Result<Cgroup> {
    let cgroup = pod.child(&format!("{}-{attempt}", container.name));
    // Remove a leftover of a killed sandbox, so that the counters start at zero. Its processes may still be exiting.
    if cgroup.path().exists() {
        remove_cgroup(&cgroup).await;
    }
    cgroup.create()?;
    let limited = cgroup.set_limits(&limits::container_limits(container));
    if limited.is_err() {
        let _ = cgroup.remove();
    }
    limited.map(|()| cgroup)
}

/// Kills all processes in a cgroup and removes it.
pub async fn remove_cgroup(cgroup: &Cgroup) {
    cgroup.kill();
    for _ in 0..MAX_REMOVALS {
        if cgroup.remove().is_ok() {
            return;
        }
        tokio::time::sleep(CGROUP_REMOVE_INTERVAL).await;
    }
    tracing::warn!(cgroup = %cgroup.path().display(), "cannot remove cgroup");
}
