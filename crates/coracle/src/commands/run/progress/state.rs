//! The state of the applied objects, and lines about its changes. Pure: fed with events of watches.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::runtime::watcher::Event;
use kubelet_api::PodPhase;

use super::failure::PodFailure;
use super::tracked::{ObjectChange, Tracked};
use crate::commands::run::object_ref::ObjectRef;

/// The result of a Job or a Pod that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectResult {
    pub succeeded: bool,
    pub duration: Option<Duration>,
    /// `BackoffLimitExceeded: …`; may be empty.
    pub reason: String,
}

/// Ready and desired pods of a Deployment, StatefulSet or DaemonSet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Replicas {
    pub ready: i32,
    pub desired: i32,
}

/// The state of a workload of manifests.
#[derive(Debug, Default)]
pub struct WorkloadState {
    /// The objects of the manifests.
    pub applied: BTreeSet<ObjectRef>,
    pub pods: Tracked<Pod>,
    pub jobs: Tracked<Job>,
    pub replicas: BTreeMap<ObjectRef, Replicas>,
    /// Applied Jobs and Pods that have ended.
    pub results: BTreeMap<ObjectRef, ObjectResult>,
    /// The newest failure below each applied Job or Pod.
    pub failures: BTreeMap<ObjectRef, PodFailure>,
}

impl WorkloadState {
    /// Without any status.
    pub fn new(applied: Vec<ObjectRef>) -> Self {
        Self {
            applied: applied.into_iter().collect(),
            ..Self::default()
        }
    }

    /// The namespaces in which the workload runs pods.
    pub fn namespaces(&self) -> BTreeSet<String> {
        let of_object = |object: &ObjectRef| match object.kind.as_str() {
            "Namespace" => object.name.clone(),
            _ => object.namespace.clone(),
        };
        let mut namespaces: BTreeSet<String> = self.applied.iter().map(of_object).collect();
        namespaces.remove("");
        namespaces
    }

    /// Whether the workload waits for applied objects, or for nothing because none of them ends.
    pub fn has_ending_objects(&self) -> bool {
        self.applied.iter().any(ObjectRef::ends)
    }

    /// Whether an applied object runs pods until it is deleted.
    pub fn has_endless_objects(&self) -> bool {
        self.applied.iter().any(ObjectRef::never_ends)
    }

    /// Whether all applied Jobs and Pods have ended.
    pub fn is_done(&self) -> bool {
        let mut ending = self.applied.iter().filter(|object| object.ends());
        ending.all(|object| self.results.contains_key(object))
    }

    /// Whether an applied Job or Pod has failed.
    pub fn has_failed(&self) -> bool {
        self.results.values().any(|result| !result.succeeded)
    }

    /// The number of pods that have not ended.
    pub fn running_pods(&self) -> usize {
        self.pods
            .iter()
            .filter(|pod| !phase(pod).is_terminal())
            .count()
    }

    /// Applies an event of the watch of pods.
    pub fn handle_pod(&mut self, event: Event<Pod>) -> Vec<ObjectChange<Pod>> {
        let is_list_complete = matches!(event, Event::InitDone);
        let changes = self.pods.handle(event);
        for change in &changes {
            let (ObjectChange::Applied(pod) | ObjectChange::Deleted(pod)) = change;
            let controller = ObjectRef::controller_of(pod);
            if let Some(failure) = PodFailure::of(pod)
                && controller.ends()
                && self.applied.contains(&controller)
            {
                let old = self.failures.get(&controller);
                if old.is_none_or(|old| old.time <= failure.time) {
                    self.failures.insert(controller, failure);
                }
            }
            let result = match change {
                ObjectChange::Applied(pod) => pod_result(pod),
                ObjectChange::Deleted(pod) => pod_result(pod).or_else(|| Some(deleted())),
            };
            self.insert_result(ObjectRef::of_pod(pod), result);
        }
        if is_list_complete {
            self.fail_missing("Pod");
        }
        changes
    }

    /// Applies an event of the watch of Jobs.
    pub fn handle_job(&mut self, event: Event<Job>) {
        let is_list_complete = matches!(event, Event::InitDone);
        for change in self.jobs.handle(event) {
            let (ObjectChange::Applied(job) | ObjectChange::Deleted(job)) = &change;
            let result = match &change {
                ObjectChange::Applied(job) => job_result(job),
                ObjectChange::Deleted(job) => job_result(job).or_else(|| Some(deleted())),
            };
            let namespace = job.namespace().unwrap_or_default();
            self.insert_result(ObjectRef::new("Job", &namespace, &job.name_any()), result);
        }
        if is_list_complete {
            self.fail_missing("Job");
        }
    }

    /// The first result counts: an object may be deleted after its end.
    fn insert_result(&mut self, object: ObjectRef, result: Option<ObjectResult>) {
        if let Some(result) = result
            && self.applied.contains(&object)
        {
            self.results.entry(object).or_insert(result);
        }
    }

    /// Applied objects that a complete list does not contain were deleted before it was received.
    fn fail_missing(&mut self, kind: &str) {
        let exists = |object: &ObjectRef| match kind {
            "Pod" => self.pods.get(&object.namespace, &object.name).is_some(),
            _ => self.jobs.get(&object.namespace, &object.name).is_some(),
        };
        let of_kind = self.applied.iter().filter(|object| object.kind == kind);
        let missing: Vec<ObjectRef> = of_kind.filter(|object| !exists(object)).cloned().collect();
        for object in missing {
            self.insert_result(object, Some(deleted()));
        }
    }
}

