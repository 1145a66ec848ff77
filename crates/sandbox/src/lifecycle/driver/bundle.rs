//! Applies bundles to the records: container specs, active deadline, and the statuses from an earlier sandbox.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, PodSpec};
use pod_protocol::restart::{RestartPolicy, is_sidecar};
use pod_protocol::{Bundle, PodFailure};
use tokio::time::Instant;

use super::super::clock::{instant_of, seconds};
use super::super::container_record::{ContainerRecord, ContainerType, WaitingState, as_container};
use super::super::event_log::EventType;
use super::LifecycleDriver;
use super::setup::SetupState;
use crate::container_runtime::ContainerRuntime;

impl<R: ContainerRuntime> LifecycleDriver<R> {
    pub(super) fn apply_bundle(&mut self, bundle: Bundle) {
        // After every state that the driver publishes, the kubelet may send a bundle in which only the pod's status differs.
        let is_changed =
            self.bundle.pod.spec != bundle.pod.spec || self.bundle.volumes != bundle.volumes;
        self.bundle = bundle;
        self.update_records();
        if let SetupState::Waiting { retry_at, .. } = &mut self.setup
            && is_changed
        {
            // The change may have removed the cause of the failure: retry at once.
            *retry_at = Instant::now();
        }
    }

    /// Updates the records from the bundle.
    pub(super) fn update_records(&mut self) {
        let status = self.bundle.pod.status.as_ref();
        self.active_since = status
            .and_then(|status| status.start_time.as_ref())
            .map_or(self.created_at, |time| instant_of(time.0));
        let spec = self.bundle.pod.spec.clone().unwrap_or_default();
        for (container_type, container, target) in containers(&spec) {
            let name = container.name.clone();
            let existing = self.records.iter_mut().find(|record| record.name() == name);
            let Some(record) = existing else {
                self.records
                    .push(ContainerRecord::new(container_type, container, target));
                continue;
            };
            if record.spec.image != container.image {
                record.back_off.reset();
                record.pull_back_off.reset();
                record.pull_failure = None;
                record.retry_at = None;
            }
            record.spec = container;
            let problem = self
                .bundle
                .containers
                .get(&name)
                .and_then(|input| input.problem.clone());
            if record.waits_for_bundle {
                record.waits_for_bundle = problem.is_some();
                record.waiting = problem.map(WaitingState::Problem).or(record.waiting.take());
            }
        }
    }

    /// Restores the records from the statuses that an earlier sandbox of this pod reported.
    pub(super) fn restore_records(&mut self, now: Instant) {
        for status in &self.bundle.previous_statuses {
            if let Some(record) = self
                .records
                .iter_mut()
                .find(|record| record.name() == status.name)
            {
                record.restore(status, now);
            }
        }
        let policy = self.restart_policy();
        let regular = || {
            self.records
                .iter()
                .filter(|record| record.container_type == ContainerType::Regular)
        };
        let any_ran = self.records.iter().any(|record| record.has_run);
        let is_finished = regular().any(|record| record.has_run)
            && !regular().any(|record| record.should_start(policy));
        if (policy == RestartPolicy::Never && any_ran) || is_finished {
            self.begin_stop(Duration::ZERO);
        } else if any_ran {
            self.events.record(
                None,
                EventType::Normal,
                "SandboxChanged",
                "Pod sandbox changed, it will be killed and re-created.",
            );
        }
    }

    /// Fails the pod if activeDeadlineSeconds have passed; otherwise returns the deadline.
    pub(super) fn check_active_deadline(&mut self) -> Option<Instant> {
        if self.stop_deadline.is_some() {
            return None;
        }
        let limit = self.spec()?.active_deadline_seconds?;
        let deadline = self.active_since + seconds(limit);
        if deadline > Instant::now() {
            return Some(deadline);
        }
        let failure = PodFailure::deadline_exceeded();
        let reason = failure.cause.reason();
        self.events
            .record(None, EventType::Normal, reason, &failure.message);
        self.failure = Some(failure);
        self.begin_stop(self.grace_period());
        None
    }
}

/// All containers of a pod, in the order of the records.
fn containers(
    spec: &PodSpec,
) -> impl Iterator<Item = (ContainerType, Container, Option<String>)> + '_ {
    let init = spec.init_containers.iter().flatten().map(|container| {
        let container_type = if is_sidecar(container) {
            ContainerType::Sidecar
        } else {
            ContainerType::Init
        };
        (container_type, container.clone(), None)
    });
    let regular = spec
        .containers
        .iter()
        .map(|container| (ContainerType::Regular, container.clone(), None));
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|container| {
        let target = container.target_container_name.clone();
        (ContainerType::Ephemeral, as_container(container), target)
    });
    init.chain(regular).chain(ephemeral)
}
