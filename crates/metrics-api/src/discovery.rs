//! Discovery documents of the group, for the API server.

use axum::Json;
use serde_json::{Value, json};

use crate::{GROUP, VERSION};

/// `GET /apis`
pub(crate) async fn groups() -> Json<Value> {
    let group = json!({
        "name": GROUP,
        "versions": [version()],
        "preferredVersion": version(),
    });
    Json(json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]}))
}

/// `GET /apis/metrics.k8s.io`
pub(crate) async fn group() -> Json<Value> {
    Json(json!({
        "kind": "APIGroup",
        "apiVersion": "v1",
        "name": GROUP,
        "versions": [version()],
        "preferredVersion": version(),
    }))
}

/// `GET /apis/metrics.k8s.io/v1beta1`
pub(crate) async fn resources() -> Json<Value> {
    let resource = |name: &str, namespaced: bool, kind: &str| json!({"name": name, "singularName": "", "namespaced": namespaced, "kind": kind, "verbs": ["get", "list"]});
    Json(json!({
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": format!("{GROUP}/{VERSION}"),
        "resources": [resource("nodes", false, "NodeMetrics"), resource("pods", true, "PodMetrics")],
    }))
}

/// `GET /openapi/v2`: without it the API server would retry for ever.
pub(crate) async fn openapi_v2() -> Json<Value> {
    Json(json!({
        "swagger": "2.0",
        "info": {"title": "Coracle's metrics", "version": env!("CARGO_PKG_VERSION")},
        "paths": {},
    }))
}

/// `GET /openapi/v3`
pub(crate) async fn openapi_v3() -> Json<Value> {
    Json(json!({"paths": {}}))
}

fn version() -> Value {
    json!({"groupVersion": format!("{GROUP}/{VERSION}"), "version": VERSION})
}
