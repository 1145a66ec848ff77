//! Where sandboxes dial in: a Unix socket in the node's own directory.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use pod_protocol::Hello;
use pod_protocol::connection::{HelloError, SandboxClient, accept};
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::NodeKey;
use super::launch::Handle;
use super::process::Process;

/// A wait after a failed accept, which is for want of descriptors or memory.
const BREATH: Duration = Duration::from_millis(100);

/// A sandbox that has dialled.
pub(super) struct Caller {
    /// Its pod.
    pub uid: String,
    /// The way to ask it.
    pub client: SandboxClient,
    /// Its process, if that can be seen from here.
    pub process: Option<Box<dyn Handle>>,
}

/// Opens the socket, in place of one that a dead agent has left.
pub(super) fn open(path: &Path) -> std::io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    UnixListener::bind(path)
}

/// Lets in every sandbox that shows its pod's token, for ever.
pub(super) async fn serve(
    listener: UnixListener,
    key: NodeKey,
    dialled: mpsc::UnboundedSender<Caller>,
) {
    let key = Arc::new(key);
    let mut callers = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    let (key, dialled) = (Arc::clone(&key), dialled.clone());
                    callers.spawn(async move {
                        let process = Process::behind(&stream)
                            .ok()
                            .map(|process| Box::new(process) as Box<dyn Handle>);
                        match accept(stream, |hello| recognise(&key, hello)).await {
                            Ok((Hello { uid, .. }, client)) => {
                                let _ = dialled.send(Caller {
                                    uid,
                                    client,
                                    process,
                                });
                            }
                            // Somebody looked whether there is an agent, as the hub does all the time.
                            Err(HelloError::Gone(_)) => {}
                            Err(error) => tracing::warn!(
                                error = &error as &dyn std::error::Error,
                                "refused a caller of the kubelet's socket"
                            ),
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a sandbox");
                    tokio::time::sleep(BREATH).await;
                }
            },
            Some(_) = callers.join_next() => {}
        }
    }
}

/// By its uid, which is the name it goes by here, if the token is that pod's.
fn recognise(key: &NodeKey, hello: &Hello) -> Option<String> {
    key.admits(&hello.uid, &hello.token)
        .then(|| hello.uid.clone())
}
