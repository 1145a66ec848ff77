//! The accept loop. It is our own, because handlers must know the client's certificate.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::{Extension, Router};
use client_auth::{UnauthenticatedConnections, UnauthenticatedSlot, certificate_common_name};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;

use crate::auth::CallerIdentity;
use crate::pod_source::PodSource;
use crate::read_ahead::ReadAhead;
use crate::routes::{ApiState, router};
use crate::streams::StreamTimeouts;
use crate::upgrade::UpgradedConnections;
use crate::{AccessPolicy, ApiError, ServerIdentity};

/// Time limit for a client to authenticate: by its certificate, or by a first authorized request with a token.
const CLIENT_AUTHENTICATION_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for requests after shutdown.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// Limit for connections whose client has not authenticated: a small part of the usual limit of file descriptors.
const MAX_UNAUTHENTICATED_CLIENTS: usize = 128;
/// Size of the TLS output buffer: more than the largest chunk of a stream with its headers, so that one write sends it.
const TLS_WRITE_BUFFER: usize = 128 * 1024;
/// Delay after a failed accept, which mostly means that file descriptors ran out.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Serves the kubelet's API until `shutdown`, to the clients that `access` admits. Streams without traffic for `idle` are closed.
///
/// `Err` means that the server could not start. Errors of single connections are only logged.
pub async fn serve(
    listener: TcpListener,
    identity: ServerIdentity,
    access: AccessPolicy,
    pods: Arc<dyn PodSource>,
    idle: Duration,
    shutdown: CancellationToken,
) -> Result<(), ApiError> {
    let access = Arc::new(access);
    let acceptor = TlsAcceptor::from(Arc::new(identity.tls_config(access.accepts_tokens())?));
    // Drop the second copy of the private key; the TLS configuration has the other.
    drop(identity);
    let upgrades = UpgradedConnections::new(shutdown.clone());
    let api = ApiState {
        pods,
        timeouts: StreamTimeouts {
            idle,
            ..StreamTimeouts::default()
        },
        upgrades: upgrades.clone(),
    };
    let router = router(Arc::clone(&access), api);
    let address = listener.local_addr().map_err(ApiError::Listener)?;
    tracing::debug!(%address, "serving the kubelet API");

    let unauthenticated = UnauthenticatedConnections::new(MAX_UNAUTHENTICATED_CLIENTS);
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = shutdown.cancelled() => break,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    let connection = ClientConnection {
                        acceptor: acceptor.clone(),
                        access: Arc::clone(&access),
                        router: router.clone(),
                        authenticated: Arc::default(),
                        shutdown: shutdown.clone(),
                    };
                    connections.spawn(connection.run(stream, unauthenticated.admit()));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection to the kubelet API");
                    tokio::time::sleep(ACCEPT_RETRY_INTERVAL).await;
                }
            },
        }
    }

    drop(listener);
    let drained = tokio::time::timeout(DRAIN_TIMEOUT, async {
        while connections.join_next().await.is_some() {}
        upgrades.drained().await;
    });
    if drained.await.is_err() {
        tracing::debug!(
            left = connections.len(),
            "aborting kubelet API connections after the drain time-out"
        );
        connections.shutdown().await;
    }
    Ok(())
}

/// State of one connection.
struct ClientConnection {
    acceptor: TlsAcceptor,
    access: Arc<AccessPolicy>,
    router: Router,
    /// Notified when the client has authenticated.
    authenticated: Arc<Notify>,
    shutdown: CancellationToken,
}

impl ClientConnection {
    /// Serves the connection. Until the client has authenticated, eviction from its slot or a time-out closes it.
    async fn run(self, stream: TcpStream, slot: UnauthenticatedSlot) {
        let address = stream.peer_addr().ok();
        let authenticated = Arc::clone(&self.authenticated);
        let mut served = pin!(self.handshake_and_serve(stream));
        // Debug level: any host on the network can cause this.
        tokio::select! {
            () = &mut served => return,
            () = authenticated.notified() => {}
            () = slot.evicted() => {
                tracing::debug!(?address, "evicted an unauthenticated connection");
                return;
            }
            () = tokio::time::sleep(CLIENT_AUTHENTICATION_TIMEOUT) => {
                tracing::debug!(?address, "client did not authenticate in time");
                return;
            }
        }
        drop(slot);
        served.await;
    }

    async fn handshake_and_serve(self, stream: TcpStream) {
        // Nagle's algorithm would only delay interactive sessions: each write is complete.
        let _ = stream.set_nodelay(true);
        let stream = ReadAhead::new(stream);
        let handshake =
            (self.acceptor).accept_with(stream, |tls| tls.set_buffer_limit(Some(TLS_WRITE_BUFFER)));
        let handshake = tokio::select! {
            () = self.shutdown.cancelled() => return,
            done = handshake => done,
        };
        match handshake {
            Ok(stream) => self.serve(stream).await,
            Err(error) => tracing::debug!(%error, "TLS handshake failed"),
        }
    }

    async fn serve(self, stream: TlsStream<ReadAhead<TcpStream>>) {
        let chain = stream.get_ref().1.peer_certificates();
        let common_name = chain
            .and_then(|chain| chain.first())
            .and_then(certificate_common_name);
        let caller = if common_name.is_some_and(|name| self.access.allows_common_name(&name)) {
            self.authenticated.notify_one();
            CallerIdentity::AllowedCertificate
        } else {
            CallerIdentity::Unverified {
                authenticated: self.authenticated,
            }
        };

        let router = self.router.layer(Extension(caller));
        let service = TowerToHyperService::new(router);
        let server = auto::Builder::new(TokioExecutor::new());
        let connection = server.serve_connection_with_upgrades(TokioIo::new(stream), service);
        tokio::pin!(connection);
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            () = self.shutdown.cancelled() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "kubelet API connection failed");
        }
    }
}
