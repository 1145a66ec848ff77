//! Copies bytes between a client and a port of a pod, one direction at a time.

use std::io;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::streams::{IncomingStream, OutgoingStream};

/// Bytes per read from a pod.
const READ_SIZE: usize = 64 * 1024;
/// With less free space than this, allocate a new buffer instead.
const MIN_READ_SIZE: usize = 4 * 1024;

/// Copies until the pod closes its direction. An error means that reading from the pod failed.
pub(super) async fn copy_to_client(
    mut pod: impl AsyncRead + Unpin,
    client: &OutgoingStream,
) -> io::Result<()> {
    let mut buffer = BytesMut::new();
    loop {
        if buffer.capacity() < MIN_READ_SIZE {
            buffer.reserve(READ_SIZE);
        }
        if pod.read_buf(&mut buffer).await? == 0 {
            return Ok(());
        }
        if client.send(buffer.split().freeze()).await.is_err() {
            return Ok(());
        }
    }
}

/// Copies until the client closes its direction, or the pod stops reading, which is no error.
pub(super) async fn copy_to_pod(client: &mut IncomingStream, mut pod: impl AsyncWrite + Unpin) {
    while let Some(bytes) = client.next().await {
        let written = async {
            pod.write_all(&bytes).await?;
            pod.flush().await
        };
        if let Err(error) = written.await {
            tracing::debug!(%error, "pod stopped reading forwarded connection");
            return;
        }
    }
    let _ = pod.shutdown().await;
}
