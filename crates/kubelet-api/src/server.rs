//! The accept loop: ours and not a library's, because handlers must know the peer's certificate.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::{Extension, Router};
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
use crate::certificate_name::certificate_common_name;
use crate::pod_source::PodSource;
use crate::read_ahead::ReadAhead;
use crate::routes::{ApiState, router};
use crate::streams::StreamTimeouts;
use crate::unauthenticated::{UnauthenticatedConnections, UnauthenticatedSlot};
use crate::upgrade::UpgradedConnections;
use crate::{AccessPolicy, ApiError, ServerIdentity};

/// How long a client may take to show who it is: by a certificate, or by a token with which it may ask for something.
const AUTHENTICATION_TIMEOUT: Duration = Duration::from_secs(10);
/// How long requests may go on after shutdown.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// How many connections may be open at once whose client has not: a small part of the descriptors that a process mostly has.
const MAX_UNAUTHENTICATED: usize = 128;
/// How much encrypted output may wait for the socket: more than the largest piece of a stream with its headers, which would
/// be written in two parts otherwise.
const TLS_WRITE_BUFFER: usize = 128 * 1024;
/// How long to leave the socket alone when accepting fails, as it does when descriptors run out.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Serves the kubelet's API until `shutdown`, to those who have `access`: peers of `client_ca_pem` by their common
/// names, and owners of tokens if there is an authority to judge them. RequestedStreams that are silent for `idle` are cut.
///
/// One connection's failure is that connection's alone; an `Err` means that nothing could be served at all.
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
    // The key has moved into the TLS configuration: no second copy stays around.
    drop(identity);
    let upgrades = UpgradedConnections::new(shutdown.clone());
    let api = ApiState {
        pods,
        limits: StreamTimeouts {
            idle,
            ..StreamTimeouts::default()
        },
        upgrades: upgrades.clone(),
    };
    let router = router(Arc::clone(&access), api);
    let address = listener.local_addr().map_err(ApiError::Listener)?;
    tracing::debug!(%address, "serving the kubelet API");

    let unauthenticated = UnauthenticatedConnections::new(MAX_UNAUTHENTICATED);
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
                    tracing::warn!(%error, "the kubelet API could not accept a connection");
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
            "cutting kubelet API connections that did not end"
        );
        connections.shutdown().await;
    }
    Ok(())
}

/// One connection, and what it needs of the server.
struct ClientConnection {
    acceptor: TlsAcceptor,
    access: Arc<AccessPolicy>,
    router: Router,
    /// Told when it is authenticated who the client is.
    authenticated: Arc<Notify>,
    shutdown: CancellationToken,
}

impl ClientConnection {
    /// Serves an unauthenticated client as long as it has its slot, and an authenticated one for as long as it likes.
    async fn run(self, stream: TcpStream, slot: UnauthenticatedSlot) {
        let address = stream.peer_addr().ok();
        let authenticated = Arc::clone(&self.authenticated);
        let mut served = pin!(self.handshake_and_serve(stream));
        // Anybody on the network can do this to us, so it is no warning.
        tokio::select! {
            () = &mut served => return,
            () = authenticated.notified() => {}
            () = slot.evicted() => {
                tracing::debug!(?address, "evicted an unauthenticated connection");
                return;
            }
            () = tokio::time::sleep(AUTHENTICATION_TIMEOUT) => {
                tracing::debug!(?address, "cut a client that did not show who it is in time");
                return;
            }
        }
        drop(slot);
        served.await;
    }

    async fn handshake_and_serve(self, stream: TcpStream) {
        // What is written is whole: nothing is gained by waiting for more, and a key press would wait for an answer.
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
            tracing::debug!(%error, "a kubelet API connection ended early");
        }
    }
}
