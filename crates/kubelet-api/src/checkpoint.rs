//! `POST /checkpoint/NAMESPACE/POD/CONTAINER`: not supported.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use crate::pod_lookup::{find_pod, has_container};
use crate::pod_source::PodSource;

/// Responds as upstream's kubelet does when its container runtime cannot checkpoint.
pub(crate) async fn checkpoint(
    State(source): State<Arc<dyn PodSource>>,
    Path((namespace, pod, container)): Path<(String, String, String)>,
) -> Response {
    let Some(found) = find_pod(&*source, &namespace, &pod) else {
        return (StatusCode::NOT_FOUND, "pod does not exist").into_response();
    };
    if !has_container(&found, &container) {
        let message = format!("container {container} does not exist");
        return (StatusCode::NOT_FOUND, message).into_response();
    }
    let message = format!(
        "checkpointing of {namespace}/{pod}/{container} failed (Coracle cannot checkpoint containers: \
         CRIU needs privileges that an ordinary user does not have)"
    );
    (StatusCode::NOT_IMPLEMENTED, message).into_response()
}
