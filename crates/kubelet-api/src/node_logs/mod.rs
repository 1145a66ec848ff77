//! `GET /logs/…`: the log of the node's agent, which is what a user's node has of its own.
//!
//! `?query=kubelet` is upstream's node log query; without a query there is a list of one file.

mod query;

use std::sync::Arc;

use axum::extract::{Path, RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::pod_source::PodSource;
use crate::stats::{NodeSource, node_or_unavailable};

/// The service whose log there is.
const SERVICE: &str = "kubelet";
/// The same as a file.
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
        Err(respond) => return *respond,
    };
    match query::parse(query) {
        Err(refusal) if refusal.unreadable => plain_error(StatusCode::BAD_REQUEST, refusal.words),
        Err(refusal) => plain_error(StatusCode::NOT_ACCEPTABLE, refusal.words),
        Ok(Some(_)) if !path.is_empty() => plain_error(
            StatusCode::NOT_ACCEPTABLE,
            "path not allowed in query mode".to_owned(),
        ),
        Ok(Some(query)) => run_query(&*node, &query),
        Ok(None) => serve_file(&*node, path),
    }
}

fn run_query(node: &dyn NodeSource, query: &query::NodeLogsQuery) -> Response {
    if let Some(path) = query.files.first() {
        return serve_file(node, path.trim_start_matches('/'));
    }
    let mut text = String::new();
    for service in &query.services {
        if service != SERVICE {
            // As upstream, an respond with a line that says so: other services may have logs.
            text.push_str(&format!(
                "\nno log of {service:?} on this node: there is one of {SERVICE:?}\n"
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
            let kind = [(header::CONTENT_TYPE, "text/html; charset=utf-8")];
            (kind, list).into_response()
        }
        FILE => {
            let lines = node.log().into_iter().map(|line| line.text + "\n");
            plain(lines.collect())
        }
        _ => plain_error(StatusCode::NOT_FOUND, "404 page not found".to_owned()),
    }
}

fn plain(text: String) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; charset=UTF-8")];
    (kind, text).into_response()
}

fn plain_error(code: StatusCode, words: String) -> Response {
    (code, words + "\n").into_response()
}
