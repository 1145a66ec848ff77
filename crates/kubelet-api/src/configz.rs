//! `GET /configz`: the kubelet's configuration.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::pod_source::PodSource;
use crate::stats::node_or_unavailable;

pub(crate) async fn configz(State(source): State<Arc<dyn PodSource>>) -> Response {
    match node_or_unavailable(&*source) {
        Ok(node) => Json(json!({ "kubeletconfig": node.configuration() })).into_response(),
        Err(response) => *response,
    }
}
