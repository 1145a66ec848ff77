//! Requests that become something else than HTTP: what is agreed upon before, and the task that serves the rest.

use std::future::Future;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::websocket::{AcceptedUpgrade, HandshakeError};

const PROTOCOL: HeaderName = HeaderName::from_static("x-stream-protocol-version");
const ACCEPTED: HeaderName = HeaderName::from_static("x-accepted-stream-protocol-versions");
/// Upstream's name of the protocol in Upgrade headers.
const SPDY: &str = "SPDY/3.1";

/// Why a request doesn't become what it wants to be: upstream's status codes and words.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UpgradeError {
    #[error("Upgrade request required")]
    Plain,
    #[error("unable to upgrade: header X-Stream-StreamProtocol-Version does not exist in request")]
    NoProtocol,
    #[error(
        "unable to upgrade: unable to negotiate protocol: client supports [{client}], server accepts [{server}]"
    )]
    Protocol { client: String, server: String },
    #[error("unable to upgrade websocket connection: {0}")]
    WebSocket(#[from] HandshakeError),
    #[error("unable to upgrade: unable to hijack response")]
    Impossible,
}

impl IntoResponse for UpgradeError {
    fn into_response(self) -> Response {
        let code = match &self {
            Self::Plain | Self::NoProtocol => StatusCode::BAD_REQUEST,
            Self::Protocol { .. } | Self::WebSocket(HandshakeError::Protocol { .. }) => {
                StatusCode::FORBIDDEN
            }
            Self::WebSocket(_) => StatusCode::BAD_REQUEST,
            Self::Impossible => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let mut response = (code, format!("{self}\n")).into_response();
        if let Self::Protocol { server, .. } = &self {
            for protocol in server.split(' ') {
                if let Ok(value) = HeaderValue::try_from(protocol) {
                    response.headers_mut().append(ACCEPTED, value);
                }
            }
        }
        response
    }
}

/// Agrees on what is carried by SPDY: the first of the client's protocols that is among `supported`.
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
        return Err(UpgradeError::Plain);
    }
    let values = headers.get_all(PROTOCOL).iter();
    let client: Vec<_> = values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|protocol| protocol.trim_matches(' '))
        .filter(|protocol| !protocol.is_empty())
        .collect();
    if client.is_empty() {
        return Err(UpgradeError::NoProtocol);
    }
    let both = |name: &&str| supported.iter().find(|(known, _)| known == name);
    let Some((name, protocol)) = client.iter().find_map(both) else {
        let server: Vec<_> = supported.iter().map(|(name, _)| *name).collect();
        return Err(UpgradeError::Protocol {
            client: client.join(" "),
            server: server.join(" "),
        });
    };
    let mut headers = HeaderMap::new();
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static(SPDY));
    headers.insert(PROTOCOL, HeaderValue::from_static(name));
    let protocol = *protocol;
    Ok(AcceptedUpgrade { protocol, headers })
}

/// Where the tasks of upgraded connections live: the server waits for them when it ends.
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

    /// Answers with the headers that were agreed upon, and serves the connection from then on.
    pub(crate) fn switch<F, S>(
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
                        tracing::debug!(%error, "a connection was gone before its upgrade")
                    }
                }
            };
            tokio::select! {
                () = served => {}
                () = shutdown.cancelled() => tracing::debug!("cutting a stream: the node ends"),
            }
        });
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        *response.headers_mut() = headers;
        response
    }

    /// Waits until the last task is gone, after the shutdown.
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
            headers.append(PROTOCOL, HeaderValue::from_static(protocol));
        }
        headers
    }

    const SUPPORTED: &[(&str, u8)] = &[("v4.channel.k8s.io", 4), ("channel.k8s.io", 1)];

    #[test]
    fn the_protocol_that_the_client_likes_best_is_taken() {
        let both = request(&["v5.channel.k8s.io", "v4.channel.k8s.io", "channel.k8s.io"]);
        let accepted = accept_spdy(&both, SUPPORTED).unwrap();
        assert_eq!(accepted.protocol, 4);
        assert_eq!(accepted.headers[PROTOCOL], "v4.channel.k8s.io");
        let listed = request(&["channel.k8s.io, v4.channel.k8s.io"]);
        assert_eq!(accept_spdy(&listed, SUPPORTED).unwrap().protocol, 1);
    }

    #[test]
    fn what_can_not_be_agreed_upon_is_refused_with_what_could_be() {
        let refused = accept_spdy(&request(&["v9.channel.k8s.io"]), SUPPORTED).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "unable to upgrade: unable to negotiate protocol: client supports [v9.channel.k8s.io], \
             server accepts [v4.channel.k8s.io channel.k8s.io]"
        );
        let response = refused.into_response();
        assert_eq!(response.status(), StatusCode::FORBIDDEN);
        let offered: Vec<_> = response.headers().get_all(ACCEPTED).iter().collect();
        assert_eq!(offered, ["v4.channel.k8s.io", "channel.k8s.io"]);
    }

    #[test]
    fn what_wants_no_upgrade_is_refused() {
        let refused = |headers: &HeaderMap| accept_spdy(headers, SUPPORTED).unwrap_err();
        assert_eq!(refused(&HeaderMap::new()), UpgradeError::Plain);
        assert_eq!(refused(&request(&[])), UpgradeError::NoProtocol);
        assert_eq!(refused(&request(&[" "])), UpgradeError::NoProtocol);
    }
}
