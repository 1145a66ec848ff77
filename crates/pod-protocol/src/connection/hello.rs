//! The first line of a connection from each end: the sandbox's hello and the kubelet's welcome.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncWrite, AsyncWriteExt};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{PROTOCOL_VERSION, SandboxHello, SandboxWelcome};

/// Limit of the line, which is read before the client is authenticated.
pub(super) const MAX_HELLO_LINE: usize = 4096;
/// Limit of the time until the line is complete.
pub(super) const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a connection was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum HelloError {
    /// No complete line within the limit.
    #[error("the peer sent no first line within {} s", HELLO_TIMEOUT.as_secs())]
    Timeout,
    /// The peer closed the connection first, or it broke.
    #[error("the peer closed the connection before its first line")]
    Closed(#[source] io::Error),
    /// The first line is too long.
    #[error("the peer is no sandbox: its first line is longer than {MAX_HELLO_LINE} bytes")]
    TooLong,
    /// The first line is not a hello.
    #[error("the peer is no sandbox: its first line is not a hello")]
    Invalid(#[source] serde_json::Error),
    /// A sandbox of another release.
    #[error(
        "sandbox of pod {uid} uses version {theirs} of the protocol, this kubelet version {PROTOCOL_VERSION}"
    )]
    VersionMismatch {
        /// The pod.
        uid: String,
        /// The sandbox's version.
        theirs: u32,
    },
    /// Its pod or its token is unknown.
    #[error("cannot authenticate sandbox of pod {uid}")]
    Unauthenticated {
        /// The pod.
        uid: String,
    },
    /// The HTTP/2 handshake after the line failed.
    #[error("HTTP/2 handshake with sandbox of pod {uid} failed")]
    Handshake {
        /// The pod.
        uid: String,
        /// Why.
        #[source]
        source: hyper::Error,
    },
}

/// Sends a line: the hello of a sandbox, or the welcome of a kubelet.
pub(super) async fn send(
    io: &mut (impl AsyncWrite + Unpin),
    message: &impl Serialize,
) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    io.write_all(&line).await?;
    io.flush().await
}

/// Receives a hello. Consumes nothing of `io` after the line.
pub(super) async fn receive(
    io: &mut (impl AsyncBufRead + Unpin),
) -> Result<SandboxHello, HelloError> {
    let hello: serde_json::Value = receive_line(io).await?;
    // Other versions may have other fields.
    let theirs = hello["version"].as_u64().and_then(|v| v.try_into().ok());
    if let Some(theirs) = theirs.filter(|version| *version != PROTOCOL_VERSION) {
        let uid = hello["uid"].as_str().unwrap_or_default().to_owned();
        return Err(HelloError::VersionMismatch { uid, theirs });
    }
    serde_json::from_value(hello).map_err(HelloError::Invalid)
}

/// Receives the kubelet's response to a hello. Consumes nothing of `io` after the line.
pub(super) async fn receive_welcome(
    io: &mut (impl AsyncBufRead + Unpin),
) -> Result<SandboxWelcome, HelloError> {
    receive_line(io).await
}

async fn receive_line<T: DeserializeOwned>(
    io: &mut (impl AsyncBufRead + Unpin),
) -> Result<T, HelloError> {
    let line = tokio::time::timeout(HELLO_TIMEOUT, read_line(io))
        .await
        .map_err(|_| HelloError::Timeout)??;
    serde_json::from_slice(&line).map_err(HelloError::Invalid)
}

async fn read_line(io: &mut (impl AsyncBufRead + Unpin)) -> Result<Vec<u8>, HelloError> {
    let mut line = Vec::new();
    loop {
        let more = io.fill_buf().await.map_err(HelloError::Closed)?;
        if more.is_empty() {
            return Err(HelloError::Closed(io::ErrorKind::UnexpectedEof.into()));
        }
        let end = memchr::memchr(b'\n', more);
        let taken = end.unwrap_or(more.len());
        if line.len() + taken > MAX_HELLO_LINE {
            return Err(HelloError::TooLong);
        }
        line.extend_from_slice(&more[..taken]);
        io.consume(taken + usize::from(end.is_some()));
        if end.is_some() {
            return Ok(line);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::io::{AsyncReadExt, BufReader};

    use super::*;
    use crate::{SandboxCredential, SandboxId};

    /// The hello in `sent`, and the bytes after it.
    fn received(sent: &[u8], buffer: usize) -> Result<(SandboxHello, Vec<u8>), HelloError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut io = BufReader::with_capacity(buffer, sent);
            let hello = receive(&mut io).await?;
            let mut rest = Vec::new();
            io.read_to_end(&mut rest).await.unwrap();
            Ok((hello, rest))
        })
    }

    proptest! {
        #[test]
        fn random_bytes_do_not_panic(sent: Vec<u8>, buffer in 1..64_usize) {
            let _ = received(&sent, buffer);
        }

        #[test]
        fn hello_is_received_and_nothing_after_it_consumed(
            token in ".{0,99}",
            uid in ".{0,99}",
            rest: Vec<u8>,
            buffer in 1..999_usize,
        ) {
            let hello = SandboxHello {
                version: PROTOCOL_VERSION,
                uid,
                id: SandboxId::new("1"),
                credential: SandboxCredential::LaunchToken(token),
            };
            let mut sent = serde_json::to_vec(&hello).unwrap();
            sent.push(b'\n');
            sent.extend_from_slice(&rest);
            let (received, left) = received(&sent, buffer).unwrap();
            prop_assert_eq!(received.credential, hello.credential);
            prop_assert_eq!(received.uid, hello.uid);
            prop_assert_eq!(left, rest);
        }
    }
}
