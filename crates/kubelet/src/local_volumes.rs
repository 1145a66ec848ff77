//! `local` persistent volumes: directories on this node's disk, which nobody but this node can remove.
//!
//! The provisioner, beside the control plane, lists those that are to go in an annotation of the Node; a name that is
//! off the list again is gone.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::watch;
use volumes::provisioner::{REMOVE, removals};

use crate::api::call;
use crate::pods::Launcher;

/// When to try again what has failed.
const RETRY: Duration = Duration::from_secs(10);

/// Where a node keeps them, in its own directory.
pub(crate) fn directory(node_dir: &Path) -> PathBuf {
    node_dir.join("local")
}

/// Removes what the Node's annotation lists, for ever.
pub(crate) async fn remove_listed(
    client: Client,
    node_dir: PathBuf,
    mut node: watch::Receiver<Option<Arc<Node>>>,
    launcher: Arc<dyn Launcher>,
) {
    let nodes: Api<Node> = Api::all(client);
    let directory = directory(&node_dir);
    loop {
        let current = node.borrow_and_update().clone();
        let listed = current.as_deref().map(removals).unwrap_or_default();
        let mut left = Vec::new();
        for name in &listed {
            let path = directory.join(name);
            if path.exists()
                && let Err(error) = launcher.remove(path.clone()).await
            {
                tracing::warn!(path = %path.display(), %error, "cannot remove a local volume");
                left.push(name.as_str());
            }
        }
        let mut all_well = left.is_empty();
        if let Some(current) = current.filter(|_| left.len() < listed.len()) {
            let value = (!left.is_empty()).then(|| left.join(","));
            // The version makes sure that no name is lost that was added meanwhile.
            let patch = json!({ "metadata": {
                "resourceVersion": current.metadata.resource_version,
                "annotations": { REMOVE: value },
            }});
            let name = current.metadata.name.as_deref().unwrap_or_default();
            let parameters = PatchParams::default();
            let patched = call(nodes.patch(name, &parameters, &Patch::Merge(patch))).await;
            if let Err(error) = patched {
                tracing::debug!(
                    error = &error as &dyn std::error::Error,
                    "telling of removed volumes"
                );
                all_well = false;
            }
        }
        let retry = async {
            match all_well {
                true => std::future::pending().await,
                false => tokio::time::sleep(RETRY).await,
            }
        };
        tokio::select! {
            changed = node.changed() => if changed.is_err() {
                // The node is leaving, and all its directory with it.
                return std::future::pending().await;
            },
            () = retry => {}
        }
    }
}
