//! Finds pods that can never run: their image cannot be pulled, their containers cannot be created, or no node can take them. Pure.
//!
//! Only pods of applied objects count, and only while no pod runs that will end: it may free resources, and its work is not thrown
//! away. A pod of a Deployment or the like does not count while another pod of it runs.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::{ContainerStateWaiting, Pod};
use kubelet_api::PodPhase;
use tokio::time::Instant;

use super::state::{WorkloadState, phase};
use crate::commands::run::object_ref::ObjectRef;

/// Reasons of containers that wait for an image.
const IMAGE_REASONS: [&str; 6] = [
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
];
/// Reasons of containers that cannot be created, mostly because a ConfigMap or Secret is missing.
const CREATE_REASONS: [&str; 2] = ["CreateContainerConfigError", "CreateContainerError"];
/// Reasons of containers between two attempts.
const STARTING_REASONS: [&str; 2] = ["ContainerCreating", "PodInitializing"];

/// Why a pod cannot run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Obstacle {
    /// A container cannot start. Between two attempts it looks like one that starts.
    pub is_of_container: bool,
    pub text: String,
}

/// How long pods have been unable to run.
#[derive(Debug, Default)]
pub struct StuckPods(BTreeMap<ObjectRef, (Instant, Obstacle)>);

impl StuckPods {
    /// Updates the pods that cannot run.
    pub fn update(&mut self, state: &WorkloadState, now: Instant) {
        let mut stuck = find(state, &self.0);
        for (pod, (_, obstacle)) in &self.0 {
            let pod_now = state.pods.get(&pod.namespace, &pod.name);
            if obstacle.is_of_container && pod_now.is_some_and(is_starting) {
                stuck.entry(pod.clone()).or_insert(obstacle.clone());
            }
        }
        self.0.retain(|pod, _| stuck.contains_key(pod));
        for (pod, obstacle) in stuck {
            let (_, old) = self.0.entry(pod).or_insert((now, obstacle.clone()));
            *old = obstacle;
        }
    }

    /// The pods that have been unable to run for this long.
    pub fn longer_than(&self, time: Duration, now: Instant) -> Vec<(&ObjectRef, &Obstacle)> {
        self.0
            .iter()
            .filter(|(_, (since, _))| now.duration_since(*since) >= time)
            .map(|(pod, (_, obstacle))| (pod, obstacle))
            .collect()
    }
}

/// The pods that cannot run now. `known` could not run before.
fn find(
    state: &WorkloadState,
    known: &BTreeMap<ObjectRef, (Instant, Obstacle)>,
) -> BTreeMap<ObjectRef, Obstacle> {
    let runs = |pod: &Pod| phase(pod) == PodPhase::Running;
    let running: BTreeSet<ObjectRef> = state
        .pods
        .iter()
        .filter(|pod| runs(pod))
        .map(ObjectRef::controller_of)
        .collect();
    // Pods that use resources now, and will end and free them.
    let frees_resources = state.pods.iter().any(|pod| {
        // Between two attempts, a pod that cannot run looks like one that starts.
        let is_retrying = || {
            let known = known.get(&ObjectRef::of_pod(pod));
            is_starting(pod) && known.is_some_and(|(_, obstacle)| obstacle.is_of_container)
        };
        !phase(pod).is_terminal()
            && is_bound(pod)
            && container_obstacle(pod).is_none()
            && !is_retrying()
            && ObjectRef::controller_of(pod).ends()
    });
    let mut stuck = BTreeMap::new();
    for pod in state.pods.iter() {
        let controller = ObjectRef::controller_of(pod);
        let works = !controller.ends() && running.contains(&controller);
        if works || !state.applied.contains(&controller) {
            continue;
        }
        let obstacle = container_obstacle(pod).or_else(|| unschedulable(pod));
        if let Some(obstacle) = obstacle.filter(|_| !frees_resources) {
            stuck.insert(ObjectRef::of_pod(pod), obstacle);
        }
    }
    stuck
}

fn is_bound(pod: &Pod) -> bool {
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
    node.is_some_and(|node| !node.is_empty())
}

fn container_obstacle(pod: &Pod) -> Option<Obstacle> {
    let (container, waiting) = waiting_containers(pod).find(|(_, waiting)| {
        let reason = waiting.reason.as_deref().unwrap_or_default();
        IMAGE_REASONS.contains(&reason) || CREATE_REASONS.contains(&reason)
    })?;
    let reason = waiting.reason.as_deref().unwrap_or_default();
    let message = waiting.message.as_deref().unwrap_or(reason);
    Some(Obstacle {
        is_of_container: true,
        text: match CREATE_REASONS.contains(&reason) {
            true => format!("container {container} cannot be created: {message}"),
            false => format!("the image of container {container} cannot be pulled: {message}"),
        },
    })
}

/// Whether a container waits, but for nothing in particular.
fn is_starting(pod: &Pod) -> bool {
    !phase(pod).is_terminal()
        && waiting_containers(pod).any(|(_, waiting)| {
            let reason = waiting.reason.as_deref().unwrap_or_default();
            STARTING_REASONS.contains(&reason)
        })
}

fn waiting_containers(pod: &Pod) -> impl Iterator<Item = (&str, &ContainerStateWaiting)> {
    let status = pod.status.as_ref();
    let all = status.into_iter().flat_map(|status| {
        [&status.init_container_statuses, &status.container_statuses]
            .into_iter()
            .flatten()
            .flatten()
    });
    all.filter_map(|status| {
        let waiting = status.state.as_ref()?.waiting.as_ref()?;
        Some((status.name.as_str(), waiting))
    })
}

