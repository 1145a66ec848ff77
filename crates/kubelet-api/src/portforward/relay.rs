//! Copies bytes between a client and a port of a pod, one direction at a time.

use std::io;

use bytes::Bytes;
use futures::TryStreamExt;
use futures::stream::BoxStream;
use tokio::sync::mpsc;

use crate::streams::{IncomingStream, OutgoingStream};

/// Copies until the pod closes its direction. An error means that reading from the pod failed.
pub(super) async fn copy_to_client(
    mut pod: BoxStream<'static, io::Result<Bytes>>,
    client: &OutgoingStream,
) -> io::Result<()> {
    while let Some(bytes) = pod.try_next().await? {
        if client.send(bytes).await.is_err() {
            break;
        }
    }
    Ok(())
}

/// Copies until the client closes its direction, or the pod stops reading, which is no error.
pub(super) async fn copy_to_pod(client: &mut IncomingStream, pod: mpsc::Sender<Bytes>) {
    while let Some(bytes) = client.next().await {
        if pod.send(bytes).await.is_err() {
            tracing::debug!("pod stopped reading forwarded connection");
            return;
        }
    }
}
