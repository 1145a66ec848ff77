//! In-place resize of pods (`kubectl patch --subresource=resize`). A resize is applied when the node has the resources. Until
//! then the pod keeps its allocated resources, and its condition `PodResizePending` says why.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod, ResourceRequirements};
use pod_protocol::Problem;

/// The resources exceed those of the node.
const INFEASIBLE: &str = "Infeasible";
/// Other pods use the resources.
const DEFERRED: &str = "Deferred";

/// The pods with which a resized pod has to share the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Neighbors {
    /// None: does it fit at all?
    None,
    /// The pods that currently use the node.
    Current,
}

/// The pod with the resources that it gets, and why these are not the ones of `wanted`. `allocated` is the pod with its current
/// resources; `fits` checks a pod against the node's resources.
pub(super) fn allocate(
    wanted: &Arc<Pod>,
    allocated: &Pod,
    fits: impl Fn(&Pod, Neighbors) -> Result<(), String>,
) -> (Arc<Pod>, Option<Problem>) {
    if resources(wanted).eq(resources(allocated)) {
        return (Arc::clone(wanted), None);
    }
    let alone = fits(wanted, Neighbors::None);
    let (reason, message) = match (alone, fits(wanted, Neighbors::Current)) {
        (Err(message), _) => (INFEASIBLE, message),
        (_, Err(message)) => (DEFERRED, message),
        _ => return (Arc::clone(wanted), None),
    };
    let mut kept = Pod::clone(wanted);
    keep_resources(&mut kept, allocated);
    let reason = reason.to_owned();
    (Arc::new(kept), Some(Problem { reason, message }))
}

/// The pod with the resources in its status, which are the allocated ones: a pending resize is only in the spec.
pub(super) fn with_allocated_resources(pod: &Pod) -> Pod {
    let mut allocated = pod.clone();
    let status = pod.status.as_ref();
    let set = |list: Option<&Vec<ContainerStatus>>, container: &mut Container| {
        let statuses = list.map(Vec::as_slice).unwrap_or_default();
        let status = statuses.iter().find(|status| status.name == container.name);
        if let Some(resources) = status.and_then(|status| status.resources.clone()) {
            container.resources = Some(resources);
        }
    };
    if let (Some(spec), Some(status)) = (&mut allocated.spec, status) {
        for container in &mut spec.containers {
            set(status.container_statuses.as_ref(), container);
        }
        for container in spec.init_containers.iter_mut().flatten() {
            set(status.init_container_statuses.as_ref(), container);
        }
    }
    allocated
}

fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.spec.iter().flat_map(|spec| {
        let init = spec.init_containers.iter().flatten();
        init.chain(&spec.containers)
    })
}

/// The resources of all containers and of the pod, in order. Absent and empty ones are equal.
fn resources(pod: &Pod) -> impl Iterator<Item = ResourceRequirements> + '_ {
    let of_pod = pod.spec.as_ref().and_then(|spec| spec.resources.clone());
    let own = containers(pod).map(|container| container.resources.clone().unwrap_or_default());
    own.chain([of_pod.unwrap_or_default()])
}

fn keep_resources(pod: &mut Pod, allocated: &Pod) {
    let Some(spec) = &mut pod.spec else { return };
    let resources = |name: &str| {
        let found = containers(allocated).find(|container| container.name == name);
        found.and_then(|container| container.resources.clone())
    };
    let init = spec.init_containers.iter_mut().flatten();
    for container in init.chain(&mut spec.containers) {
        container.resources = resources(&container.name);
    }
    spec.resources = allocated
        .spec
        .as_ref()
        .and_then(|spec| spec.resources.clone());
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(cpu: &str) -> Arc<Pod> {
        let resources = json!({"requests": {"cpu": cpu}});
        let pod = json!({
            "metadata": {"name": "p", "labels": {"cpu": cpu}},
            "spec": {"containers": [{"name": "a", "resources": resources}, {"name": "b"}]},
        });
        Arc::new(serde_json::from_value(pod).unwrap())
    }

    fn cpu(pod: &Pod) -> String {
        let own = pod.spec.as_ref().unwrap().containers[0].resources.clone();
        own.unwrap().requests.unwrap()["cpu"].0.clone()
    }

    fn no(message: &str) -> Result<(), String> {
        Err(message.to_owned())
    }

    #[test]
    fn fitting_resize_is_applied() {
        let (resized, problem) = allocate(&pod("2"), &pod("1"), |_, _| Ok(()));
        assert_eq!((cpu(&resized).as_str(), problem), ("2", None));
        // Without a change nothing is checked.
        let (_, problem) = allocate(&pod("1"), &pod("1"), |_, _| no("full"));
        assert_eq!(problem, None);
    }

    #[test]
    fn resize_that_does_not_fit_is_pending() {
        let in_use = |_: &Pod, neighbors| match neighbors {
            Neighbors::Current => no("in use"),
            Neighbors::None => Ok(()),
        };
        let (resized, problem) = allocate(&pod("2"), &pod("1"), in_use);
        assert_eq!(cpu(&resized), "1");
        assert_eq!(resized.metadata.labels.as_ref().unwrap()["cpu"], "2");
        let problem = problem.unwrap();
        assert_eq!(
            (problem.reason.as_str(), problem.message.as_str()),
            ("Deferred", "in use")
        );
        let (_, problem) = allocate(&pod("9"), &pod("1"), |_, _| no("too much"));
        assert_eq!(problem.unwrap().reason, "Infeasible");
    }

    #[test]
    fn allocated_resources_are_read_from_status() {
        let mut pending = Pod::clone(&pod("2"));
        pending.status = serde_json::from_value(json!({"containerStatuses": [
            {"name": "a", "image": "", "imageID": "", "ready": true, "restartCount": 0,
             "resources": {"requests": {"cpu": "1"}}}]}))
        .unwrap();
        assert_eq!(cpu(&with_allocated_resources(&pending)), "1");
        assert_eq!(cpu(&with_allocated_resources(&pod("3"))), "3");
    }
}
