//! `GET /metrics…`: the node's figures in Prometheus' text format.
//!
//! `resource.rs`, `cadvisor.rs`, `probes.rs` and `own.rs` are pure functions of figures and pods, one for each endpoint.

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
        Ok(node) => plain(resource::render(&node.measure().await)),
        Err(answer) => *answer,
    }
}

/// `GET /metrics/cadvisor`
pub(crate) async fn cadvisor(State(source): State<Arc<dyn PodSource>>) -> Response {
    match node_or_unavailable(&*source) {
        Ok(node) => {
            let measured = node.measure().await;
            plain(cadvisor::render(&measured, &source.pods(), &node.machine()))
        }
        Err(answer) => *answer,
    }
}

/// `GET /metrics/probes`
pub(crate) async fn probes(State(source): State<Arc<dyn PodSource>>) -> Response {
    match node_or_unavailable(&*source) {
        Ok(node) => plain(probes::render(&node.measure().await)),
        Err(answer) => *answer,
    }
}

/// `GET /metrics`
pub(crate) async fn kubelet(State(source): State<Arc<dyn PodSource>>) -> Response {
    match node_or_unavailable(&*source) {
        Ok(node) => {
            let measured = node.measure().await;
            let process = kubelet::ProcessStats::read();
            let (pods, machine) = (source.pods(), node.machine());
            plain(kubelet::render(
                &measured,
                &pods,
                &machine,
                process.as_ref(),
            ))
        }
        Err(answer) => *answer,
    }
}

fn plain(text: String) -> Response {
    ([(header::CONTENT_TYPE, exposition::CONTENT_TYPE)], text).into_response()
}
