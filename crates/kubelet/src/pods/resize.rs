//! Resources of a pod that are changed while it runs (`kubectl patch --subresource=resize`): taken when the node has room
//! for them. Until then the pod goes on with those that it has, and its status says why.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod, ResourceRequirements};
use pod_protocol::Problem;

/// The change can't be had on this node, ever.
const INFEASIBLE: &str = "Infeasible";
/// It can't be had as long as others use the node as they do.
const DEFERRED: &str = "Deferred";

/// The pod as it can be, and why it can't be all that it wants. `has` is the pod with the resources that it was given last;
/// `room` says whether a pod fits beside others (`true`) or at least alone.
pub(super) fn settle(
    wanted: &Arc<Pod>,
    has: &Pod,
    room: impl Fn(&Pod, bool) -> Result<(), Problem>,
) -> (Arc<Pod>, Option<Problem>) {
    if resources(wanted).eq(resources(has)) {
        return (Arc::clone(wanted), None);
    }
    let refused = |reason: &str, problem: Problem| Problem {
        reason: reason.to_owned(),
        message: problem.message,
    };
    let problem = match (room(wanted, false), room(wanted, true)) {
        (Err(problem), _) => refused(INFEASIBLE, problem),
        (_, Err(problem)) => refused(DEFERRED, problem),
        _ => return (Arc::clone(wanted), None),
    };
    let mut kept = Pod::clone(wanted);
    keep(&mut kept, has);
    (Arc::new(kept), Some(problem))
}

/// The pod with the resources that its status says it was given: those of a change that is still waiting are not.
pub(super) fn as_given(pod: &Pod) -> Pod {
    let mut given = pod.clone();
    let status = pod.status.as_ref();
    let of = |list: Option<&Vec<ContainerStatus>>, container: &mut Container| {
        let statuses = list.map(Vec::as_slice).unwrap_or_default();
        let own = statuses.iter().find(|own| own.name == container.name);
        if let Some(resources) = own.and_then(|own| own.resources.clone()) {
            container.resources = Some(resources);
        }
    };
    if let (Some(spec), Some(status)) = (&mut given.spec, status) {
        for container in &mut spec.containers {
            of(status.container_statuses.as_ref(), container);
        }
        for container in spec.init_containers.iter_mut().flatten() {
            of(status.init_container_statuses.as_ref(), container);
        }
    }
    given
}

fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.spec.iter().flat_map(|spec| {
        let init = spec.init_containers.iter().flatten();
        init.chain(&spec.containers)
    })
}

/// All that can be changed, in order; none and an empty one are the same.
fn resources(pod: &Pod) -> impl Iterator<Item = ResourceRequirements> + '_ {
    let of_pod = pod.spec.as_ref().and_then(|spec| spec.resources.clone());
    let own = containers(pod).map(|container| container.resources.clone().unwrap_or_default());
    own.chain([of_pod.unwrap_or_default()])
}

fn keep(pod: &mut Pod, has: &Pod) {
    let Some(spec) = &mut pod.spec else { return };
    let given = |name: &str| {
        let found = containers(has).find(|container| container.name == name);
        found.and_then(|container| container.resources.clone())
    };
    let init = spec.init_containers.iter_mut().flatten();
    for container in init.chain(&mut spec.containers) {
        container.resources = given(&container.name);
    }
    spec.resources = has.spec.as_ref().and_then(|spec| spec.resources.clone());
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

    fn no(message: &str) -> Result<(), Problem> {
        Err(Problem {
            reason: "OutOfcpu".to_owned(),
            message: message.to_owned(),
        })
    }

    #[test]
    fn what_fits_is_taken() {
        let (settled, problem) = settle(&pod("2"), &pod("1"), |_, _| Ok(()));
        assert_eq!((cpu(&settled).as_str(), problem), ("2", None));
        // Nothing changed: nothing is asked.
        let (_, problem) = settle(&pod("1"), &pod("1"), |_, _| no("full"));
        assert_eq!(problem, None);
    }

    #[test]
    fn what_does_not_fit_waits() {
        let beside = |_: &Pod, beside: bool| if beside { no("in use") } else { Ok(()) };
        let (settled, problem) = settle(&pod("2"), &pod("1"), beside);
        assert_eq!(cpu(&settled), "1");
        assert_eq!(settled.metadata.labels.as_ref().unwrap()["cpu"], "2");
        let problem = problem.unwrap();
        assert_eq!(
            (problem.reason.as_str(), problem.message.as_str()),
            ("Deferred", "in use")
        );
        let (_, problem) = settle(&pod("9"), &pod("1"), |_, _| no("too much"));
        assert_eq!(problem.unwrap().reason, "Infeasible");
    }

    #[test]
    fn the_status_remembers_what_was_given() {
        let mut waiting = Pod::clone(&pod("2"));
        waiting.status = serde_json::from_value(json!({"containerStatuses": [
            {"name": "a", "image": "", "imageID": "", "ready": true, "restartCount": 0,
             "resources": {"requests": {"cpu": "1"}}}]}))
        .unwrap();
        assert_eq!(cpu(&as_given(&waiting)), "1");
        assert_eq!(cpu(&as_given(&pod("3"))), "3");
    }
}
