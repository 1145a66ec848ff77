//! `/portForward`: connections to ports of a pod.
//!
//! SPDY, raw or tunnelled in a WebSocket, is in `spdy.rs` and `pairs.rs`; WebSocket channels, which few clients use, are in
//! `websocket.rs` and `ports.rs`. `relay.rs` copies the bytes for both.

mod pairs;
mod ports;
mod relay;
mod spdy;
#[cfg(test)]
mod tests;
mod websocket;

use std::sync::Arc;

use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use hyper::upgrade::OnUpgrade;
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::PodPhase;
use crate::pod_lookup::find_pod;
use crate::pod_source::PodSource;
use crate::remotecommand::run_until_either_ends;
use crate::routes::ApiState;
use crate::spdy::SpdyConnection;
use crate::streams::{StreamDriver, StreamProtocol, StreamTimeouts};
use crate::upgrade::{UpgradeError, accept_spdy};
use crate::websocket::{Channels, Encoding, Tunnel, accept, is_websocket, requested_protocols};

const FORWARD_SPDY_PROTOCOLS: &[(&str, ())] = &[("portforward.k8s.io", ())];
const TUNNEL_PROTOCOLS: &[(&str, ())] = &[("SPDY/3.1+portforward.k8s.io", ())];
const TUNNEL_PREFIX: &str = "SPDY/3.1+";

/// The path parameters of a request.
#[derive(Debug, Deserialize)]
pub(crate) struct PodPath {
    namespace: String,
    pod: String,
    uid: Option<String>,
}

/// The pod of a request.
#[derive(Clone, Debug)]
struct TargetPod {
    name: String,
    uid: String,
}

impl TargetPod {
    /// The message for the error stream of a failed connection.
    fn error_message(&self, port: u16, error: &str) -> String {
        let Self { name, uid } = self;
        format!("error forwarding port {port} to pod {name}, uid {uid}: {error}")
    }
}

/// Why a request is rejected; the messages are upstream's.
#[derive(Debug, thiserror::Error)]
enum PortForwardError {
    #[error(transparent)]
    PortQueryError(#[from] ports::PortQueryError),
    #[error("pod does not exist")]
    NoPod,
    #[error("pod not found")]
    UidMismatch,
    #[error("pod not found ({0:?})")]
    NotRunning(String),
    #[error(transparent)]
    Upgrade(#[from] UpgradeError),
}

impl IntoResponse for PortForwardError {
    fn into_response(self) -> Response {
        let code = match self {
            Self::Upgrade(error) => return error.into_response(),
            Self::PortQueryError(_) => StatusCode::BAD_REQUEST,
            Self::NoPod | Self::UidMismatch => StatusCode::NOT_FOUND,
            Self::NotRunning(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (code, self.to_string()).into_response()
    }
}

/// The endpoint.
pub(crate) async fn port_forward(
    State(api): State<ApiState>,
    Path(target): Path<PodPath>,
    request: Request,
) -> Response {
    handle(&api, &target, request).unwrap_or_else(IntoResponse::into_response)
}

fn handle(
    api: &ApiState,
    target: &PodPath,
    mut request: Request,
) -> Result<Response, PortForwardError> {
    let on_upgrade = request.extensions_mut().remove::<OnUpgrade>();
    let (method, headers) = (request.method(), request.headers());
    let websocket = is_websocket(headers);
    let tunnel = websocket
        && requested_protocols(headers)
            .iter()
            .any(|protocol| protocol.starts_with(TUNNEL_PREFIX));
    let ports = if websocket && !tunnel {
        ports::parse(request.uri().query().unwrap_or_default())?
    } else {
        Vec::new()
    };
    let pod = find_target(api, target)?;

    let (timeouts, pods) = (api.timeouts, Arc::clone(&api.pods));
    if tunnel {
        let accepted = accept(method, headers, TUNNEL_PROTOCOLS).map_err(UpgradeError::from)?;
        let on_upgrade = on_upgrade.ok_or(UpgradeError::NotUpgradable)?;
        let serve = move |io| async move {
            serve_spdy(io, Tunnel::new(SpdyConnection::new()), timeouts, pod, pods).await;
        };
        return Ok(api
            .upgrades
            .switch_protocols(on_upgrade, accepted.headers, serve));
    }
    if websocket {
        let accepted = accept(method, headers, websocket::FORWARD_WEBSOCKET_PROTOCOLS)
            .map_err(UpgradeError::from)?;
        let on_upgrade = on_upgrade.ok_or(UpgradeError::NotUpgradable)?;
        let encoding = accepted.protocol;
        let serve = move |io| async move {
            serve_channels(io, encoding, timeouts, ports, pod, pods).await;
        };
        return Ok(api
            .upgrades
            .switch_protocols(on_upgrade, accepted.headers, serve));
    }
    let accepted = accept_spdy(headers, FORWARD_SPDY_PROTOCOLS)?;
    let on_upgrade = on_upgrade.ok_or(UpgradeError::NotUpgradable)?;
    let serve = move |io| async move {
        serve_spdy(io, SpdyConnection::new(), timeouts, pod, pods).await;
    };
    Ok(api
        .upgrades
        .switch_protocols(on_upgrade, accepted.headers, serve))
}

fn find_target(api: &ApiState, target: &PodPath) -> Result<TargetPod, PortForwardError> {
    let pod =
        find_pod(&*api.pods, &target.namespace, &target.pod).ok_or(PortForwardError::NoPod)?;
    let uid = pod.metadata.uid.clone().unwrap_or_default();
    if target
        .uid
        .as_ref()
        .is_some_and(|requested| *requested != uid)
    {
        return Err(PortForwardError::UidMismatch);
    }
    if PodPhase::of(pod.status.as_ref()).is_terminal() {
        let full_name = format!("{}_{}", target.pod, target.namespace);
        return Err(PortForwardError::NotRunning(full_name));
    }
    let name = target.pod.clone();
    Ok(TargetPod { name, uid })
}

async fn serve_spdy(
    io: impl AsyncRead + AsyncWrite + Send,
    protocol: impl StreamProtocol,
    timeouts: StreamTimeouts,
    pod: TargetPod,
    pods: Arc<dyn PodSource>,
) {
    let (mut driver, commands) = StreamDriver::new(protocol, timeouts);
    let opened = driver.opened();
    let session = spdy::run(opened, commands, pod, pods);
    run_until_either_ends(driver.run(io), session).await;
}

async fn serve_channels(
    io: impl AsyncRead + AsyncWrite + Send,
    encoding: Encoding,
    timeouts: StreamTimeouts,
    ports: Vec<u16>,
    pod: TargetPod,
    pods: Arc<dyn PodSource>,
) {
    let (mut driver, commands) = StreamDriver::new(Channels::new(encoding), timeouts);
    let channels = websocket::channels(&mut driver, &commands, &ports);
    drop(commands);
    let session = websocket::run(channels, pod, &*pods);
    run_until_either_ends(driver.run(io), session).await;
}
