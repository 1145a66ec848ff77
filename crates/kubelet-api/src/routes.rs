//! The router.

use std::sync::Arc;

use axum::extract::{FromRef, State};
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};
use axum::{Json, Router};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use crate::auth::{AccessPolicy, authorize_request};
use crate::logs::container_logs;
use crate::pod_source::PodSource;
use crate::portforward::port_forward;
use crate::remotecommand::{attach, exec, run};
use crate::streams::StreamTimeouts;
use crate::upgrade::UpgradedConnections;
use crate::{checkpoint, configz, health, metrics, node_logs, stats};

/// State of the handlers.
#[derive(Clone)]
pub(crate) struct ApiState {
    pub(crate) pods: Arc<dyn PodSource>,
    pub(crate) timeouts: StreamTimeouts,
    pub(crate) upgrades: UpgradedConnections,
}

impl FromRef<ApiState> for Arc<dyn PodSource> {
    fn from_ref(api: &ApiState) -> Self {
        Arc::clone(&api.pods)
    }
}

/// All endpoints, behind [`authorize_request`]. The accept loop adds the [`CallerIdentity`](crate::auth::CallerIdentity) of each connection.
pub(crate) fn router(access: Arc<AccessPolicy>, api: ApiState) -> Router {
    // Like upstream: GET and POST, with and without the pod's uid.
    let exec = || get(exec).post(exec);
    let attach = || get(attach).post(attach);
    let port_forward = || get(port_forward).post(port_forward);
    Router::new()
        .route("/healthz", get(health::healthz))
        .route("/healthz/{check}", get(health::health_check))
        .route("/configz", get(configz::configz))
        .route(
            "/checkpoint/{namespace}/{pod}/{container}",
            post(checkpoint::checkpoint),
        )
        .route("/stats/summary", get(stats::summary))
        .route("/metrics", get(metrics::kubelet))
        .route("/metrics/resource", get(metrics::resource))
        .route("/metrics/cadvisor", get(metrics::cadvisor))
        .route("/metrics/probes", get(metrics::probes))
        .route("/logs/", get(node_logs::list))
        .route("/logs/{*path}", get(node_logs::file))
        .route("/pods", get(list_pods))
        .route("/runningpods", get(list_running_pods))
        .route("/runningpods/", get(list_running_pods))
        .route(
            "/containerLogs/{namespace}/{pod}/{container}",
            get(container_logs),
        )
        .route("/exec/{namespace}/{pod}/{container}", exec())
        .route("/exec/{namespace}/{pod}/{uid}/{container}", exec())
        .route("/run/{namespace}/{pod}/{container}", post(run))
        .route("/run/{namespace}/{pod}/{uid}/{container}", post(run))
        .route("/attach/{namespace}/{pod}/{container}", attach())
        .route("/attach/{namespace}/{pod}/{uid}/{container}", attach())
        .route("/portForward/{namespace}/{pod}", port_forward())
        .route("/portForward/{namespace}/{pod}/{uid}", port_forward())
        .fallback(not_found)
        .with_state(api)
        // Last, so that it covers the fallback too: unauthenticated clients must not learn which paths exist.
        .layer(from_fn_with_state(access, authorize_request))
}

async fn list_pods(State(source): State<Arc<dyn PodSource>>) -> Json<Value> {
    let pods = source.pods();
    list(pods.iter().map(|pod| json!(**pod)).collect())
}

/// Pods with running containers. Like upstream's, the list has only their identities and these containers.
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

/// The response of Go's mux, which upstream's kubelet uses.
async fn not_found() -> (StatusCode, &'static str) {
    (StatusCode::NOT_FOUND, "404 page not found\n")
}
