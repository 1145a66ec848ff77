//! A client's streams and a process's streams, joined.

use std::future::{Future, pending};

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::RemoteCommandKind;
use super::resize;
use super::status::{ErrorFormat, RemoteCommandStatus};
use crate::pod_source::{ByteReader, ByteWriter, ContainerSession, SessionError};
use crate::streams::{IncomingStream, OutgoingStream};

/// How much is read from a process at once.
const READ_SIZE: usize = 64 * 1024;
/// A smaller rest of a buffer is not worth a read.
const MIN_READ_SIZE: usize = 4 * 1024;

/// What a client has opened.
#[derive(Debug)]
pub(super) struct ClientStreams {
    pub(super) stdin: Option<IncomingStream>,
    pub(super) stdout: Option<OutgoingStream>,
    pub(super) stderr: Option<OutgoingStream>,
    pub(super) resize: Option<IncomingStream>,
    pub(super) error: OutgoingStream,
    pub(super) format: ErrorFormat,
}

/// Starts a session and serves it to its end, of which the client hears.
///
/// Dropped when the client is gone, and the session with it.
pub(super) async fn run(
    kind: RemoteCommandKind,
    client: ClientStreams,
    start: impl Future<Output = Result<ContainerSession, SessionError>>,
) {
    let status = match start.await {
        Err(refusal) => {
            tracing::debug!(error = %refusal, "a session could not be started");
            finish(client.stdout.as_ref()).await;
            finish(client.stderr.as_ref()).await;
            RemoteCommandStatus::from_error(kind, &refusal)
        }
        Ok(session) => {
            let input = copy_stdin(client.stdin, session.stdin);
            let sizes = async {
                if let (Some(incoming), Some(sizes)) = (client.resize, session.resize) {
                    resize::forward(incoming, sizes).await;
                }
                pending().await
            };
            let ending = async {
                let stdout = copy_output(session.stdout, client.stdout);
                let stderr = copy_output(session.stderr, client.stderr);
                // What was written before the end must arrive before it.
                let (exit, (), ()) = tokio::join!(session.exit, stdout, stderr);
                exit
            };
            let exit = tokio::select! {
                exit = ending => exit,
                () = input => return,
                () = sizes => return,
            };
            RemoteCommandStatus::from_exit(kind, &exit)
        }
    };
    let text = status.text(client.format);
    if !text.is_empty() && client.error.send(text).await.is_err() {
        return;
    }
    finish(Some(&client.error)).await;
}

async fn finish(stream: Option<&OutgoingStream>) {
    if let Some(stream) = stream {
        // A client that is gone needs no end.
        let _ = stream.finish().await;
    }
}

/// Hands what the client sends to the process, and then its end. Never done: input alone ends no session.
async fn copy_stdin(from: Option<IncomingStream>, to: Option<ByteWriter>) {
    if let (Some(mut from), Some(mut to)) = (from, to) {
        while let Some(bytes) = from.next().await {
            let written = async {
                to.write_all(&bytes).await?;
                to.flush().await
            };
            if written.await.is_err() {
                // The process closed its input, as it may; the rest of what the client sends is thrown away.
                break;
            }
        }
        let _ = to.shutdown().await;
    }
    pending().await
}

/// Hands what the process writes to the client, and then its end.
async fn copy_output(from: Option<ByteReader>, to: Option<OutgoingStream>) {
    let (Some(mut from), Some(to)) = (from, to.as_ref()) else {
        return finish(to.as_ref()).await;
    };
    let mut buffer = BytesMut::new();
    loop {
        if buffer.capacity() < MIN_READ_SIZE {
            buffer.reserve(READ_SIZE);
        }
        match from.read_buf(&mut buffer).await {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(%error, "a process's output ended early");
                break;
            }
        }
        if to.send(buffer.split().freeze()).await.is_err() {
            return;
        }
    }
    finish(Some(to)).await;
}
