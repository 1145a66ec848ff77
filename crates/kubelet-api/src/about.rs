//! What the kubelet says of itself: its health, its configuration, and what it does not do.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::lookup::{find_pod, has_container};
use crate::seam::PodSource;
use crate::stats::node_of;

/// `GET /healthz/CHECK`: `ping`, `log`, `syncloop`.
pub(crate) async fn health_check(
    State(source): State<Arc<dyn PodSource>>,
    Path(check): Path<String>,
) -> Response {
    match check.as_str() {
        "ping" | "log" => "ok".into_response(),
        "syncloop" => match node_of(&*source) {
            Ok(node) if node.is_in_sync() => "ok".into_response(),
            Ok(_) => {
                let words = "internal server error: the pods of this node are not followed\n";
                (StatusCode::INTERNAL_SERVER_ERROR, words).into_response()
            }
            Err(answer) => *answer,
        },
        _ => (StatusCode::NOT_FOUND, "404 page not found\n").into_response(),
    }
}

/// `GET /configz`
pub(crate) async fn configz(State(source): State<Arc<dyn PodSource>>) -> Response {
    match node_of(&*source) {
        Ok(node) => Json(json!({ "kubeletconfig": node.configuration() })).into_response(),
        Err(answer) => *answer,
    }
}

/// `POST /checkpoint/NAMESPACE/POD/CONTAINER`: what upstream says where the runtime can't.
pub(crate) async fn checkpoint(
    State(source): State<Arc<dyn PodSource>>,
    Path((namespace, pod, container)): Path<(String, String, String)>,
) -> Response {
    let Some(known) = find_pod(&*source, &namespace, &pod) else {
        return (StatusCode::NOT_FOUND, "pod does not exist").into_response();
    };
    if !has_container(&known, &container) {
        let words = format!("container {container} does not exist");
        return (StatusCode::NOT_FOUND, words).into_response();
    }
    let words = format!(
        "checkpointing of {namespace}/{pod}/{container} failed (containers of Coracle can't be checkpointed: \
         that needs CRIU and rights that an ordinary user has not)"
    );
    (StatusCode::NOT_IMPLEMENTED, words).into_response()
}
