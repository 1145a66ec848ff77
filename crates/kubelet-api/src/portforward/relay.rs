//! Bytes between a client and a port of a pod, one direction at a time.

use std::io;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::streams::{IncomingStream, OutgoingStream};

/// How much is read from a pod at once.
const READ_SIZE: usize = 64 * 1024;
/// A smaller rest of a buffer is not worth a read.
const MIN_READ_SIZE: usize = 4 * 1024;

/// Until the pod sends no more. An error means that the pod's end of the connection broke.
pub(super) async fn to_client(
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

/// Until the client sends no more, or the pod takes no more, which is its own affair.
pub(super) async fn to_pod(client: &mut IncomingStream, mut pod: impl AsyncWrite + Unpin) {
    while let Some(bytes) = client.next().await {
        let written = async {
            pod.write_all(&bytes).await?;
            pod.flush().await
        };
        if let Err(error) = written.await {
            tracing::debug!(%error, "a pod takes no more of a forwarded connection");
            return;
        }
    }
    let _ = pod.shutdown().await;
}
