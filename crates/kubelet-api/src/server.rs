//! The accept loop: ours and not a library's, because handlers must know the peer's certificate.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::{Extension, Router};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;

use crate::peer::peer_of;
use crate::routes::{Api, router};
use crate::seam::PodSource;
use crate::streams::Limits;
use crate::upgrade::Upgrades;
use crate::wide::WideReads;
use crate::{Access, ApiError, Peer, ServerIdentity};

/// How long a client may take to prove who it is.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long requests may go on after shutdown.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// How many strangers may be in their handshake at once; the next waits in the kernel's queue.
const MAX_HANDSHAKES: usize = 256;
/// How much encrypted output may wait for the socket: more than the largest piece of a stream with its headers, which would
/// be written in two parts otherwise.
const ENCRYPTED: usize = 128 * 1024;
/// How long to leave the socket alone when accepting fails, as it does when descriptors run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves the kubelet's API until `shutdown`, to those who have `access`: peers of `client_ca_pem` by their common
/// names, and others if there is an authority to judge them. Streams that are silent for `idle` are cut.
///
/// One connection's failure is that connection's alone; an `Err` means that nothing could be served at all.
pub async fn serve(
    listener: TcpListener,
    identity: ServerIdentity,
    access: impl Into<Access>,
    pods: Arc<dyn PodSource>,
    idle: Duration,
    shutdown: CancellationToken,
) -> Result<(), ApiError> {
    let access = access.into();
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
    let router = router(access, api);
    let address = listener.local_addr().map_err(ApiError::Listener)?;
    tracing::debug!(%address, "serving the kubelet API");

    let handshakes = Arc::new(Semaphore::new(MAX_HANDSHAKES));
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = shutdown.cancelled() => break,
            Some(_) = connections.join_next() => {}
            accepted = accept(&listener, &handshakes) => match accepted {
                Ok((stream, permit)) => {
                    let connection = Connection {
                        acceptor: acceptor.clone(),
                        router: router.clone(),
                        shutdown: shutdown.clone(),
                    };
                    connections.spawn(connection.run(stream, permit));
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

/// Accepts one connection once there is room for another handshake; the permit ends with the handshake.
async fn accept(
    listener: &TcpListener,
    handshakes: &Arc<Semaphore>,
) -> io::Result<(TcpStream, Option<OwnedSemaphorePermit>)> {
    // The semaphore is never closed; if it were, serving without a bound is better than not serving.
    let permit = Arc::clone(handshakes).acquire_owned().await.ok();
    let (stream, _) = listener.accept().await?;
    Ok((stream, permit))
}

/// What one connection needs of the server.
struct Connection {
    acceptor: TlsAcceptor,
    router: Router,
    shutdown: CancellationToken,
}

impl Connection {
    async fn run(self, stream: TcpStream, permit: Option<OwnedSemaphorePermit>) {
        let address = stream.peer_addr().ok();
        // What is written is whole: nothing is gained by waiting for more, and a key press would wait for an answer.
        let _ = stream.set_nodelay(true);
        let stream = WideReads::new(stream);
        let handshake =
            (self.acceptor).accept_with(stream, |tls| tls.set_buffer_limit(Some(ENCRYPTED)));
        let handshake = tokio::select! {
            () = self.shutdown.cancelled() => return,
            done = tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake) => done,
        };
        drop(permit);
        match handshake {
            Ok(Ok(stream)) => self.serve(stream).await,
            // Anybody on the network can do this to us, so it is no warning.
            Ok(Err(error)) => tracing::debug!(?address, %error, "TLS handshake failed"),
            Err(_) => tracing::debug!(?address, "TLS handshake took too long"),
        }
    }

    async fn serve(self, stream: TlsStream<WideReads<TcpStream>>) {
        let certificate = stream
            .get_ref()
            .1
            .peer_certificates()
            .and_then(|chain| chain.first());
        let peer = certificate.and_then(peer_of);
        if certificate.is_some() && peer.is_none() {
            tracing::debug!("a client's certificate names nobody");
            return;
        }

        let router = self.router.layer(Extension::<Option<Peer>>(peer));
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
