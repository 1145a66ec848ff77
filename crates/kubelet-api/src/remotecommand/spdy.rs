//! exec and attach over SPDY: the client opens one stream for each purpose, and names it in a header.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::timeout;

use super::session::ClientStreams;
use super::status::Format;
use crate::seam::Streams;
use crate::streams::{Commands, Gone, Incoming, Opened, Outgoing};

/// How long a client may take to open its streams.
pub(super) const CREATION_TIMEOUT: Duration = Duration::from_secs(30);

/// The versions of the protocol, by what they have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Version {
    resize: bool,
    format: Format,
}

const V1_2: Version = Version {
    resize: false,
    format: Format::Words,
};
const V3: Version = Version {
    resize: true,
    format: Format::Words,
};
const V4: Version = Version {
    resize: true,
    format: Format::Json,
};

/// In upstream's order.
pub(super) const PROTOCOLS: &[(&str, Version)] = &[
    ("v4.channel.k8s.io", V4),
    ("v3.channel.k8s.io", V3),
    ("v2.channel.k8s.io", V1_2),
    ("channel.k8s.io", V1_2),
];

/// Why a client's streams never came to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoStreams {
    #[error("timed out waiting for client to create streams")]
    TimedOut,
    #[error(transparent)]
    Gone(#[from] Gone),
}

/// Waits for all streams that the client has announced.
pub(super) async fn streams(
    opened: mpsc::Receiver<Opened>,
    commands: &Commands,
    wanted: Streams,
    version: Version,
) -> Result<ClientStreams, NoStreams> {
    let collecting = collect(opened, commands, wanted, version);
    timeout(CREATION_TIMEOUT, collecting)
        .await
        .map_err(|_| NoStreams::TimedOut)?
        .map_err(NoStreams::from)
}

async fn collect(
    mut opened: mpsc::Receiver<Opened>,
    commands: &Commands,
    wanted: Streams,
    version: Version,
) -> Result<ClientStreams, Gone> {
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
        let new = opened.recv().await.ok_or(Gone)?;
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
        error: error.outgoing().ok_or(Gone)?,
        format: version.format,
    })
}

/// A place for one stream.
enum Slot {
    Unwanted,
    Empty,
    Full(Incoming, Outgoing),
}

impl Slot {
    fn of(wanted: bool) -> Self {
        if wanted { Self::Empty } else { Self::Unwanted }
    }

    fn incoming(self) -> Option<Incoming> {
        match self {
            Self::Full(incoming, _) => Some(incoming),
            _ => None,
        }
    }

    fn outgoing(self) -> Option<Outgoing> {
        match self {
            Self::Full(_, outgoing) => Some(outgoing),
            _ => None,
        }
    }
}
