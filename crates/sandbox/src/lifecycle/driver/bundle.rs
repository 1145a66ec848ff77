//! What the bundles say: containers, deadlines, and what was before.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, PodSpec};
use tokio::time::Instant;

use super::super::clock::instant_of;
use super::super::plan::seconds;
use super::super::container_record::{ContainerType, ContainerRecord, as_container};
use super::super::restart::RestartPolicy;
use super::Driver;
use super::setup::SetupState;
use crate::container_runtime::ContainerRuntime;
use pod_protocol::{Bundle, Problem};

impl<R: ContainerRuntime> Driver<R> {
    pub(super) fn take_bundle(&mut self, bundle: Bundle) {
        // Each state that we publish can come back as a new bundle with nothing but another status in it.
        let news = self.bundle.pod.spec != bundle.pod.spec || self.bundle.volumes != bundle.volumes;
        self.bundle = bundle;
        self.take_specs();
        if let SetupState::Waiting { until, .. } = &mut self.up
            && news
        {
            // What stood in the way may be gone.
            *until = Instant::now();
        }
    }

    /// Brings the records up to the bundle.
    pub(super) fn take_specs(&mut self) {
        let status = self.bundle.pod.status.as_ref();
        self.active_since = status
            .and_then(|status| status.start_time.as_ref())
            .map_or(self.born, |time| instant_of(time.0));
        let spec = self.bundle.pod.spec.clone().unwrap_or_default();
        for (kind, container, target) in containers(&spec) {
            let name = container.name.clone();
            let known = self.records.iter_mut().find(|record| record.name() == name);
            let Some(record) = known else {
                self.records.push(ContainerRecord::new(kind, container, target));
                continue;
            };
            if record.spec.image != container.image {
                record.back_off.clear();
                record.pull_back_off.clear();
                record.pull_failure = None;
                record.retry = None;
            }
            record.spec = container;
            let problem = self
                .bundle
                .containers
                .get(&name)
                .and_then(|input| input.problem.clone());
            if record.blocked {
                record.blocked = problem.is_some();
                record.waiting = problem.or(record.waiting.take());
            }
        }
    }

    /// Goes on from an earlier sandbox of this pod.
    pub(super) fn remember(&mut self, now: Instant) {
        for before in &self.bundle.previous_statuses {
            if let Some(record) = self
                .records
                .iter_mut()
                .find(|record| record.name() == before.name)
            {
                record.remember(before, now);
            }
        }
        let policy = self.policy();
        let regular = || self.records.iter().filter(|r| r.kind == ContainerType::Regular);
        let any_ran = self.records.iter().any(|record| record.has_run);
        let done = regular().any(|record| record.has_run)
            && !regular().any(|record| record.wants_start(policy));
        if (policy == RestartPolicy::Never && any_ran) || done {
            self.end(Duration::ZERO);
        } else if any_ran {
            self.events.record(
                None,
                false,
                "SandboxChanged",
                "Pod sandbox changed, it will be killed and re-created.",
            );
        }
    }

    /// Ends a pod that was active for too long; tells when that will be.
    pub(super) fn check_deadline(&mut self) -> Option<Instant> {
        if self.stop_deadline.is_some() {
            return None;
        }
        let limit = self.spec()?.active_deadline_seconds?;
        let deadline = self.active_since + seconds(limit);
        if deadline > Instant::now() {
            return Some(deadline);
        }
        const MESSAGE: &str = "Pod was active on the node longer than the specified deadline";
        const REASON: &str = "DeadlineExceeded";
        self.events.record(None, false, REASON, MESSAGE);
        self.failure = Some(Problem {
            reason: REASON.to_owned(),
            message: MESSAGE.to_owned(),
        });
        self.end(self.grace());
        None
    }
}

/// All containers of a pod, in the order of the records.
fn containers(spec: &PodSpec) -> impl Iterator<Item = (ContainerType, Container, Option<String>)> + '_ {
    let init = spec.init_containers.iter().flatten().map(|container| {
        let kind = match container.restart_policy.as_deref() {
            Some("Always") => ContainerType::Sidecar,
            _ => ContainerType::Init,
        };
        (kind, container.clone(), None)
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
