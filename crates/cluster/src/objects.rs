//! The API objects that the leader itself reads and writes.

use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Node, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::json;

/// Retry interval while the API server starts.
const OBJECT_WRITE_INTERVAL: Duration = Duration::from_millis(20);
/// Time-out of a request in the background.
const OBJECT_REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// The namespaces that every cluster has.
const NAMESPACES: [&str; 4] = ["default", "kube-system", "kube-public", "kube-node-lease"];

/// Waits for the default service account, and publishes the CA of *this* cluster to pods: the seed's namespaces
/// still hold the CA of the control plane that made the seed.
pub async fn prepare_namespaces(client: &Client, ca_pem: &str) -> anyhow::Result<()> {
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), "default");
    while accounts.get("default").await.is_err() {
        tokio::time::sleep(OBJECT_WRITE_INTERVAL).await;
    }
    let publish = NAMESPACES.map(|namespace| publish_ca(client, namespace, ca_pem));
    let deleted = delete_seed_cas(client);
    let (published, ()) = tokio::join!(futures::future::try_join_all(publish), deleted);
    published?;
    Ok(())
}

/// Waits until the controllers run. There is no API for this, but their first action is to annotate each Node.
pub async fn wait_for_controllers(client: &Client) {
    let nodes: Api<Node> = Api::all(client.clone());
    let annotated = |node: &Node| {
        node.annotations()
            .contains_key("node.alpha.kubernetes.io/ttl")
    };
    while !nodes
        .list(&ListParams::default())
        .await
        .is_ok_and(|nodes| nodes.iter().all(annotated))
    {
        tokio::time::sleep(OBJECT_WRITE_INTERVAL).await;
    }
}

/// Deletes the authentication config map of the seed. The API server would add its CAs to those in it, which belong to the
/// control plane that made the seed; without the map it writes a new one.
async fn delete_seed_cas(client: &Client) {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "kube-system");
    let deleted = maps
        .delete(
            "extension-apiserver-authentication",
            &DeleteParams::default(),
        )
        .await;
    if let Err(error) = deleted {
        tracing::debug!(%error, "no authentication config map to delete");
    }
}

async fn publish_ca(client: &Client, namespace: &str, ca_pem: &str) -> anyhow::Result<()> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let name = "kube-root-ca.crt";
    let map = json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {"ca.crt": ca_pem},
    });
    // With the field manager of the controller that owns it, which then finds nothing to change.
    let as_controller = PatchParams::apply("kube-controller-manager").force();
    while let Err(error) = maps.patch(name, &as_controller, &Patch::Apply(&map)).await {
        tracing::debug!(%error, namespace, "cannot publish the cluster's CA yet");
        tokio::time::sleep(OBJECT_WRITE_INTERVAL).await;
    }
    Ok(())
}

/// Creates the role by which nodes may delete their Node. (Upstream's NodeRestriction limits each to its own.)
pub async fn create_rbac_objects(client: &Client) -> anyhow::Result<()> {
    let name = "coracle:node-leave";
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": name},
        "rules": [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["delete"]}],
    });
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "system:nodes"}],
    });
    let as_coracle = PatchParams::apply("coracle").force();
    let (roles, bindings): (Api<ClusterRole>, Api<ClusterRoleBinding>) =
        (Api::all(client.clone()), Api::all(client.clone()));
    roles.patch(name, &as_coracle, &Patch::Apply(&role)).await?;
    bindings
        .patch(name, &as_coracle, &Patch::Apply(&binding))
        .await?;
    Ok(())
}

/// Deletes the Node of a removed node, if its agent has not done so.
pub async fn delete_node(client: &Client, node: &str) {
    let nodes: Api<Node> = Api::all(client.clone());
    let params = DeleteParams::default();
    match tokio::time::timeout(OBJECT_REQUEST_TIMEOUT, nodes.delete(node, &params)).await {
        Ok(Ok(_)) => {}
        Ok(Err(kube::Error::Api(status))) if status.code == 404 => {}
        Ok(Err(error)) => tracing::warn!(node, %error, "cannot delete Node"),
        Err(_) => tracing::warn!(node, "timed out deleting Node"),
    }
}

/// Marks a Node as not ready, sooner than its lease would run out.
pub async fn mark_not_ready(client: &Client, node: &str, problem: &str) {
    let nodes: Api<Node> = Api::all(client.clone());
    let now = k8s_openapi::jiff::Timestamp::now().to_string();
    let status = json!({"status": {"conditions": [{
        "type": "Ready",
        "status": "Unknown",
        "reason": "NodeStatusUnknown",
        "message": format!("Coracle's leader lost the node: {problem}"),
        "lastTransitionTime": now,
        "lastHeartbeatTime": now,
    }]}});
    let (params, patch) = (PatchParams::default(), Patch::Strategic(status));
    match tokio::time::timeout(
        OBJECT_REQUEST_TIMEOUT,
        nodes.patch_status(node, &params, &patch),
    )
    .await
    {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => tracing::warn!(node, %error, "failed to mark node NotReady"),
        Err(_) => tracing::warn!(node, "timed out marking node NotReady"),
    }
}
