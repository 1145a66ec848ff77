//! A connection to a port of the pod: bytes both ways, each way with an end of its own.

use std::io;

use bytes::{Bytes, BytesMut};
use hyper::body::Incoming;
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;

use super::BLOCK;
use super::frames::fitting;
use super::words::next_piece;

/// Carries bytes until both ways have ended, or the client is gone.
pub fn forward(connection: TcpStream, body: Incoming) -> mpsc::Receiver<io::Result<Bytes>> {
    let (tell, told) = mpsc::channel(1);
    tokio::task::spawn_local(async move {
        // Small answers must not wait for more; whoever speaks here has put them together already.
        let _ = connection.set_nodelay(true);
        let (reader, writer) = connection.into_split();
        let in_both = async { tokio::try_join!(to_pod(body, writer), from_pod(reader, tell)) };
        if let Err(error) = in_both.await {
            tracing::trace!(%error, "a forwarded connection was cut");
        }
    });
    told
}

/// Until the client's end, which the pod hears as an end of its input, or until the pod reads no more: it may still speak.
async fn to_pod(mut body: Incoming, mut writer: OwnedWriteHalf) -> io::Result<()> {
    while let Some(bytes) = next_piece(&mut body).await? {
        if writer.write_all(&bytes).await.is_err() {
            return Ok(());
        }
    }
    let _ = writer.shutdown().await;
    Ok(())
}

/// Until the pod's end; a broken connection is told as broken.
async fn from_pod(reader: OwnedReadHalf, tell: mpsc::Sender<io::Result<Bytes>>) -> io::Result<()> {
    loop {
        tokio::select! {
            () = tell.closed() => return Err(io::ErrorKind::BrokenPipe.into()),
            ready = reader.ready(Interest::READABLE) => drop(ready?),
        }
        // Not kept from one time to the next: a silent connection needs no memory.
        let mut block = BytesMut::with_capacity(BLOCK);
        match reader.try_read_buf(&mut block) {
            Ok(0) => return Ok(()),
            Ok(_) => {
                if tell.send(Ok(fitting(block))).await.is_err() {
                    return Err(io::ErrorKind::BrokenPipe.into());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                let again = io::Error::new(error.kind(), error.to_string());
                let _ = tell.send(Err(error)).await;
                return Err(again);
            }
        }
    }
}
