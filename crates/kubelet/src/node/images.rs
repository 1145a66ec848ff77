//! The Node's list of images. The scheduler prefers nodes that have a pod's images.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ContainerImage, Node};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::watch;

use crate::api_call::call;
use crate::pods::Launcher;

/// Interval between updates. The first one comes after the cluster's busy first seconds.
const UPDATE_INTERVAL: Duration = Duration::from_secs(10);

/// Keeps `status.images` current. Never returns.
pub(crate) async fn sync_images(
    client: &Client,
    name: &str,
    launcher: Arc<dyn Launcher>,
    node: watch::Receiver<Option<Arc<Node>>>,
) {
    let nodes: Api<Node> = Api::all(client.clone());
    loop {
        tokio::time::sleep(UPDATE_INTERVAL).await;
        let images = launcher.images().await;
        let is_listed = |node: &Arc<Node>| listed(node) == images;
        if node.borrow().as_ref().is_none_or(is_listed) {
            continue;
        }
        // The list has no merge key, so the patch replaces it.
        let patch = Patch::Strategic(json!({ "status": { "images": images } }));
        let written = call(nodes.patch_status(name, &PatchParams::default(), &patch)).await;
        if let Err(error) = written {
            let error = &error as &dyn std::error::Error;
            tracing::debug!(
                node = name,
                error,
                "cannot update the node's list of images"
            );
        }
    }
}

fn listed(node: &Node) -> &[ContainerImage] {
    let status = node.status.as_ref();
    let images = status.and_then(|status| status.images.as_deref());
    images.unwrap_or_default()
}
