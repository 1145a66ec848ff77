//! exec and attach over SPDY: the client opens one stream for each purpose, and names it in a header.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::timeout;

use super::session::ClientStreams;
use super::status::ErrorFormat;
use crate::pod_source::RequestedStreams;
use crate::streams::{
    CommandSender, ConnectionClosed, IncomingStream, OpenedStream, OutgoingStream,
};

/// How long a client may take to open its streams.
pub(super) const STREAM_CREATION_TIMEOUT: Duration = Duration::from_secs(30);

/// The versions of the protocol, by what they have.
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

/// In upstream's order.
pub(super) const PROTOCOLS: &[(&str, SpdyVersion)] = &[
    ("v4.channel.k8s.io", V4),
    ("v3.channel.k8s.io", V3),
    ("v2.channel.k8s.io", V1_2),
    ("channel.k8s.io", V1_2),
];

/// Why a client's streams never came to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum StreamSetupError {
    #[error("timed out waiting for client to create streams")]
    TimedOut,
    #[error(transparent)]
    ConnectionClosed(#[from] ConnectionClosed),
}

/// Waits for all streams that the client has announced.
pub(super) async fn streams(
    opened: mpsc::Receiver<OpenedStream>,
    commands: &CommandSender,
    wanted: RequestedStreams,
    version: SpdyVersion,
) -> Result<ClientStreams, StreamSetupError> {
    let collecting = collect(opened, commands, wanted, version);
    timeout(STREAM_CREATION_TIMEOUT, collecting)
        .await
        .map_err(|_| StreamSetupError::TimedOut)?
        .map_err(StreamSetupError::from)
}

async fn collect(
    mut opened: mpsc::Receiver<OpenedStream>,
    commands: &CommandSender,
    wanted: RequestedStreams,
    version: SpdyVersion,
) -> Result<ClientStreams, ConnectionClosed> {
    let mut stdin = Slot::of(wanted.stdin);
    let mut stdout = Slot::of(wanted.stdout);
    let mut stderr = Slot::of(wanted.stderr);
    let mut resize = Slot::of(wanted.tty && version.resize);
    let mut error = Slot::of(true);
    loop {
        let slots = [&stdin, &stdout, &stderr, &resize, &error];
        if slots.iter().all(|slot| !matches!(slot, Slot::Empty)) {
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
                tracing::debug!(?other, "a client opened a stream of an unexpected type");
                outgoing.reset().await?;
                continue;
            }
        };
        if let Slot::Empty = slot {
            outgoing.accept().await?;
            *slot = Slot::Full(new.incoming, outgoing);
        } else {
            outgoing.reset().await?;
        }
    }
    Ok(ClientStreams {
        stdin: stdin.incoming(),
        stdout: stdout.outgoing(),
        stderr: stderr.outgoing(),
        resize: resize.incoming(),
        // Always wanted, so the slot is full.
        error: error.outgoing().ok_or(ConnectionClosed)?,
        format: version.format,
    })
}

/// A place for one stream.
enum Slot {
    Unwanted,
    Empty,
    Full(IncomingStream, OutgoingStream),
}

impl Slot {
    fn of(wanted: bool) -> Self {
        if wanted { Self::Empty } else { Self::Unwanted }
    }

    fn incoming(self) -> Option<IncomingStream> {
        match self {
            Self::Full(incoming, _) => Some(incoming),
            _ => None,
        }
    }

    fn outgoing(self) -> Option<OutgoingStream> {
        match self {
            Self::Full(_, outgoing) => Some(outgoing),
            _ => None,
        }
    }
}
