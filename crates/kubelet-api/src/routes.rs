//! The endpoints, and the rule who may call them.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Json, Router};
use serde_json::{Value, json};

use crate::Peer;

/// Where this API learns which pods the node has: the seam to the kubelet.
pub trait PodSource: Send + Sync {
    /// The `v1` Pods bound to this node, each as its API object.
    fn pods(&self) -> Vec<Value>;
}

/// Every endpoint, behind the allow-list; the accept loop adds the [`Peer`] per connection.
pub(crate) fn router(allowed_clients: BTreeSet<String>, pods: Arc<dyn PodSource>) -> Router {
    Router::new()
        .route("/healthz", get(healthz))
        .route("/pods", get(list_pods))
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

async fn list_pods(State(pods): State<Arc<dyn PodSource>>) -> Json<Value> {
    Json(json!({ "kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": pods.pods() }))
}

/// The words of Go's mux, which is what callers of an upstream kubelet get.
async fn not_found() -> (StatusCode, &'static str) {
    (StatusCode::NOT_FOUND, "404 page not found\n")
}