fn deleted() -> ObjectResult {
    ObjectResult {
        succeeded: false,
        duration: None,
        reason: "it was deleted".to_owned(),
    }
}

/// The phase of a pod.
pub fn phase(pod: &Pod) -> PodPhase {
    PodPhase::of(pod.status.as_ref())
}

fn pod_result(pod: &Pod) -> Option<ObjectResult> {
    phase(pod).is_terminal().then(|| ObjectResult {
        succeeded: phase(pod) == PodPhase::Succeeded,
        duration: pod_duration(pod, None),
        reason: String::new(),
    })
}

fn job_result(job: &Job) -> Option<ObjectResult> {
    let status = job.status.as_ref()?;
    let mut conditions = status.conditions.iter().flatten();
    let end = conditions.find(|condition| {
        condition.status == "True" && matches!(condition.type_.as_str(), "Complete" | "Failed")
    })?;
    let succeeded = end.type_ == "Complete";
    let reasons = [end.reason.clone(), end.message.clone()];
    let reasons: Vec<String> = reasons.into_iter().flatten().collect();
    let end_time = status.completion_time.as_ref();
    let end_time = end_time.or(end.last_transition_time.as_ref());
    Some(ObjectResult {
        succeeded,
        duration: between(
            status.start_time.as_ref().map(|time| time.0),
            end_time.map(|time| time.0),
        ),
        reason: if succeeded {
            String::new()
        } else {
            reasons.join(": ")
        },
    })
}

/// How long a pod has run: until its last container ended, or `now`.
pub fn pod_duration(pod: &Pod, now: Option<Timestamp>) -> Option<Duration> {
    let status = pod.status.as_ref()?;
    let finished = |state: &Option<k8s_openapi::api::core::v1::ContainerState>| {
        let terminated = state.as_ref()?.terminated.as_ref()?;
        terminated.finished_at.as_ref().map(|time| time.0)
    };
    let containers = status.container_statuses.iter().flatten();
    let end = containers
        .filter_map(|status| finished(&status.state))
        .max();
    between(status.start_time.as_ref().map(|time| time.0), now.or(end))
}

/// How long a Job has run until `now`.
pub fn job_duration(job: &Job, now: Timestamp) -> Option<Duration> {
    let start = job.status.as_ref()?.start_time.as_ref()?;
    between(Some(start.0), Some(now))
}

fn between(start: Option<Timestamp>, end: Option<Timestamp>) -> Option<Duration> {
    Duration::try_from(end?.duration_since(start?)).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn state() -> WorkloadState {
        WorkloadState::new(vec![
            ObjectRef::new("Pod", "default", "one"),
            ObjectRef::new("Job", "default", "train"),
            ObjectRef::new("ConfigMap", "other", "c"),
            ObjectRef::new("Namespace", "", "third"),
        ])
    }

    fn pod(name: &str, status: Value) -> Pod {
        serde_json::from_value(
            json!({"metadata": {"name": name, "namespace": "default"}, "status": status}),
        )
        .unwrap()
    }

    fn job(condition: &str) -> Job {
        serde_json::from_value(json!({
            "metadata": {"name": "train", "namespace": "default"},
            "status": {"startTime": "2026-01-01T00:00:00Z", "conditions": [
                {"type": condition, "status": "True", "reason": "BackoffLimitExceeded",
                 "lastTransitionTime": "2026-01-01T00:00:12Z"}]}}))
        .unwrap()
    }

    #[test]
    fn workload_is_done_when_all_jobs_and_pods_have_ended() {
        let mut state = state();
        assert!(!state.is_done() && state.has_ending_objects() && !state.has_endless_objects());
        let namespaces: Vec<_> = state.namespaces().into_iter().collect();
        assert_eq!(namespaces, ["default", "other", "third"]);
        state.handle_pod(Event::Apply(pod("one", json!({"phase": "Running"}))));
        state.handle_pod(Event::Apply(pod("unrelated", json!({"phase": "Failed"}))));
        assert_eq!(state.running_pods(), 1);
        state.handle_pod(Event::Apply(pod("one", json!({"phase": "Succeeded"}))));
        // Deleted after its end.
        state.handle_pod(Event::Delete(pod("one", json!({"phase": "Succeeded"}))));
        assert!(!state.is_done());
        state.handle_job(Event::Apply(job("Complete")));
        assert!(state.is_done() && !state.has_failed());
    }

    #[test]
    fn failed_job_has_a_reason_and_duration() {
        let mut state = state();
        state.handle_job(Event::Apply(job("Failed")));
        let result = &state.results[&ObjectRef::new("Job", "default", "train")];
        assert_eq!(result.duration, Some(Duration::from_secs(12)));
        assert_eq!(result.reason, "BackoffLimitExceeded");
        assert!(state.has_failed());
    }

    #[test]
    fn objects_deleted_before_their_end_have_failed() {
        let mut state = state();
        state.handle_pod(Event::Apply(pod("one", json!({"phase": "Running"}))));
        state.handle_pod(Event::Delete(pod("one", json!({"phase": "Running"}))));
        state.handle_job(Event::Init);
        state.handle_job(Event::InitDone);
        assert!(state.is_done() && state.has_failed());
        assert_eq!(state.results.len(), 2);
    }
}
