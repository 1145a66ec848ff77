//! `GET /healthz` and its named checks.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use crate::pod_source::PodSource;
use crate::stats::node_or_unavailable;

/// `GET /healthz`
pub(crate) async fn healthz() -> &'static str {
    "ok"
}

/// `GET /healthz/CHECK`: `ping`, `log`, `syncloop`.
pub(crate) async fn health_check(
    State(source): State<Arc<dyn PodSource>>,
    Path(check): Path<String>,
) -> Response {
    match check.as_str() {
        "ping" | "log" => "ok".into_response(),
        "syncloop" => match node_or_unavailable(&*source) {
            Ok(node) if node.is_in_sync() => "ok".into_response(),
            Ok(_) => {
                let message = "internal server error: the kubelet does not watch its pods\n";
                (StatusCode::INTERNAL_SERVER_ERROR, message).into_response()
            }
            Err(response) => *response,
        },
        _ => (StatusCode::NOT_FOUND, "404 page not found\n").into_response(),
    }
}
