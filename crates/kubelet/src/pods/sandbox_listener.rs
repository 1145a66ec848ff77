//! Accepts the connections of sandboxes, on a Unix socket in the node's directory.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use pod_protocol::SandboxHello;
use pod_protocol::connection::{HelloError, SandboxClient, accept};
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::{NodeKey, SandboxHandle, SandboxProcess};

/// Delay after a failed accept, which is caused by a lack of descriptors or memory.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// A sandbox that has connected.
pub(super) struct IncomingSandbox {
    /// The uid of its pod.
    pub uid: String,
    pub client: SandboxClient,
    /// Its process, if that is in this PID namespace.
    pub process: Option<Box<dyn SandboxHandle>>,
}

/// Binds the socket, and replaces that of an earlier agent.
pub(super) fn bind(path: &Path) -> std::io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    UnixListener::bind(path)
}

/// Accepts every sandbox that has its pod's token. Never returns.
pub(super) async fn serve(
    listener: UnixListener,
    key: NodeKey,
    connected: mpsc::UnboundedSender<IncomingSandbox>,
) {
    let key = Arc::new(key);
    let mut handshakes = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    let (key, connected) = (Arc::clone(&key), connected.clone());
                    handshakes.spawn(async move {
                        let process = SandboxProcess::peer_of(&stream)
                            .ok()
                            .map(|process| Box::new(process) as Box<dyn SandboxHandle>);
                        match accept(stream, |hello| authenticate(&key, hello)).await {
                            Ok((SandboxHello { uid, .. }, client)) => {
                                let _ = connected.send(IncomingSandbox {
                                    uid,
                                    client,
                                    process,
                                });
                            }
                            // Liveness check: the peer closed without a hello, as the hub does regularly.
                            Err(HelloError::Closed(_)) => {}
                            Err(error) => tracing::warn!(
                                error = &error as &dyn std::error::Error,
                                "rejected a connection to the sandbox socket"
                            ),
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection on the sandbox socket");
                    tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                }
            },
            Some(_) = handshakes.join_next() => {}
        }
    }
}

/// The name of the connection in messages (the pod's uid), if the token is correct.
fn authenticate(key: &NodeKey, hello: &SandboxHello) -> Option<String> {
    key.admits(&hello.uid, &hello.token)
        .then(|| hello.uid.clone())
}
