//! Copies between a client's streams and those of a process.

use std::future::{Future, pending};

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::RemoteCommandKind;
use super::resize;
use super::status::{ErrorFormat, RemoteCommandStatus};
use crate::pod_source::{ByteReader, ByteWriter, ContainerSession, SessionError};
use crate::streams::{IncomingStream, OutgoingStream};

/// Bytes per read from a process.
const READ_SIZE: usize = 64 * 1024;
/// With less free space than this, allocate a new buffer instead.
const MIN_READ_SIZE: usize = 4 * 1024;

/// The streams that a client has opened.
#[derive(Debug)]
pub(super) struct ClientStreams {
    pub(super) stdin: Option<IncomingStream>,
    pub(super) stdout: Option<OutgoingStream>,
    pub(super) stderr: Option<OutgoingStream>,
    pub(super) resize: Option<IncomingStream>,
    pub(super) error: OutgoingStream,
    pub(super) format: ErrorFormat,
}

/// Starts a session, copies its streams, and reports its exit status to the client.
///
/// The caller drops this future when the client disconnects, which drops the session.
pub(super) async fn run(
    kind: RemoteCommandKind,
    client: ClientStreams,
    start: impl Future<Output = Result<ContainerSession, SessionError>>,
) {
    let status = match start.await {
        Err(error) => {
            tracing::debug!(%error, "cannot start session");
            finish(client.stdout.as_ref()).await;
            finish(client.stderr.as_ref()).await;
            RemoteCommandStatus::from_error(kind, &error)
        }
        Ok(session) => {
            let input = copy_stdin(client.stdin, session.stdin);
            let sizes = async {
                if let (Some(incoming), Some(sizes)) = (client.resize, session.resize) {
                    resize::forward(incoming, sizes).await;
                }
                pending().await
            };
            let exited = async {
                let stdout = copy_output(session.stdout, client.stdout);
                let stderr = copy_output(session.stderr, client.stderr);
                // Deliver all output before the exit status.
                let (exit, (), ()) = tokio::join!(session.exit, stdout, stderr);
                exit
            };
            let exit = tokio::select! {
                exit = exited => exit,
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
        // Fails only if the client has disconnected.
        let _ = stream.finish().await;
    }
}

/// Copies stdin to the process, then closes it. Never resolves: the end of stdin does not end the session.
async fn copy_stdin(from: Option<IncomingStream>, to: Option<ByteWriter>) {
    if let (Some(mut from), Some(mut to)) = (from, to) {
        while let Some(bytes) = from.next().await {
            let written = async {
                to.write_all(&bytes).await?;
                to.flush().await
            };
            if written.await.is_err() {
                // The process closed its stdin. Discard the rest.
                break;
            }
        }
        let _ = to.shutdown().await;
    }
    pending().await
}

/// Copies output of the process to the client, then closes the stream.
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
                tracing::debug!(%error, "cannot read output of process");
                break;
            }
        }
        if to.send(buffer.split().freeze()).await.is_err() {
            return;
        }
    }
    finish(Some(to)).await;
}
