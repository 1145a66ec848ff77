//! `/exec` and `/attach`: connects a client's streams to a process in a container.
//!
//! This file checks the request and upgrades the connection. `options.rs` parses the query; `spdy.rs` and
//! `websocket.rs` map the protocol's streams to stdin, stdout, stderr, resize and error; `session.rs` copies between them and the process;
//! `status.rs` formats the exit status. `run.rs` is `/run`: a command without streams.

mod options;
mod resize;
mod run;
mod session;
mod spdy;
mod status;
#[cfg(test)]
mod tests;
mod websocket;

use std::sync::Arc;

use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use futures::future::BoxFuture;
use hyper::upgrade::OnUpgrade;
use k8s_openapi::api::core::v1::Pod;
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncWrite};

use self::options::RemoteCommandOptions;
pub(crate) use self::run::run;
use crate::pod_lookup::{find_pod, has_container, has_tty, is_running};
use crate::pod_source::{
    AttachOptions, ContainerSession, ExecOptions, PodSource, RequestedStreams, SessionError,
};
use crate::routes::ApiState;
use crate::spdy::SpdyConnection;
use crate::streams::{ConnectionEnd, StreamDriver, StreamTimeouts};
use crate::upgrade::{UpgradeError, accept_spdy};
use crate::websocket::{accept, is_websocket};

/// Which endpoint a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RemoteCommandKind {
    Exec,
    Attach,
}

/// The path parameters of a request.
#[derive(Debug, Deserialize)]
pub(crate) struct ContainerPath {
    namespace: String,
    pod: String,
    uid: Option<String>,
    container: String,
}