fn unschedulable(pod: &Pod) -> Option<Obstacle> {
    let mut conditions = pod.status.as_ref()?.conditions.iter().flatten();
    let condition = conditions.find(|condition| {
        condition.type_ == "PodScheduled"
            && condition.status == "False"
            && condition.reason.as_deref() == Some("Unschedulable")
    })?;
    Some(Obstacle {
        is_of_container: false,
        text: format!(
            "no node can take it: {}",
            condition.message.clone().unwrap_or_default()
        ),
    })
}

#[cfg(test)]
mod tests {
    use kube::runtime::watcher::Event;
    use serde_json::{Value, json};

    use super::*;

    const UNSCHEDULABLE: &str = r#"{"phase": "Pending", "conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}]}"#;

    fn state() -> WorkloadState {
        WorkloadState::new(vec![
            ObjectRef::new("Pod", "default", "one"),
            ObjectRef::new("Job", "default", "train"),
            ObjectRef::new("DaemonSet", "default", "agent"),
        ])
    }

    fn apply(state: &mut WorkloadState, name: &str, owner: &str, node: &str, status: Value) {
        let owners = match owner.split_once('/') {
            Some((kind, owner)) => {
                json!([{"kind": kind, "name": owner, "controller": true, "apiVersion": "", "uid": ""}])
            }
            None => json!([]),
        };
        let pod = json!({"metadata": {"name": name, "namespace": "default", "ownerReferences": owners},
            "spec": {"nodeName": node, "containers": []}, "status": status});
        state.handle_pod(Event::Apply(serde_json::from_value(pod).unwrap()));
    }

    fn waiting(reason: &str) -> Value {
        json!({"phase": "Pending", "containerStatuses": [{"name": "main", "ready": false, "restartCount": 0,
            "image": "", "imageID": "", "state": {"waiting": {"reason": reason}}}]})
    }

    fn unschedulable_status() -> Value {
        serde_json::from_str(UNSCHEDULABLE).unwrap()
    }

    fn stuck(state: &WorkloadState) -> Vec<String> {
        find(state, &BTreeMap::new())
            .iter()
            .map(|(pod, obstacle)| format!("{pod}: {}", obstacle.text))
            .collect()
    }

    #[test]
    fn pod_without_image_is_stuck_during_retries_too() {
        let (mut state, mut pods) = (state(), StuckPods::default());
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let limit = Duration::from_secs(10);
        for (second, reason) in [
            (0, "ContainerCreating"),
            (5, "ErrImagePull"),
            (6, "ContainerCreating"),
            (7, "ImagePullBackOff"),
        ] {
            apply(&mut state, "one", "", "node1", waiting(reason));
            pods.update(&state, after(second));
        }
        assert_eq!(pods.longer_than(limit, after(14)), []);
        let stuck = pods.longer_than(limit, after(15));
        assert_eq!(stuck.len(), 1);
        assert!(stuck[0].1.is_of_container);
        apply(&mut state, "one", "", "node1", json!({"phase": "Running"}));
        pods.update(&state, after(16));
        assert_eq!(pods.longer_than(Duration::ZERO, after(99)), []);
    }

    #[test]
    fn pods_of_a_job_may_wait_for_each_other() {
        let mut state = state();
        let running = json!({"phase": "Running"});
        apply(&mut state, "train-1", "Job/train", "node1", running.clone());
        apply(
            &mut state,
            "train-2",
            "Job/train",
            "",
            unschedulable_status(),
        );
        assert_eq!(stuck(&state), [""; 0]);
        // A pod that never ends frees nothing.
        apply(
            &mut state,
            "train-1",
            "Job/train",
            "node1",
            json!({"phase": "Succeeded"}),
        );
        apply(&mut state, "agent-1", "DaemonSet/agent", "node1", running);
        assert_eq!(
            stuck(&state),
            ["pod/train-2: no node can take it: 0/2 nodes"]
        );
    }

    #[test]
    fn missing_config_map_is_an_obstacle() {
        let mut state = state();
        let status = waiting("CreateContainerConfigError");
        apply(&mut state, "one", "", "node1", status);
        assert_eq!(
            stuck(&state),
            ["pod/one: container main cannot be created: CreateContainerConfigError"]
        );
    }

    #[test]
    fn missing_image_does_not_end_other_work() {
        let mut state = state();
        apply(&mut state, "one", "", "node1", waiting("ImagePullBackOff"));
        let running = json!({"phase": "Running"});
        apply(&mut state, "train-1", "Job/train", "node1", running);
        assert_eq!(stuck(&state), [""; 0]);
        let succeeded = json!({"phase": "Succeeded"});
        apply(&mut state, "train-1", "Job/train", "node1", succeeded);
        assert_eq!(stuck(&state).len(), 1);
    }

    #[test]
    fn pod_that_waits_for_its_image_frees_nothing() {
        let mut state = state();
        apply(&mut state, "one", "", "node1", waiting("ImagePullBackOff"));
        apply(
            &mut state,
            "train-2",
            "Job/train",
            "",
            unschedulable_status(),
        );
        assert_eq!(stuck(&state).len(), 2);
    }

    #[test]
    fn controller_with_a_running_pod_works() {
        let mut state = state();
        let owner = "DaemonSet/agent";
        apply(&mut state, "agent-1", owner, "", unschedulable_status());
        assert_eq!(stuck(&state).len(), 1);
        apply(
            &mut state,
            "agent-2",
            owner,
            "node1",
            json!({"phase": "Running"}),
        );
        assert_eq!(stuck(&state), [""; 0]);
    }

    #[test]
    fn pods_of_other_objects_do_not_count() {
        let mut state = state();
        apply(&mut state, "other", "", "", unschedulable_status());
        apply(
            &mut state,
            "cron-1",
            "Job/cron",
            "node1",
            waiting("ErrImagePull"),
        );
        assert_eq!(stuck(&state), [""; 0]);
    }
}
