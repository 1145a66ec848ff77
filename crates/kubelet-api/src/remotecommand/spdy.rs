//! Exec and attach over SPDY: the client opens one stream per type, and names the type in a header.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::timeout;

use super::session::ClientStreams;
use super::status::ErrorFormat;
use crate::pod_source::RequestedStreams;
use crate::streams::{
    CommandSender, ConnectionClosed, IncomingStream, OpenedStream, OutgoingStream,
};

/// Time limit for a client to open its streams.
pub(super) const STREAM_CREATION_TIMEOUT: Duration = Duration::from_secs(30);

/// The features of a version of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SpdyVersion {
    resize: bool,
    format: ErrorFormat,
}

const V1_2: SpdyVersion = SpdyVersion {
    resize: false,
    format: ErrorFormat::Text,
};
const V3: SpdyVersion = SpdyVersion {
    resize: true,
    format: ErrorFormat::Text,
};
const V4: SpdyVersion = SpdyVersion {
    resize: true,
    format: ErrorFormat::Json,
};

/// Supported protocols, in upstream's order.
pub(super) const COMMAND_SPDY_PROTOCOLS: &[(&str, SpdyVersion)] = &[
    ("v4.channel.k8s.io", V4),
    ("v3.channel.k8s.io", V3),
    ("v2.channel.k8s.io", V1_2),
    ("channel.k8s.io", V1_2),
];

/// Why a client's streams are not complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum StreamSetupError {
    #[error("timed out waiting for client to create streams")]
    TimedOut,
    #[error(transparent)]
    ConnectionClosed(#[from] ConnectionClosed),
}

/// Waits until the client has opened all requested streams.
pub(super) async fn streams(
    opened: mpsc::Receiver<OpenedStream>,
    commands: &CommandSender,
    requested: RequestedStreams,
    version: SpdyVersion,
) -> Result<ClientStreams, StreamSetupError> {
    let collecting = collect(opened, commands, requested, version);
    timeout(STREAM_CREATION_TIMEOUT, collecting)
        .await
        .map_err(|_| StreamSetupError::TimedOut)?
        .map_err(StreamSetupError::from)
}

async fn collect(
    mut opened: mpsc::Receiver<OpenedStream>,
    commands: &CommandSender,
    requested: RequestedStreams,
    version: SpdyVersion,
) -> Result<ClientStreams, ConnectionClosed> {
    let mut stdin = StreamSlot::of(requested.stdin);
    let mut stdout = StreamSlot::of(requested.stdout);
    let mut stderr = StreamSlot::of(requested.stderr);
    let mut resize = StreamSlot::of(requested.tty && version.resize);
    let mut error = StreamSlot::of(true);
    loop {
        let slots = [&stdin, &stdout, &stderr, &resize, &error];
        if slots
            .iter()
            .all(|slot| !matches!(slot, StreamSlot::Awaited))
        {
            break;
        }
        let new = opened.recv().await.ok_or(ConnectionClosed)?;
        let outgoing = commands.outgoing(new.stream);
        let slot = match new.headers.get("streamType") {
            Some("stdin") => &mut stdin,
            Some("stdout") => &mut stdout,
            Some("stderr") => &mut stderr,
            Some("resize") => &mut resize,
            Some("error") => &mut error,
            other => {
                tracing::debug!(stream_type = ?other, "client opened stream of unknown type");
                outgoing.reset().await?;
                continue;
            }
        };
        if let StreamSlot::Awaited = slot {
            outgoing.accept().await?;
            *slot = StreamSlot::Open(new.incoming, outgoing);
        } else {
            outgoing.reset().await?;
        }
    }
    Ok(ClientStreams {
        stdin: stdin.incoming(),
        stdout: stdout.outgoing(),
        stderr: stderr.outgoing(),
        resize: resize.incoming(),
        // The error stream is always required, so it is open now.
        error: error.outgoing().ok_or(ConnectionClosed)?,
        format: version.format,
    })
}

/// State of one of the streams.
enum StreamSlot {
    NotRequested,
    Awaited,
    Open(IncomingStream, OutgoingStream),
}

impl StreamSlot {
    fn of(requested: bool) -> Self {
        if requested {
            Self::Awaited
        } else {
            Self::NotRequested
        }
    }

    fn incoming(self) -> Option<IncomingStream> {
        match self {
            Self::Open(incoming, _) => Some(incoming),
            _ => None,
        }
    }

    fn outgoing(self) -> Option<OutgoingStream> {
        match self {
            Self::Open(_, outgoing) => Some(outgoing),
            _ => None,
        }
    }
}
