//! Lines about the progress of Deployments, StatefulSets and DaemonSets. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, StatefulSet};
use tokio::time::Instant;

use super::state::Replicas;
use crate::commands::run::object_ref::ObjectRef;

/// Interval of lines about one object that is not completely ready.
const INTERVAL: Duration = Duration::from_secs(5);

/// A controller whose pods are counted.
pub trait Controller {
    const KIND: &'static str;
    /// `None` while the controller has not seen its newest specification.
    fn replicas(&self) -> Option<Replicas>;
}

/// Implements [`Controller`] for kinds with a number of replicas in their specification.
macro_rules! replicated {
    ($($kind:ident)*) => {$(
        impl Controller for $kind {
            const KIND: &'static str = stringify!($kind);
            fn replicas(&self) -> Option<Replicas> {
                let status = self.status.as_ref()?;
                let is_current = status.observed_generation >= self.metadata.generation;
                is_current.then(|| Replicas {
                    ready: status.ready_replicas.unwrap_or(0),
                    desired: self.spec.replicas.unwrap_or(1),
                })
            }
        }
    )*};
}
replicated!(Deployment StatefulSet);

impl Controller for DaemonSet {
    const KIND: &'static str = "DaemonSet";
    fn replicas(&self) -> Option<Replicas> {
        let status = self.status.as_ref()?;
        let is_current = status.observed_generation >= self.metadata.generation;
        is_current.then_some(Replicas {
            ready: status.number_ready,
            desired: status.desired_number_scheduled,
        })
    }
}

/// What was printed about each object.
#[derive(Debug, Default)]
pub struct ReplicaProgress(BTreeMap<ObjectRef, (Replicas, Instant)>);

impl ReplicaProgress {
    /// The line to print now about an object, if any.
    pub fn line(&mut self, object: &ObjectRef, replicas: Replicas, now: Instant) -> Option<String> {
        let Replicas { ready, desired } = replicas;
        let printed = self.0.get(object);
        if printed.is_none() && ready == 0 {
            return None;
        }
        let is_new = printed.is_none_or(|(old, _)| *old != replicas);
        let is_due = printed.is_none_or(|(_, since)| now.duration_since(*since) >= INTERVAL);
        if !is_new || !(ready == desired || is_due) {
            return None;
        }
        self.0.insert(object.clone(), (replicas, now));
        Some(format!("{object} is ready {ready}/{desired}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completion_is_printed_at_once_and_progress_in_intervals() {
        let web = ObjectRef::new("Deployment", "default", "web");
        let mut progress = ReplicaProgress::default();
        let start = Instant::now();
        let mut lines = Vec::new();
        for (second, ready) in [
            (0, 0),
            (1, 1),
            (2, 2),
            (3, 3),
            (6, 3),
            (7, 4),
            (7, 4),
            (8, 3),
            (9, 4),
            (20, 2),
        ] {
            let now = start + Duration::from_secs(second);
            let replicas = Replicas { ready, desired: 4 };
            lines.extend(progress.line(&web, replicas, now));
        }
        assert_eq!(
            lines,
            [
                "deployment/web is ready 1/4",
                "deployment/web is ready 3/4",
                "deployment/web is ready 4/4",
                "deployment/web is ready 2/4"
            ]
        );
    }
}
