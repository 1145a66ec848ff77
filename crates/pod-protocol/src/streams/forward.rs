//! A connection to a port of the pod: bytes in both directions, each with an end of its own.

use std::io;

use bytes::{Bytes, BytesMut};
use hyper::body::Incoming;
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;

use super::STREAM_BLOCK_SIZE;
use super::frame_reader::next_chunk;
use super::frames::shrink;

/// Copies bytes until both directions have ended or the client is gone. Returns the bytes from the pod.
pub fn forward(connection: TcpStream, body: Incoming) -> mpsc::Receiver<io::Result<Bytes>> {
    let (to_client, from_pod) = mpsc::channel(1);
    tokio::task::spawn_local(async move {
        // The client has batched its writes already, so Nagle's algorithm would only delay them.
        let _ = connection.set_nodelay(true);
        let (reader, writer) = connection.into_split();
        let copied = async {
            tokio::try_join!(copy_to_pod(body, writer), copy_to_client(reader, to_client))
        };
        if let Err(error) = copied.await {
            tracing::trace!(%error, "forwarded connection broke");
        }
    });
    from_pod
}

/// Until the client's end-of-file, which is passed on to the pod, or until the pod stops reading: it may still send.
async fn copy_to_pod(mut body: Incoming, mut writer: OwnedWriteHalf) -> io::Result<()> {
    while let Some(bytes) = next_chunk(&mut body).await? {
        if writer.write_all(&bytes).await.is_err() {
            return Ok(());
        }
    }
    let _ = writer.shutdown().await;
    Ok(())
}

/// Until the pod's end-of-file. An error of the pod's connection resets the client's stream.
async fn copy_to_client(
    reader: OwnedReadHalf,
    to_client: mpsc::Sender<io::Result<Bytes>>,
) -> io::Result<()> {
    loop {
        tokio::select! {
            () = to_client.closed() => return Err(io::ErrorKind::BrokenPipe.into()),
            ready = reader.ready(Interest::READABLE) => drop(ready?),
        }
        // Allocated for each read: an idle connection needs no buffer.
        let mut block = BytesMut::with_capacity(STREAM_BLOCK_SIZE);
        match reader.try_read_buf(&mut block) {
            Ok(0) => return Ok(()),
            Ok(_) => {
                if to_client.send(Ok(shrink(block))).await.is_err() {
                    return Err(io::ErrorKind::BrokenPipe.into());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                let copy = io::Error::new(error.kind(), error.to_string());
                let _ = to_client.send(Err(error)).await;
                return Err(copy);
            }
        }
    }
}
