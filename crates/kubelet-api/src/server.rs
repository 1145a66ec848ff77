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

use crate::auth::Caller;
use crate::peer::peer_of;
use crate::routes::{Api, router};
use crate::seam::PodSource;
use crate::streams::Limits;
use crate::unauthenticated::{UnauthenticatedConnections, UnauthenticatedSlot};
use crate::upgrade::Upgrades;
use crate::wide::WideReads;
use crate::{Access, ApiError, ServerIdentity};

/// How long a client may take to show who it is: by a certificate, or by a token with which it may ask for something.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long requests may go on after shutdown.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// How many connections may be open at once whose client has not: a small part of the descriptors that a process mostly has.
const MAX_UNAUTHENTICATED: usize = 128;
/// How much encrypted output may wait for the socket: more than the largest piece of a stream with its headers, which would
/// be written in two parts otherwise.
const ENCRYPTED: usize = 128 * 1024;
/// How long to leave the socket alone when accepting fails, as it does when descriptors run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves the kubelet's API until `shutdown`, to those who have `access`: peers of `client_ca_pem` by their common
/// names, and owners of tokens if there is an authority to judge them. Streams that are silent for `idle` are cut.
///
/// One connection's failure is that connection's alone; an `Err` means that nothing could be served at all.
pub async fn serve(
    listener: TcpListener,
    identity: ServerIdentity,
    access: Access,
    pods: Arc<dyn PodSource>,
    idle: Duration,
    shutdown: CancellationToken,
) -> Result<(), ApiError> {
    let access = Arc::new(access);
    let acceptor = TlsAcceptor::from(Arc::new(identity.tls_config(access.takes_tokens())?));
    // The key has moved into the TLS configuration: no second copy stays around.
    drop(identity);
    let upgrades = Upgrades::new(shutdown.clone());
    let api = Api {
        pods,
        limits: Limits {
            idle,
            ..Limits::default()
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
                    let connection = Connection {
                        acceptor: acceptor.clone(),
                        access: Arc::clone(&access),
                        router: router.clone(),
                        known: Arc::default(),
                        shutdown: shutdown.clone(),
                    };
                    connections.spawn(connection.run(stream, unauthenticated.admit()));
                }
                Err(error) => {
                    tracing::warn!(%error, "the kubelet API could not accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
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
struct Connection {
    acceptor: TlsAcceptor,
    access: Arc<Access>,
    router: Router,
    /// Told when it is known who the client is.
    known: Arc<Notify>,
    shutdown: CancellationToken,
}

impl Connection {
    /// Serves an unauthenticated client as long as it has its slot, and an authenticated one for as long as it likes.
    async fn run(self, stream: TcpStream, slot: UnauthenticatedSlot) {
        let address = stream.peer_addr().ok();
        let known = Arc::clone(&self.known);
        let mut served = pin!(self.greet(stream));
        // Anybody on the network can do this to us, so it is no warning.
        tokio::select! {
            () = &mut served => return,
            () = known.notified() => {}
            () = slot.evicted() => {
                tracing::debug!(?address, "evicted an unauthenticated connection");
                return;
            }
            () = tokio::time::sleep(PATIENCE) => {
                tracing::debug!(?address, "cut a client that did not show who it is in time");
                return;
            }
        }
        drop(slot);
        served.await;
    }

    async fn greet(self, stream: TcpStream) {
        // What is written is whole: nothing is gained by waiting for more, and a key press would wait for an answer.
        let _ = stream.set_nodelay(true);
        let stream = WideReads::new(stream);
        let handshake =
            (self.acceptor).accept_with(stream, |tls| tls.set_buffer_limit(Some(ENCRYPTED)));
        let handshake = tokio::select! {
            () = self.shutdown.cancelled() => return,
            done = handshake => done,
        };
        match handshake {
            Ok(stream) => self.serve(stream).await,
            Err(error) => tracing::debug!(%error, "TLS handshake failed"),
        }
    }

    async fn serve(self, stream: TlsStream<WideReads<TcpStream>>) {
        let chain = stream.get_ref().1.peer_certificates();
        let peer = chain.and_then(|chain| chain.first()).and_then(peer_of);
        let caller = if peer.is_some_and(|peer| self.access.is_listed(&peer)) {
            self.known.notify_one();
            Caller::Listed
        } else {
            Caller::Stranger(self.known)
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
