//! exec and attach over WebSocket: the streams are channels with fixed numbers.

use bytes::Bytes;

use super::session::ClientStreams;
use super::status::Format;
use crate::seam::Streams;
use crate::streams::{Commands, Driver, Gone};
use crate::websocket::{Channels, Encoding};

const STDIN: u32 = 0;
const STDOUT: u32 = 1;
const STDERR: u32 = 2;
const ERROR: u32 = 3;
const RESIZE: u32 = 4;
const COUNT: u8 = 5;

/// The versions of the protocol, by what they have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Version {
    encoding: Encoding,
    format: Format,
    closable: bool,
}

impl Version {
    const fn new(encoding: Encoding, format: Format) -> Self {
        Self {
            encoding,
            format,
            closable: false,
        }
    }
}

const V5: Version = Version {
    encoding: Encoding::Binary,
    format: Format::Json,
    closable: true,
};

/// A client that names no protocol speaks the oldest one.
pub(super) const PROTOCOLS: &[(&str, Version)] = &[
    ("v5.channel.k8s.io", V5),
    (
        "v4.channel.k8s.io",
        Version::new(Encoding::Binary, Format::Json),
    ),
    (
        "v4.base64.channel.k8s.io",
        Version::new(Encoding::Base64, Format::Json),
    ),
    (
        "channel.k8s.io",
        Version::new(Encoding::Binary, Format::Words),
    ),
    (
        "base64.channel.k8s.io",
        Version::new(Encoding::Base64, Format::Words),
    ),
    ("", Version::new(Encoding::Binary, Format::Words)),
];

pub(super) fn protocol(version: Version) -> Channels {
    let channels = Channels::new(version.encoding);
    if version.closable {
        channels.closable(COUNT)
    } else {
        channels
    }
}

/// The channels that the client wants; all are there from the start.
pub(super) fn streams(
    driver: &mut Driver<Channels>,
    commands: &Commands,
    wanted: Streams,
    version: Version,
) -> ClientStreams {
    ClientStreams {
        stdin: wanted.stdin.then(|| driver.expect(STDIN)),
        stdout: wanted.stdout.then(|| commands.outgoing(STDOUT)),
        stderr: wanted.stderr.then(|| commands.outgoing(STDERR)),
        resize: wanted.tty.then(|| driver.expect(RESIZE)),
        error: commands.outgoing(ERROR),
        format: version.format,
    }
}

/// An empty message on the first channel that it may read tells a client that the connection stands.
pub(super) async fn greet(streams: &ClientStreams) -> Result<(), Gone> {
    let first = streams.stdout.as_ref().or(streams.stderr.as_ref());
    first.unwrap_or(&streams.error).send(Bytes::new()).await
}
