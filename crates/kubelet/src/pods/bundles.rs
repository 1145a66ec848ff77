//! A pod's bundle: resolved, and resolved again when the pod or something that it refers to changes.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use pod_protocol::Bundle;
use serde_json::json;
use tokio::sync::watch;

use super::Shared;
use super::spec::{is_final, phase, uid};
use super::worker::Seen;

/// A bundle, as far as it can be had.
#[derive(Debug)]
pub(super) struct Offer {
    pub bundle: Bundle,
    /// It has all volumes. A pod doesn't start without them, but one that runs has them already.
    pub whole: bool,
}

/// Keeps `offers` current for as long as the pod is seen and not over. Never ends; the end of the pod ends it.
pub(super) async fn resolve_all(
    shared: Arc<Shared>,
    mut seen: watch::Receiver<Seen>,
    offers: watch::Sender<Option<Arc<Offer>>>,
) {
    let mut complaints = vec![];
    loop {
        let pod = Arc::clone(&seen.borrow_and_update().pod);
        if is_final(phase(&pod)) {
            // It stays for its logs, maybe for long, and needs no more tokens.
            shared.resolver.forget(uid(&pod));
            offers.send_replace(None);
            return std::future::pending().await;
        }
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
        // One that runs keeps the volumes that can't be had any more, and hears of all else: its token would end if a config
        // map that somebody has deleted stood in its way.
        let mut bundle = resolved.bundle;
        let kept = keep_volumes(&mut bundle, offers.borrow().as_deref());
        let whole = kept == resolved.failed_mounts.len();
        replace(&offers, Offer { bundle, whole });
        until_changed(&shared, &mut seen, &pod).await;
    }
}

/// Gives a bundle the volumes that it lacks and an earlier one has; how many there are.
fn keep_volumes(new: &mut Bundle, old: Option<&Offer>) -> usize {
    let mut kept = 0;
    for (name, source) in old.into_iter().flat_map(|old| &old.bundle.volumes) {
        if !new.volumes.contains_key(name) {
            new.volumes.insert(name.clone(), source.clone());
            kept += 1;
        }
    }
    kept
}

/// Who reads the bundle is woken only if it says something new.
fn replace(offers: &watch::Sender<Option<Arc<Offer>>>, offer: Offer) {
    let new = without_status(json!(offer.bundle));
    offers.send_if_modified(|current| {
        let changed = current.as_ref().is_none_or(|current| {
            current.whole != offer.whole || without_status(json!(current.bundle)) != new
        });
        if changed {
            *current = Some(Arc::new(offer));
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
            let now = Arc::clone(&seen.borrow_and_update().pod);
            if differs(pod, &now) || is_final(phase(&now)) {
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

    #[test]
    fn what_can_not_be_had_any_more_is_kept() {
        let bundle = |volumes: serde_json::Value| Bundle {
            pod: Pod::default(),
            containers: Default::default(),
            volumes: serde_json::from_value(volumes).unwrap(),
            pull_credentials: vec![],
            node: Default::default(),
            before: vec![],
        };
        let old = Offer {
            bundle: bundle(json!({"gone": "old", "token": "old"})),
            whole: true,
        };
        let mut new = bundle(json!({"token": "new"}));
        assert_eq!(keep_volumes(&mut new, None), 0);
        assert_eq!(keep_volumes(&mut new, Some(&old)), 1);
        assert_eq!(json!(new.volumes), json!({"gone": "old", "token": "new"}));
    }
}
