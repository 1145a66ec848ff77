//! Copies between a client's streams and those of a process.

use std::future::{Future, pending};

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use tokio::sync::mpsc;

use super::RemoteCommandKind;
use super::resize;
use super::status::{ErrorFormat, RemoteCommandStatus};
use crate::pod_source::{ContainerSession, SessionError, SessionExit, SessionOutput, TerminalSize};
use crate::streams::{IncomingStream, OutgoingStream};

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
            RemoteCommandStatus::from_error(kind, &error)
        }
        Ok(session) => {
            let input = async {
                tokio::join!(
                    copy_stdin(client.stdin, session.stdin),
                    copy_sizes(client.resize, session.resize)
                );
                // The end of the input does not end the session.
                pending().await
            };
            let exit = tokio::select! {
                exit = copy_output(session.output, &client.stdout, &client.stderr) => exit,
                () = input => return,
            };
            RemoteCommandStatus::from_exit(kind, &exit)
        }
    };
    // All of these fail only if the client has disconnected.
    for stream in [&client.stdout, &client.stderr].into_iter().flatten() {
        let _ = stream.finish().await;
    }
    let text = status.text(client.format);
    if text.is_empty() || client.error.send(text).await.is_ok() {
        let _ = client.error.finish().await;
    }
}

async fn copy_stdin(from: Option<IncomingStream>, to: Option<mpsc::Sender<Bytes>>) {
    if let (Some(mut from), Some(to)) = (from, to) {
        while let Some(bytes) = from.next().await {
            if to.send(bytes).await.is_err() {
                // The process closed its stdin. Discard the rest.
                return;
            }
        }
    }
}

async fn copy_sizes(from: Option<IncomingStream>, to: Option<mpsc::Sender<TerminalSize>>) {
    if let (Some(from), Some(to)) = (from, to) {
        resize::forward(from, to).await;
    }
}

/// Copies output of the process to the client, until the process exits.
async fn copy_output(
    mut output: BoxStream<'static, SessionOutput>,
    stdout: &Option<OutgoingStream>,
    stderr: &Option<OutgoingStream>,
) -> SessionExit {
    loop {
        let (bytes, to) = match next_output(&mut output).await {
            SessionOutput::Stdout(bytes) => (bytes, stdout),
            SessionOutput::Stderr(bytes) => (bytes, stderr),
            SessionOutput::Exit(exit) => return exit,
        };
        if let Some(to) = to {
            // Fails only if the client has disconnected.
            let _ = to.send(bytes).await;
        }
    }
}

/// The next output of a process.
pub(super) async fn next_output(output: &mut BoxStream<'static, SessionOutput>) -> SessionOutput {
    let aborted = || SessionExit::Failed("the session was aborted".to_owned());
    let next = output.next().await;
    next.unwrap_or_else(|| SessionOutput::Exit(aborted()))
}
