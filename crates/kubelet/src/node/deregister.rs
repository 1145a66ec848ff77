//! Deletes the Node and its lease when the kubelet ends, so that the cluster does not wait for the lease to expire.

use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Preconditions};
use kube::{Api, Client};

use super::conditions::{Readiness, conditions};
use super::{Pressures, lease, status};
use crate::api_call::{ApiCallError, call};

/// Limits how long deregistration delays the end of the job.
const DEREGISTER_TIMEOUT: Duration = Duration::from_secs(2);

/// Deletes the Node and its lease. Failures are only logged: the cluster's leader deletes Nodes that remain.
///
/// Upstream's Node authorizer does not permit a node to delete its own Node, but the NodeRestriction admission plugin does. So an
/// RBAC rule (`delete` on `nodes` for group `system:nodes`) is sufficient. Without that rule, this function marks the Node not
/// ready, so that the scheduler assigns no new pods to it.
pub(crate) async fn deregister(client: &Client, node: &str, uid: Option<String>) {
    let deregistration = async {
        tokio::join!(delete_node(client, node, uid), async {
            if let Err(error) = lease::delete(client, node).await {
                tracing::debug!(
                    node,
                    error = &error as &dyn std::error::Error,
                    "cannot delete node lease"
                );
            }
        })
    };
    if tokio::time::timeout(DEREGISTER_TIMEOUT, deregistration)
        .await
        .is_err()
    {
        tracing::warn!(node, "timed out while deregistering the node");
    }
}

async fn delete_node(client: &Client, node: &str, uid: Option<String>) {
    let Some(uid) = uid else { return };
    let nodes: Api<Node> = Api::all(client.clone());
    // By uid: a Node that was registered again under this name must stay.
    let our_uid = DeleteParams {
        preconditions: Some(Preconditions {
            uid: Some(uid),
            resource_version: None,
        }),
        ..Default::default()
    };
    let deleted = match call(nodes.delete(node, &our_uid)).await {
        Err(error) if error.code() == Some(403) => {
            tracing::debug!(node, "not allowed to delete the Node: marking it not ready");
            mark_not_ready(&nodes, node).await
        }
        Err(error) if !matches!(error.code(), Some(404 | 409)) => Err(error),
        _ => Ok(()),
    };
    if let Err(error) = deleted {
        tracing::warn!(
            node,
            error = &error as &dyn std::error::Error,
            "cannot deregister node"
        );
    }
}

async fn mark_not_ready(nodes: &Api<Node>, node: &str) -> Result<(), ApiCallError> {
    let all = conditions(
        Pressures::default(),
        Readiness::ShuttingDown,
        &[],
        Timestamp::now(),
    );
    // Patch only Ready, which `conditions` returns last: the other conditions do not change.
    let ready = all
        .split_last()
        .map_or(&[][..], |(ready, _)| std::slice::from_ref(ready));
    status::patch_conditions(nodes, node, ready).await
}
