//! Keeps a pod's bundle current: resolves it again when the pod, or an object that it refers to, changes.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use pod_protocol::Bundle;
use serde_json::json;
use tokio::sync::watch;

use super::Shared;
use super::spec::{phase, uid};
use super::worker::PodUpdate;

/// A bundle, maybe without all volumes.
pub(super) struct ResolvedBundle {
    pub bundle: Bundle,
    /// Whether it has all volumes. A pod starts only with a complete bundle.
    pub complete: bool,
}

/// Resolves the pod and publishes its bundle in `bundles`, until the pod has ended. Never returns.
pub(super) async fn sync_bundle(
    shared: Arc<Shared>,
    mut updates: watch::Receiver<PodUpdate>,
    bundles: watch::Sender<Option<Arc<ResolvedBundle>>>,
) {
    let mut reported = vec![];
    loop {
        let pod = Arc::clone(&updates.borrow_and_update().pod);
        if phase(&pod).is_terminal() {
            // The pod object may remain for long, but it needs no tokens any more.
            shared.resolver.forget(uid(&pod));
            bundles.send_replace(None);
            return std::future::pending().await;
        }
        let resolved = shared.resolver.bundle(&pod).await;
        let mounts = resolved
            .failed_mounts
            .iter()
            .map(|message| ("FailedMount", message.clone()));
        let warnings: Vec<_> = mounts.chain(resolved.warnings).collect();
        if warnings != reported {
            for (reason, message) in &warnings {
                shared.recorder.warning(&pod, reason, message);
            }
            reported = warnings;
        }
        // A running pod keeps volumes that cannot be resolved any more, and still gets updates of the others: a deleted config map
        // must not stop the renewal of its token.
        let mut bundle = resolved.bundle;
        let kept = keep_volumes(&mut bundle, bundles.borrow().as_deref());
        let complete = kept == resolved.failed_mounts.len();
        publish(&bundles, ResolvedBundle { bundle, complete });
        until_changed(&shared, &mut updates, &pod).await;
    }
}

/// Adds the volumes of an earlier bundle that the new one lacks, and returns their number.
fn keep_volumes(new: &mut Bundle, old: Option<&ResolvedBundle>) -> usize {
    let mut kept = 0;
    for (name, source) in old.into_iter().flat_map(|old| &old.bundle.volumes) {
        if !new.volumes.contains_key(name) {
            new.volumes.insert(name.clone(), source.clone());
            kept += 1;
        }
    }
    kept
}

/// Notifies watchers only on change.
fn publish(bundles: &watch::Sender<Option<Arc<ResolvedBundle>>>, resolved: ResolvedBundle) {
    let new = without_status(json!(resolved.bundle));
    bundles.send_if_modified(|current| {
        let changed = current.as_ref().is_none_or(|current| {
            current.complete != resolved.complete || without_status(json!(current.bundle)) != new
        });
        if changed {
            *current = Some(Arc::new(resolved));
        }
        changed
    });
}

fn without_status(mut bundle: serde_json::Value) -> serde_json::Value {
    if let Some(pod) = bundle["pod"].as_object_mut() {
        pod.remove("status");
        if let Some(metadata) = pod["metadata"].as_object_mut() {
            metadata.remove("resourceVersion");
        }
    }
    bundle
}

async fn until_changed(shared: &Shared, updates: &mut watch::Receiver<PodUpdate>, pod: &Pod) {
    let pod_changed = async {
        loop {
            if updates.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
            let now = Arc::clone(&updates.borrow_and_update().pod);
            if differs(pod, &now) || phase(&now).is_terminal() {
                return;
            }
        }
    };
    tokio::select! {
        () = pod_changed => {}
        () = shared.resolver.changed(pod) => {}
    }
}

/// Whether the sandbox needs the new version of the pod; a change of the status is ignored. The spec is compared besides the
/// generation, because a deferred resize changes the resources later than the generation.
fn differs(one: &Pod, other: &Pod) -> bool {
    one.metadata.generation != other.metadata.generation
        || one.spec != other.spec
        || one.metadata.labels != other.metadata.labels
        || one.metadata.annotations != other.metadata.annotations
}

/// Makes the resolver forget a pod when its worker ends.
pub(super) struct ResolverGuard {
    pub shared: Arc<Shared>,
    pub uid: String,
}

impl Drop for ResolverGuard {
    fn drop(&mut self) {
        self.shared.resolver.forget(&self.uid);
    }
}

impl ResolverGuard {
    pub(super) fn of(shared: &Arc<Shared>, pod: &Pod) -> Self {
        Self {
            shared: Arc::clone(shared),
            uid: uid(pod).to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn changed_resources_are_a_difference() {
        let pod = |cpu: &str, phase: &str| -> Pod {
            let resources = json!({"requests": {"cpu": cpu}});
            let spec = json!({"containers": [{"name": "a", "resources": resources}]});
            let pod =
                json!({"metadata": {"generation": 2}, "spec": spec, "status": {"phase": phase}});
            serde_json::from_value(pod).unwrap()
        };
        assert!(differs(&pod("1", "Running"), &pod("2", "Running")));
        assert!(!differs(&pod("1", "Pending"), &pod("1", "Running")));
    }

    #[test]
    fn unresolvable_volumes_are_kept() {
        let bundle = |volumes: serde_json::Value| Bundle {
            pod: Pod::default(),
            containers: Default::default(),
            volumes: serde_json::from_value(volumes).unwrap(),
            pull_credentials: vec![],
            node: Default::default(),
            previous_statuses: vec![],
        };
        let old = ResolvedBundle {
            bundle: bundle(json!({"gone": "old", "token": "old"})),
            complete: true,
        };
        let mut new = bundle(json!({"token": "new"}));
        assert_eq!(keep_volumes(&mut new, None), 0);
        assert_eq!(keep_volumes(&mut new, Some(&old)), 1);
        assert_eq!(json!(new.volumes), json!({"gone": "old", "token": "new"}));
    }
}
