//! `GET /containerLogs/NAMESPACE/POD/CONTAINER`: serves `kubectl logs`, through the API server.
//!
//! `options.rs` parses the query, `run_selection.rs` selects a run of the container by its status. Status codes and
//! messages are upstream's, since the API server passes them on to users.

mod options;
mod run_selection;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use jiff::Timestamp;

use crate::error::error_chain;
use crate::pod_lookup::{find_pod, has_container};
use crate::pod_source::PodSource;

/// Why a request for a log is rejected.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum ContainerLogsError {
    #[error(r#"{{"message": "Unable to decode query."}}"#)]
    Undecodable,
    #[error(r#"{{"message": "Invalid request."}}"#)]
    Invalid,
    #[error("pod {pod:?} does not exist")]
    NoPod { pod: String },
    #[error("container {container:?} not found in pod {pod:?}")]
    NoContainer { container: String, pod: String },
    #[error("{0}")]
    NoLog(String),
}

impl ContainerLogsError {
    fn code(&self) -> StatusCode {
        match self {
            Self::Undecodable | Self::NoLog(_) => StatusCode::BAD_REQUEST,
            Self::Invalid => StatusCode::UNPROCESSABLE_ENTITY,
            Self::NoPod { .. } | Self::NoContainer { .. } => StatusCode::NOT_FOUND,
        }
    }
}

impl IntoResponse for ContainerLogsError {
    fn into_response(self) -> Response {
        (self.code(), self.to_string()).into_response()
    }
}

/// The endpoint.
pub(crate) async fn container_logs(
    State(source): State<Arc<dyn PodSource>>,
    Path((namespace, pod, container)): Path<(String, String, String)>,
    RawQuery(query): RawQuery,
) -> Response {
    let request = LogRequest {
        namespace,
        pod,
        container,
        query: query.unwrap_or_default(),
    };
    request
        .respond(&*source)
        .await
        .unwrap_or_else(IntoResponse::into_response)
}

/// A request with an unparsed query.
struct LogRequest {
    namespace: String,
    pod: String,
    container: String,
    query: String,
}

impl LogRequest {
    async fn respond(self, source: &dyn PodSource) -> Result<Response, ContainerLogsError> {
        let mut options = options::parse(&self.container, &self.query, Timestamp::now())?;
        let pod = find_pod(source, &self.namespace, &self.pod);
        let pod = pod.ok_or_else(|| ContainerLogsError::NoPod {
            pod: self.pod.clone(),
        })?;
        if !has_container(&pod, &self.container) {
            return Err(ContainerLogsError::NoContainer {
                container: self.container,
                pod: self.pod,
            });
        }
        options.previous =
            run_selection::select_previous_run(&pod, &self.container, options.previous)
                .map_err(|error| ContainerLogsError::NoLog(error.to_string()))?;

        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let log = source
            .logs(uid, options)
            .await
            .map_err(|error| ContainerLogsError::NoLog(error_chain(&*error)))?;
        let plain = [(header::CONTENT_TYPE, "text/plain")];
        Ok((plain, Body::from_stream(log)).into_response())
    }
}
