//! `local` persistent volumes: directories on this node's disk, which only this node can remove.
//!
//! The provisioner runs beside the control plane. It lists the volumes to delete in an annotation of the Node; the kubelet
//! removes a name from the list once the directory is deleted.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::watch;
use volumes::provisioner::{REMOVE_VOLUMES_ANNOTATION, requested_removals};

use crate::api_call::call;
use crate::pods::Launcher;

const VOLUME_RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// Removes the volumes that the Node's annotation lists. Never returns.
pub(crate) async fn remove_listed(
    client: Client,
    mut node: watch::Receiver<Option<Arc<Node>>>,
    launcher: Arc<dyn Launcher>,
) {
    let nodes: Api<Node> = Api::all(client);
    loop {
        let current = node.borrow_and_update().clone();
        let listed = current
            .as_deref()
            .map(requested_removals)
            .unwrap_or_default();
        let mut failed = Vec::new();
        for name in &listed {
            if let Err(error) = launcher.remove_local_volume(name).await {
                tracing::warn!(name, %error, "cannot remove local volume");
                failed.push(name.as_str());
            }
        }
        let mut done = failed.is_empty();
        if let Some(current) = current.filter(|_| failed.len() < listed.len()) {
            let value = (!failed.is_empty()).then(|| failed.join(","));
            // With the resourceVersion the patch fails if a name was added meanwhile.
            let patch = json!({ "metadata": {
                "resourceVersion": current.metadata.resource_version,
                "annotations": { REMOVE_VOLUMES_ANNOTATION: value },
            }});
            let name = current.metadata.name.as_deref().unwrap_or_default();
            let parameters = PatchParams::default();
            let patched = call(nodes.patch(name, &parameters, &Patch::Merge(patch))).await;
            if let Err(error) = patched {
                tracing::debug!(
                    error = &error as &dyn std::error::Error,
                    "cannot update the annotation that lists volumes to remove"
                );
                done = false;
            }
        }
        let retry = async {
            match done {
                true => std::future::pending().await,
                false => tokio::time::sleep(VOLUME_RETRY_INTERVAL).await,
            }
        };
        tokio::select! {
            changed = node.changed() => if changed.is_err() {
                // The kubelet is ending, and the node's directory is removed as a whole.
                return std::future::pending().await;
            },
            () = retry => {}
        }
    }
}
