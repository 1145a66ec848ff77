//! Accepts the connections of sandboxes, over a Unix socket or TLS.

use std::sync::Arc;
use std::time::Duration;

use client_auth::UnauthenticatedConnections;
use pod_protocol::SandboxHello;
use pod_protocol::connection::{
    HelloError, PendingStream, SandboxClient, TransportListener, accept,
};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::sandbox_auth::{Authenticated, SandboxAuthenticator};

/// Delay after a failed accept, which is caused by a lack of descriptors or memory.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Time-out of the TLS handshake and the hello together.
const SANDBOX_AUTHENTICATION_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of connections that have not authenticated yet.
const MAX_UNAUTHENTICATED_SANDBOXES: usize = 128;

/// A sandbox that has connected.
pub(super) struct IncomingSandbox {
    /// Its first message.
    pub hello: SandboxHello,
    pub client: SandboxClient,
    /// Confirmed when the sandbox has responded to the first request.
    pub authenticated: Authenticated,
}

/// Accepts every sandbox with a valid credential. Never returns.
pub(super) async fn serve(
    listener: TransportListener,
    authenticator: Arc<SandboxAuthenticator>,
    connected: mpsc::UnboundedSender<IncomingSandbox>,
) {
    let unauthenticated = UnauthenticatedConnections::new(MAX_UNAUTHENTICATED_SANDBOXES);
    let mut handshakes = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(stream) => {
                    let slot = unauthenticated.admit();
                    let (authenticator, connected) = (Arc::clone(&authenticator), connected.clone());
                    handshakes.spawn(async move {
                        tokio::select! {
                            sandbox = handshake(stream, &authenticator) => {
                                if let Some(sandbox) = sandbox {
                                    let _ = connected.send(sandbox);
                                }
                            }
                            () = slot.evicted() => {}
                            () = tokio::time::sleep(SANDBOX_AUTHENTICATION_TIMEOUT) => {}
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection of a sandbox");
                    tokio::time::sleep(ACCEPT_RETRY_INTERVAL).await;
                }
            },
            Some(_) = handshakes.join_next() => {}
        }
    }
}

async fn handshake(
    stream: PendingStream,
    authenticator: &SandboxAuthenticator,
) -> Option<IncomingSandbox> {
    let stream = match stream.establish().await {
        Ok(stream) => stream,
        // Debug level: any host on the network can cause this.
        Err(error) => {
            tracing::debug!(%error, "TLS handshake with a sandbox failed");
            return None;
        }
    };
    let mut authenticated = None;
    let authenticate = |hello: &SandboxHello| {
        let (welcome, sandbox) = authenticator.authenticate(hello)?;
        authenticated = Some(sandbox);
        Some(welcome)
    };
    match accept(stream, authenticate).await {
        Ok((hello, client)) => Some(IncomingSandbox {
            hello,
            client,
            authenticated: authenticated?,
        }),
        // Liveness check: the peer closed without a hello, as the process inside the hub does every few seconds.
        Err(HelloError::Closed(_)) => None,
        Err(error) => {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "rejected a connection of a sandbox"
            );
            None
        }
    }
}
