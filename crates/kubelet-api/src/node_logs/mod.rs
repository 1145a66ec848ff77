//! `GET /logs/…`: the log of the kubelet, the only service of our own on a node.
//!
//! `?query=kubelet` is upstream's node log query. Without a query there is a directory with one file.

mod query;

use std::sync::Arc;

use axum::extract::{Path, RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use self::query::{NodeLogsError, NodeLogsQuery};
use crate::pod_source::PodSource;
use crate::stats::{NodeSource, node_or_unavailable};

/// The only service with a log.
const SERVICE: &str = "kubelet";
/// The name of its log file.
const FILE: &str = "kubelet.log";

/// `GET /logs/`
pub(crate) async fn list(
    State(source): State<Arc<dyn PodSource>>,
    RawQuery(query): RawQuery,
) -> Response {
    respond(&*source, "", &query.unwrap_or_default())
}

/// `GET /logs/PATH`
pub(crate) async fn file(
    State(source): State<Arc<dyn PodSource>>,
    Path(path): Path<String>,
    RawQuery(query): RawQuery,
) -> Response {
    respond(&*source, &path, &query.unwrap_or_default())
}

fn respond(source: &dyn PodSource, path: &str, query: &str) -> Response {
    let node = match node_or_unavailable(source) {
        Ok(node) => node,
        Err(response) => return *response,
    };
    match query::parse(query) {
        Err(NodeLogsError::Undecodable(message)) => plain_error(StatusCode::BAD_REQUEST, message),
        Err(NodeLogsError::Invalid(message)) => plain_error(StatusCode::NOT_ACCEPTABLE, message),
        Ok(Some(_)) if !path.is_empty() => plain_error(
            StatusCode::NOT_ACCEPTABLE,
            "path not allowed in query mode".to_owned(),
        ),
        Ok(Some(query)) => run_query(&*node, &query),
        Ok(None) => serve_file(&*node, path),
    }
}

fn run_query(node: &dyn NodeSource, query: &NodeLogsQuery) -> Response {
    if let Some(path) = query.files.first() {
        return serve_file(node, path.trim_start_matches('/'));
    }
    let mut text = String::new();
    for service in &query.services {
        if service != SERVICE {
            // Like upstream: report it in the text, since other requested services may have logs.
            text.push_str(&format!(
                "\nno log of service {service:?} on this node, only of {SERVICE:?}\n"
            ));
        } else if !query.earlier_boot {
            text.push_str(&query.text(&node.log()));
        }
    }
    plain(text)
}

fn serve_file(node: &dyn NodeSource, path: &str) -> Response {
    match path {
        "" => {
            let list = format!("<pre>\n<a href=\"{FILE}\">{FILE}</a>\n</pre>\n");
            let content_type = [(header::CONTENT_TYPE, "text/html; charset=utf-8")];
            (content_type, list).into_response()
        }
        FILE => {
            let lines = node.log().into_iter().map(|line| line.text + "\n");
            plain(lines.collect())
        }
        _ => plain_error(StatusCode::NOT_FOUND, "404 page not found".to_owned()),
    }
}

fn plain(text: String) -> Response {
    let content_type = [(header::CONTENT_TYPE, "text/plain; charset=UTF-8")];
    (content_type, text).into_response()
}

fn plain_error(code: StatusCode, message: String) -> Response {
    (code, message + "\n").into_response()
}
