//! Applies bundles to the records: container specs, deadlines, and the statuses from an earlier sandbox.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, PodSpec};
use tokio::time::Instant;

use super::super::clock::instant_of;
use super::super::plan::seconds;
use super::super::record::{Kind, Record, as_container};
use super::super::restart::RestartPolicy;
use super::Driver;
use super::up::Up;
use crate::seams::Runtime;
use pod_protocol::{Bundle, Problem};

impl<R: Runtime> Driver<R> {
    pub(super) fn take_bundle(&mut self, bundle: Bundle) {
        // Every state that the driver publishes can come back as a bundle in which only the pod's status differs.
        let news = self.bundle.pod.spec != bundle.pod.spec || self.bundle.volumes != bundle.volumes;
        self.bundle = bundle;
        self.take_specs();
        if let Up::Waiting { until, .. } = &mut self.up
            && news
        {
            // The cause of the failure may be gone: retry at once.
            *until = Instant::now();
        }
    }

    /// Updates the records from the bundle.
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
                self.records.push(Record::new(kind, container, target));
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
            if record.held {
                record.held = problem.is_some();
                record.waiting = problem.or(record.waiting.take());
            }
        }
    }

    /// Restores the records from the statuses that an earlier sandbox of this pod reported.
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
        let regular = || self.records.iter().filter(|r| r.kind == Kind::Regular);
        let any_ran = self.records.iter().any(|record| record.has_run);
        let done = regular().any(|record| record.has_run)
            && !regular().any(|record| record.wants_start(policy));
        if (policy == RestartPolicy::Never && any_ran) || done {
            self.end(Duration::ZERO);
        } else if any_ran {
            self.journal.note(
                None,
                false,
                "SandboxChanged",
                "Pod sandbox changed, it will be killed and re-created.",
            );
        }
    }

    /// Ends the pod if activeDeadlineSeconds have passed; otherwise returns the deadline.
    pub(super) fn check_deadline(&mut self) -> Option<Instant> {
        if self.ending.is_some() {
            return None;
        }
        let limit = self.spec()?.active_deadline_seconds?;
        let deadline = self.active_since + seconds(limit);
        if deadline > Instant::now() {
            return Some(deadline);
        }
        const MESSAGE: &str = "Pod was active on the node longer than the specified deadline";
        const REASON: &str = "DeadlineExceeded";
        self.journal.note(None, false, REASON, MESSAGE);
        self.failure = Some(Problem {
            reason: REASON.to_owned(),
            message: MESSAGE.to_owned(),
        });
        self.end(self.grace());
        None
    }
}

/// All containers of a pod, in the order of the records.
fn containers(spec: &PodSpec) -> impl Iterator<Item = (Kind, Container, Option<String>)> + '_ {
    let init = spec.init_containers.iter().flatten().map(|container| {
        let kind = match container.restart_policy.as_deref() {
            Some("Always") => Kind::Sidecar,
            _ => Kind::Init,
        };
        (kind, container.clone(), None)
    });
    let regular = spec
        .containers
        .iter()
        .map(|container| (Kind::Regular, container.clone(), None));
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|container| {
        let target = container.target_container_name.clone();
        (Kind::Ephemeral, as_container(container), target)
    });
    init.chain(regular).chain(ephemeral)
}
