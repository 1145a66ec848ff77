//! A pod's bundle: resolved, and resolved again when the pod or something that it refers to changes.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use sandbox::protocol::Bundle;
use serde_json::json;
use tokio::sync::watch;

use super::Shared;
use super::spec::uid;
use super::worker::Seen;

/// Keeps `bundles` current for as long as the pod is seen. Never ends; the end of the pod ends it.
pub(super) async fn resolve_all(
    shared: Arc<Shared>,
    mut seen: watch::Receiver<Seen>,
    bundles: watch::Sender<Option<Arc<Bundle>>>,
) {
    let mut complaints = vec![];
    loop {
        let pod = Arc::clone(&seen.borrow_and_update().pod);
        let resolved = shared.resolver.bundle(&pod).await;
        let mounts = resolved
            .failed_mounts
            .iter()
            .map(|message| ("FailedMount", message.clone()));
        let news: Vec<_> = mounts.chain(resolved.warnings).collect();
        if news != complaints {
            for (reason, message) in &news {
                shared.recorder.say(&pod, true, reason, message);
            }
            complaints = news;
        }
        // A pod doesn't start without its volumes, and one that runs keeps those that it has.
        if resolved.failed_mounts.is_empty() {
            replace(&bundles, resolved.bundle);
        }
        until_changed(&shared, &mut seen, &pod).await;
    }
}

/// Who reads the bundle is woken only if it says something new.
fn replace(bundles: &watch::Sender<Option<Arc<Bundle>>>, bundle: Bundle) {
    let new = json!(bundle);
    bundles.send_if_modified(|current| {
        let old = current.as_ref().map(|current| json!(**current));
        let changed = old.is_none_or(|old| without_status(old) != without_status(new));
        if changed {
            *current = Some(Arc::new(bundle));
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

async fn until_changed(shared: &Shared, seen: &mut watch::Receiver<Seen>, pod: &Pod) {
    let pod_changed = async {
        loop {
            if seen.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
            if differs(pod, &seen.borrow_and_update().pod) {
                return;
            }
        }
    };
    tokio::select! {
        () = pod_changed => {}
        () = shared.resolver.changed(pod) => {}
    }
}

/// Whether a sandbox would see a difference; its own status is none. Of resources that a pod has waited for, the API server
/// has nothing new to say when it gets them.
fn differs(one: &Pod, other: &Pod) -> bool {
    one.metadata.generation != other.metadata.generation
        || one.spec != other.spec
        || one.metadata.labels != other.metadata.labels
        || one.metadata.annotations != other.metadata.annotations
}

/// Forgets a pod when it is dropped, however its worker ends.
pub(super) struct Following {
    pub shared: Arc<Shared>,
    pub uid: String,
}

impl Drop for Following {
    fn drop(&mut self) {
        self.shared.resolver.forget(&self.uid);
    }
}

impl Following {
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
    fn resources_that_came_late_are_news() {
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
}
