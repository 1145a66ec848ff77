//! Exec and attach over WebSocket: the streams are channels with fixed numbers.

use bytes::Bytes;

use super::session::ClientStreams;
use super::status::ErrorFormat;
use crate::pod_source::RequestedStreams;
use crate::streams::{CommandSender, ConnectionClosed, StreamDriver};
use crate::websocket::{Channels, Encoding};

const STDIN: u32 = 0;
const STDOUT: u32 = 1;
const STDERR: u32 = 2;
const ERROR: u32 = 3;
const RESIZE: u32 = 4;
const CHANNEL_COUNT: u8 = 5;

/// The features of a version of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChannelVersion {
    encoding: Encoding,
    format: ErrorFormat,
    closable: bool,
}

impl ChannelVersion {
    const fn new(encoding: Encoding, format: ErrorFormat) -> Self {
        Self {
            encoding,
            format,
            closable: false,
        }
    }
}

const V5: ChannelVersion = ChannelVersion {
    encoding: Encoding::Binary,
    format: ErrorFormat::Json,
    closable: true,
};

/// Supported protocols. A client that names none uses the oldest one.
pub(super) const COMMAND_WEBSOCKET_PROTOCOLS: &[(&str, ChannelVersion)] = &[
    ("v5.channel.k8s.io", V5),
    (
        "v4.channel.k8s.io",
        ChannelVersion::new(Encoding::Binary, ErrorFormat::Json),
    ),
    (
        "v4.base64.channel.k8s.io",
        ChannelVersion::new(Encoding::Base64, ErrorFormat::Json),
    ),
    (
        "channel.k8s.io",
        ChannelVersion::new(Encoding::Binary, ErrorFormat::Text),
    ),
    (
        "base64.channel.k8s.io",
        ChannelVersion::new(Encoding::Base64, ErrorFormat::Text),
    ),
    ("", ChannelVersion::new(Encoding::Binary, ErrorFormat::Text)),
];

pub(super) fn protocol(version: ChannelVersion) -> Channels {
    let channels = Channels::new(version.encoding);
    if version.closable {
        channels.closable(CHANNEL_COUNT)
    } else {
        channels
    }
}

/// The requested channels. All are open from the start.
pub(super) fn streams(
    driver: &mut StreamDriver<Channels>,
    commands: &CommandSender,
    requested: RequestedStreams,
    version: ChannelVersion,
) -> ClientStreams {
    ClientStreams {
        stdin: requested.stdin.then(|| driver.register(STDIN)),
        stdout: requested.stdout.then(|| commands.outgoing(STDOUT)),
        stderr: requested.stderr.then(|| commands.outgoing(STDERR)),
        resize: requested.tty.then(|| driver.register(RESIZE)),
        error: commands.outgoing(ERROR),
        format: version.format,
    }
}

/// Sends an empty message on the first output channel. It tells the client that the connection works.
pub(super) async fn send_initial_message(streams: &ClientStreams) -> Result<(), ConnectionClosed> {
    let first_output = streams.stdout.as_ref().or(streams.stderr.as_ref());
    first_output
        .unwrap_or(&streams.error)
        .send(Bytes::new())
        .await
}
