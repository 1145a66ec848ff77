//! The endpoints, and the rule who may call them.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Json, Router};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use crate::Peer;
use crate::logs::container_logs;
use crate::seam::PodSource;

/// Every endpoint, behind the allow-list; the accept loop adds the [`Peer`] per connection.
pub(crate) fn router(allowed_clients: BTreeSet<String>, pods: Arc<dyn PodSource>) -> Router {
    Router::new()
        .route("/healthz", get(healthz))
        .route("/pods", get(list_pods))
        .route("/runningpods/", get(list_running_pods))
        .route(
            "/containerLogs/{namespace}/{pod}/{container}",
            get(container_logs),
        )
        .fallback(not_found)
        .with_state(pods)
        // After the fallback, so that strangers can't even learn which paths exist.
        .layer(from_fn_with_state(Arc::new(allowed_clients), authorise))
}

/// Lets a request pass if its peer is on the allow-list: being *a* user of the cluster is not enough to read its pods.
async fn authorise(
    State(allowed): State<Arc<BTreeSet<String>>>,
    Extension(peer): Extension<Peer>,
    request: Request,
    next: Next,
) -> Response {
    if allowed.contains(&peer.common_name) {
        return next.run(request).await;
    }
    tracing::warn!(peer = %peer, path = request.uri().path(), "refused a caller of the kubelet API");
    let text = format!(
        "Forbidden (user={peer}, method={}, path={})\n",
        request.method(),
        request.uri().path()
    );
    (StatusCode::FORBIDDEN, text).into_response()
}

async fn healthz() -> &'static str {
    "ok"
}

async fn list_pods(State(source): State<Arc<dyn PodSource>>) -> Json<Value> {
    let pods = source.pods();
    list(pods.iter().map(|pod| json!(**pod)).collect())
}

/// The pods of which something runs, as upstream shows them: who they are, and what runs, nothing else.
async fn list_running_pods(State(source): State<Arc<dyn PodSource>>) -> Json<Value> {
    let pods = source.pods();
    list(pods.iter().filter_map(|pod| running(pod)).collect())
}

fn list(items: Vec<Value>) -> Json<Value> {
    Json(json!({ "kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items }))
}

fn running(pod: &Pod) -> Option<Value> {
    let status = pod.status.as_ref()?;
    let main = status.container_statuses.iter().flatten();
    let containers: Vec<_> = main
        .chain(status.init_container_statuses.iter().flatten())
        .chain(status.ephemeral_container_statuses.iter().flatten())
        .filter(|container| {
            let state = container.state.as_ref();
            state.is_some_and(|state| state.running.is_some())
        })
        .map(|container| json!({ "name": container.name, "image": container.image, "resources": {} }))
        .collect();
    let metadata = json!({
        "name": pod.metadata.name,
        "namespace": pod.metadata.namespace,
        "uid": pod.metadata.uid,
    });
    (!containers.is_empty()).then(
        || json!({ "metadata": metadata, "spec": { "containers": containers }, "status": {} }),
    )
}

/// The words of Go's mux, which is what callers of an upstream kubelet get.
async fn not_found() -> (StatusCode, &'static str) {
    (StatusCode::NOT_FOUND, "404 page not found\n")
}
