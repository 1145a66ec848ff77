//! `GET /metrics…`: stats of the node in the Prometheus text format.
//!
//! `resource.rs`, `cadvisor.rs`, `probes.rs` and `kubelet.rs` render one endpoint each, as pure functions of stats and pods.

mod cadvisor;
mod exposition;
mod kubelet;
mod probes;
mod resource;

use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};

use crate::pod_source::PodSource;
use crate::stats::node_or_unavailable;

/// `GET /metrics/resource`
pub(crate) async fn resource(State(source): State<Arc<dyn PodSource>>) -> Response {
    match node_or_unavailable(&*source) {
        Ok(node) => exposition_response(resource::render(&node.measure().await)),
        Err(response) => *response,
    }
}

/// `GET /metrics/cadvisor`
pub(crate) async fn cadvisor(State(source): State<Arc<dyn PodSource>>) -> Response {
    match node_or_unavailable(&*source) {
        Ok(node) => {
            let measured = node.measure().await;
            exposition_response(cadvisor::render(&measured, &source.pods(), &node.machine()))
        }
        Err(response) => *response,
    }
}

/// `GET /metrics/probes`
pub(crate) async fn probes(State(source): State<Arc<dyn PodSource>>) -> Response {
    match node_or_unavailable(&*source) {
        Ok(node) => exposition_response(probes::render(&node.measure().await)),
        Err(response) => *response,
    }
}

/// `GET /metrics`
pub(crate) async fn kubelet(State(source): State<Arc<dyn PodSource>>) -> Response {
    match node_or_unavailable(&*source) {
        Ok(node) => {
            let measured = node.measure().await;
            let process = kubelet::KubeletProcess::read();
            let (pods, machine) = (source.pods(), node.machine());
            exposition_response(kubelet::render(
                &measured,
                &pods,
                &machine,
                process.as_ref(),
            ))
        }
        Err(response) => *response,
    }
}

fn exposition_response(text: String) -> Response {
    ([(header::CONTENT_TYPE, exposition::CONTENT_TYPE)], text).into_response()
}