/// Why a request is rejected; the messages are upstream's.
#[derive(Debug, thiserror::Error)]
enum RemoteCommandError {
    #[error(transparent)]
    NoStreamRequested(#[from] options::NoStreamRequested),
    #[error("pod does not exist")]
    NoPod,
    #[error("container not found ({container:?})")]
    NotRunningForExec { container: String },
    #[error("container {container} not found in pod {pod}_{namespace}")]
    NotRunningForAttach {
        container: String,
        pod: String,
        namespace: String,
    },
    #[error("tty and stderr cannot both be true")]
    TtyAndStderr,
    #[error("you must specify at least one command for the container")]
    NoCommand,
    #[error(transparent)]
    Upgrade(#[from] UpgradeError),
}

impl IntoResponse for RemoteCommandError {
    fn into_response(self) -> Response {
        let code = match self {
            Self::Upgrade(error) => return error.into_response(),
            Self::NoStreamRequested(_) | Self::NoCommand => StatusCode::BAD_REQUEST,
            Self::NoPod => StatusCode::NOT_FOUND,
            Self::NotRunningForExec { .. }
            | Self::NotRunningForAttach { .. }
            | Self::TtyAndStderr => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (code, self.to_string()).into_response()
    }
}

/// `/exec/…`
pub(crate) async fn exec(
    State(api): State<ApiState>,
    Path(target): Path<ContainerPath>,
    request: Request,
) -> Response {
    handle(RemoteCommandKind::Exec, &api, target, request)
}

/// `/attach/…`
pub(crate) async fn attach(
    State(api): State<ApiState>,
    Path(target): Path<ContainerPath>,
    request: Request,
) -> Response {
    handle(RemoteCommandKind::Attach, &api, target, request)
}

fn handle(
    kind: RemoteCommandKind,
    api: &ApiState,
    target: ContainerPath,
    request: Request,
) -> Response {
    let checked = check_request(kind, api, target, &request);
    checked
        .and_then(|checked| checked.upgrade(api, request))
        .unwrap_or_else(IntoResponse::into_response)
}

/// Checks a request as far as possible before the upgrade.
fn check_request(
    kind: RemoteCommandKind,
    api: &ApiState,
    target: ContainerPath,
    request: &Request,
) -> Result<CheckedRequest, RemoteCommandError> {
    let options = options::parse(request.uri().query().unwrap_or_default())?;
    let (pod, uid) = find_running(kind, api, &target)?;
    if kind == RemoteCommandKind::Exec && options.command.is_empty() {
        return Err(RemoteCommandError::NoCommand);
    }
    let has_tty = has_tty(&pod, &target.container);
    if kind == RemoteCommandKind::Attach && has_tty && options.streams.stderr {
        return Err(RemoteCommandError::TtyAndStderr);
    }
    Ok(CheckedRequest {
        kind,
        uid,
        has_tty,
        container: target.container,
        options,
    })
}

/// The pod and its uid, if the container is running or attachable.
fn find_running(
    kind: RemoteCommandKind,
    api: &ApiState,
    target: &ContainerPath,
) -> Result<(Arc<Pod>, String), RemoteCommandError> {
    let pod =
        find_pod(&*api.pods, &target.namespace, &target.pod).ok_or(RemoteCommandError::NoPod)?;
    let uid = pod.metadata.uid.clone().unwrap_or_default();
    let uid_differs = target
        .uid
        .as_ref()
        .is_some_and(|requested| *requested != uid);
    let container = &target.container;
    let is_available = match kind {
        RemoteCommandKind::Exec => is_running(&pod, container),
        RemoteCommandKind::Attach => {
            is_running(&pod, container)
                || has_container(&pod, container) && api.pods.is_attachable(&uid, container)
        }
    };
    if uid_differs || !is_available {
        let container = target.container.clone();
        return Err(match kind {
            RemoteCommandKind::Exec => RemoteCommandError::NotRunningForExec { container },
            RemoteCommandKind::Attach => RemoteCommandError::NotRunningForAttach {
                container,
                pod: target.pod.clone(),
                namespace: target.namespace.clone(),
            },
        });
    }
    Ok((pod, uid))
}

/// A request that has passed all checks.
struct CheckedRequest {
    kind: RemoteCommandKind,
    uid: String,
    container: String,
    has_tty: bool,
    options: RemoteCommandOptions,
}

impl CheckedRequest {
    fn upgrade(self, api: &ApiState, mut request: Request) -> Result<Response, RemoteCommandError> {
        let on_upgrade = request.extensions_mut().remove::<OnUpgrade>();
        let headers = request.headers();
        let requested = self.options.streams;
        if is_websocket(headers) {
            let accepted = accept(
                request.method(),
                headers,
                websocket::COMMAND_WEBSOCKET_PROTOCOLS,
            )
            .map_err(UpgradeError::from)?;
            let on_upgrade = on_upgrade.ok_or(UpgradeError::NotUpgradable)?;
            let (version, timeouts) = (accepted.protocol, api.timeouts);
            let pods = Arc::clone(&api.pods);
            let serve = move |io| async move {
                serve_websocket(io, timeouts, requested, version, self, pods).await;
            };
            return Ok(api
                .upgrades
                .switch_protocols(on_upgrade, accepted.headers, serve));
        }
        let accepted = accept_spdy(headers, spdy::COMMAND_SPDY_PROTOCOLS)?;
        let on_upgrade = on_upgrade.ok_or(UpgradeError::NotUpgradable)?;
        let (version, timeouts) = (accepted.protocol, api.timeouts);
        let pods = Arc::clone(&api.pods);
        let serve = move |io| async move {
            serve_spdy(io, timeouts, requested, version, self, pods).await;
        };
        Ok(api
            .upgrades
            .switch_protocols(on_upgrade, accepted.headers, serve))
    }

    /// Starts the session in the container.
    fn start(
        self,
        pods: &dyn PodSource,
    ) -> BoxFuture<'static, Result<ContainerSession, SessionError>> {
        let (container, streams) = (self.container, self.options.streams);
        match self.kind {
            RemoteCommandKind::Exec => {
                let command = self.options.command;
                let options = ExecOptions {
                    container,
                    command,
                    streams,
                };
                pods.exec(&self.uid, options)
            }
            RemoteCommandKind::Attach => {
                // The container's spec decides about the terminal, not the client.
                let tty = self.has_tty;
                let streams = RequestedStreams { tty, ..streams };
                pods.attach(&self.uid, AttachOptions { container, streams })
            }
        }
    }
}

async fn serve_websocket(
    io: impl AsyncRead + AsyncWrite + Send,
    timeouts: StreamTimeouts,
    requested: RequestedStreams,
    version: websocket::ChannelVersion,
    checked: CheckedRequest,
    pods: Arc<dyn PodSource>,
) {
    let (mut driver, commands) = StreamDriver::new(websocket::protocol(version), timeouts);
    let client = websocket::streams(&mut driver, &commands, requested, version);
    drop(commands);
    let kind = checked.kind;
    let session = async {
        if websocket::send_initial_message(&client).await.is_ok() {
            session::run(kind, client, checked.start(&*pods)).await;
        }
    };
    run_until_either_ends(driver.run(io), session).await;
}

async fn serve_spdy(
    io: impl AsyncRead + AsyncWrite + Send,
    timeouts: StreamTimeouts,
    requested: RequestedStreams,
    version: spdy::SpdyVersion,
    checked: CheckedRequest,
    pods: Arc<dyn PodSource>,
) {
    let (mut driver, commands) = StreamDriver::new(SpdyConnection::new(), timeouts);
    let opened = driver.opened();
    let kind = checked.kind;
    let session = async {
        match spdy::streams(opened, &commands, requested, version).await {
            Ok(client) => {
                session::run(kind, client, checked.start(&*pods)).await;
            }
            Err(error) => tracing::debug!(%error, "client did not open its streams"),
        }
        drop(commands);
    };
    run_until_either_ends(driver.run(io), session).await;
}

/// Runs a session on its connection. If the connection ends first, the session is dropped. If the session ends first, it drops its
/// [`CommandSender`](crate::streams::CommandSender), and the connection closes in order.
pub(crate) async fn run_until_either_ends(
    connection: impl Future<Output = ConnectionEnd>,
    session: impl Future<Output = ()>,
) {
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = &mut connection => ended,
        () = session => connection.await,
    };
    tracing::debug!(reason = %ended, "stream connection ended");
}
