//! HTTP upgrades: negotiates the protocol, and runs the task that serves the upgraded connection.

use std::future::Future;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::websocket::{AcceptedUpgrade, HandshakeError, select_protocol};

const PROTOCOL_HEADER: HeaderName = HeaderName::from_static("x-stream-protocol-version");
const ACCEPTED_PROTOCOLS_HEADER: HeaderName =
    HeaderName::from_static("x-accepted-stream-protocol-versions");
/// Upstream's name of the protocol in Upgrade headers.
const SPDY: &str = "SPDY/3.1";

/// Why an upgrade fails; status codes and messages are upstream's.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UpgradeError {
    #[error("Upgrade request required")]
    NotRequested,
    #[error("unable to upgrade: header X-Stream-Protocol-Version does not exist in request")]
    MissingProtocol,
    #[error(
        "unable to upgrade: unable to negotiate protocol: client supports [{client}], server accepts [{server}]"
    )]
    Protocol { client: String, server: String },
    #[error("unable to upgrade websocket connection: {0}")]
    WebSocket(#[from] HandshakeError),
    #[error("unable to upgrade: unable to hijack response")]
    NotUpgradable,
}

impl IntoResponse for UpgradeError {
    fn into_response(self) -> Response {
        let code = match &self {
            Self::NotRequested | Self::MissingProtocol => StatusCode::BAD_REQUEST,
            Self::Protocol { .. } | Self::WebSocket(HandshakeError::Protocol { .. }) => {
                StatusCode::FORBIDDEN
            }
            Self::WebSocket(_) => StatusCode::BAD_REQUEST,
            Self::NotUpgradable => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let mut response = (code, format!("{self}\n")).into_response();
        if let Self::Protocol { server, .. } = &self {
            for protocol in server.split(' ') {
                if let Ok(value) = HeaderValue::try_from(protocol) {
                    response
                        .headers_mut()
                        .append(ACCEPTED_PROTOCOLS_HEADER, value);
                }
            }
        }
        response
    }
}

/// Accepts an upgrade to SPDY with the first of the client's protocols that is in `supported`.
pub(crate) fn accept_spdy<T: Copy>(
    headers: &HeaderMap,
    supported: &[(&'static str, T)],
) -> Result<AcceptedUpgrade<T>, UpgradeError> {
    let holds = |name, part: &str| {
        let mut values = headers.get_all(name).iter();
        let lower = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).to_lowercase();
        values.any(|value| lower(value).contains(part))
    };
    if !holds(header::CONNECTION, "upgrade") || !holds(header::UPGRADE, "spdy/3.1") {
        return Err(UpgradeError::NotRequested);
    }
    let values = headers.get_all(PROTOCOL_HEADER).iter();
    let client: Vec<_> = values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|protocol| protocol.trim_matches(' '))
        .filter(|protocol| !protocol.is_empty())
        .collect();
    if client.is_empty() {
        return Err(UpgradeError::MissingProtocol);
    }
    let (name, protocol) = select_protocol(&client, supported)
        .map_err(|(client, server)| UpgradeError::Protocol { client, server })?;
    let mut headers = HeaderMap::new();
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static(SPDY));
    headers.insert(PROTOCOL_HEADER, HeaderValue::from_static(name));
    Ok(AcceptedUpgrade { protocol, headers })
}

/// The tasks of upgraded connections. The server waits for them when it shuts down.
#[derive(Clone, Debug)]
pub(crate) struct UpgradedConnections {
    tasks: TaskTracker,
    shutdown: CancellationToken,
}

impl UpgradedConnections {
    pub(crate) fn new(shutdown: CancellationToken) -> Self {
        let tasks = TaskTracker::new();
        Self { tasks, shutdown }
    }

    /// Responds with 101 and these headers, then runs `serve` on the upgraded connection.
    pub(crate) fn switch_protocols<F, S>(
        &self,
        on_upgrade: OnUpgrade,
        headers: HeaderMap,
        serve: S,
    ) -> Response
    where
        S: FnOnce(TokioIo<Upgraded>) -> F + Send + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let shutdown = self.shutdown.clone();
        self.tasks.spawn(async move {
            let served = async {
                match on_upgrade.await {
                    Ok(io) => serve(TokioIo::new(io)).await,
                    Err(error) => {
                        tracing::debug!(%error, "connection closed before its upgrade")
                    }
                }
            };
            tokio::select! {
                () = served => {}
                () = shutdown.cancelled() => tracing::debug!("closing upgraded connection: the server shuts down"),
            }
        });
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        *response.headers_mut() = headers;
        response
    }

    /// Waits for the last task, after the shutdown.
    pub(crate) async fn drained(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(protocols: &[&'static str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("SPDY/3.1"));
        for protocol in protocols {
            headers.append(PROTOCOL_HEADER, HeaderValue::from_static(protocol));
        }
        headers
    }

    const SUPPORTED: &[(&str, u8)] = &[("v4.channel.k8s.io", 4), ("channel.k8s.io", 1)];

    #[test]
    fn first_supported_protocol_of_the_client_is_chosen() {
        let several = request(&["v5.channel.k8s.io", "v4.channel.k8s.io", "channel.k8s.io"]);
        let accepted = accept_spdy(&several, SUPPORTED).unwrap();
        assert_eq!(accepted.protocol, 4);
        assert_eq!(accepted.headers[PROTOCOL_HEADER], "v4.channel.k8s.io");
        let listed = request(&["channel.k8s.io, v4.channel.k8s.io"]);
        assert_eq!(accept_spdy(&listed, SUPPORTED).unwrap().protocol, 1);
    }

    #[test]
    fn rejection_lists_supported_protocols() {
        let error = accept_spdy(&request(&["v9.channel.k8s.io"]), SUPPORTED).unwrap_err();
        assert_eq!(
            error.to_string(),
            "unable to upgrade: unable to negotiate protocol: client supports [v9.channel.k8s.io], \
             server accepts [v4.channel.k8s.io channel.k8s.io]"
        );
        let response = error.into_response();
        assert_eq!(response.status(), StatusCode::FORBIDDEN);
        let offered: Vec<_> = response
            .headers()
            .get_all(ACCEPTED_PROTOCOLS_HEADER)
            .iter()
            .collect();
        assert_eq!(offered, ["v4.channel.k8s.io", "channel.k8s.io"]);
    }

    #[test]
    fn request_without_upgrade_headers_is_rejected() {
        let error = |headers: &HeaderMap| accept_spdy(headers, SUPPORTED).unwrap_err();
        assert_eq!(error(&HeaderMap::new()), UpgradeError::NotRequested);
        assert_eq!(error(&request(&[])), UpgradeError::MissingProtocol);
        assert_eq!(error(&request(&[" "])), UpgradeError::MissingProtocol);
    }
}
