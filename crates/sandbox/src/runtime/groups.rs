//! The control groups of a pod, where we may make some: one for the pod, and in it one for each run of a container.
//!
//! The sandbox itself stays outside of them. What it needs isn't the pod's, and it must live to tell how the pod ended.

use std::io;
use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, PodSpec};
use linux::cgroup::Group;

use super::limits;

/// Killed processes leave their group when the kernel has taken them apart.
const REMOVE_EVERY: Duration = Duration::from_millis(20);
const REMOVE_AT_MOST: u32 = 100;

/// The group of a pod, in the directory where those of all pods are.
pub fn place(pods: &Path, uid: &str) -> Group {
    Group::at(pods).below(&format!("pod-{uid}"))
}

/// Makes the pod's group, or finds that of a sandbox before us, with what its containers have left.
pub fn make_pod(group: &Group, spec: &PodSpec) -> io::Result<()> {
    group.make()?;
    group.limit(&limits::of_pod(spec))?;
    // What was handed on to pods is handed on to containers.
    group.hand_on(&group.controllers())?;
    for old in group.groups() {
        old.kill();
        let _ = old.remove();
    }
    Ok(())
}

/// Makes the group of one run of a container.
pub async fn make_container(pod: &Group, container: &Container, attempt: u32) -> io::Result<Group> {
    let group = pod.below(&format!("{}-{attempt}", container.name));
    // A new one counts from nothing. That of a sandbox which was killed may still have processes that are on their way out.
    if group.path().exists() {
        end(&group).await;
    }
    group.make()?;
    let limited = group.limit(&limits::of_container(container));
    if limited.is_err() {
        let _ = group.remove();
    }
    limited.map(|()| group)
}

/// Ends what is left in a group, and removes it.
pub async fn end(group: &Group) {
    group.kill();
    for _ in 0..REMOVE_AT_MOST {
        if group.remove().is_ok() {
            return;
        }
        tokio::time::sleep(REMOVE_EVERY).await;
    }
    tracing::warn!(group = %group.path().display(), "cannot remove a control group");
}
