//! Going away cleanly: the cluster should know at once, and not after the lease has run out.

use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Preconditions};
use kube::{Api, Client};

use crate::api::{CallError, call};
use crate::conditions::{Readiness, conditions};
use crate::{Pressures, lease, status};

/// How long the end of a job may be held up by this.
const PATIENCE: Duration = Duration::from_secs(2);

/// Takes the Node and its lease out of the cluster, as far as that is possible in time. Never fails.
///
/// Upstream's Node authorizer gives a node no right to delete its Node. NodeRestriction would let it delete its own, so
/// an RBAC rule (`delete` on `nodes` for group `system:nodes`) is all it takes. Where there is none, the Node says that
/// it is not ready, which keeps new pods away, and whoever leads the cluster deletes it.
pub(crate) async fn leave(client: &Client, node: &str, uid: Option<String>) {
    let farewell = async {
        tokio::join!(remove_node(client, node, uid), async {
            if let Err(error) = lease::delete(client, node).await {
                tracing::debug!(
                    node,
                    error = &error as &dyn std::error::Error,
                    "could not delete the node's lease"
                );
            }
        })
    };
    if tokio::time::timeout(PATIENCE, farewell).await.is_err() {
        tracing::warn!(
            node,
            "the API server did not answer while the node was leaving"
        );
    }
}

async fn remove_node(client: &Client, node: &str, uid: Option<String>) {
    let Some(uid) = uid else { return };
    let nodes: Api<Node> = Api::all(client.clone());
    // By uid: should somebody have registered anew under our name, theirs stays.
    let exactly_ours = DeleteParams {
        preconditions: Some(Preconditions {
            uid: Some(uid),
            resource_version: None,
        }),
        ..Default::default()
    };
    let left = match call(nodes.delete(node, &exactly_ours)).await {
        Err(error) if error.code() == Some(403) => {
            tracing::debug!(
                node,
                "may not delete the own Node: marking it not ready instead"
            );
            say_not_ready(&nodes, node).await
        }
        Err(error) if !matches!(error.code(), Some(404 | 409)) => Err(error),
        _ => Ok(()),
    };
    if let Err(error) = left {
        tracing::warn!(
            node,
            error = &error as &dyn std::error::Error,
            "could not say goodbye"
        );
    }
}

async fn say_not_ready(nodes: &Api<Node>, node: &str) -> Result<(), CallError> {
    let all = conditions(
        Pressures::default(),
        Readiness::ShuttingDown,
        &[],
        Timestamp::now(),
    );
    // Ready only, which comes last: the pressures are as they were.
    let ready = all
        .split_last()
        .map_or(&[][..], |(ready, _)| std::slice::from_ref(ready));
    status::report(nodes, node, ready).await
}
