//! The first line of a connection.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncWrite, AsyncWriteExt};

use crate::{Hello, VERSION};

/// How long the line may be; anybody can dial.
pub(super) const LONGEST: usize = 4096;
/// How long it may take.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// Why who dialled is not let in.
#[derive(Debug, thiserror::Error)]
pub enum HelloError {
    /// Nothing, or not all of it, was said in time.
    #[error("a sandbox dialled and did not say who it is within {} s", PATIENCE.as_secs())]
    Silent,
    /// The connection ended, or was never one.
    #[error("a sandbox dialled and was gone before it said who it is")]
    Gone(#[source] io::Error),
    /// More was said than anybody has to say.
    #[error("what dialled is no sandbox: its first line is longer than {LONGEST} bytes")]
    TooLong,
    /// Something else was said.
    #[error("what dialled is no sandbox: it does not say who it is")]
    Nonsense(#[source] serde_json::Error),
    /// A sandbox of another release.
    #[error(
        "the sandbox of pod {uid} speaks version {theirs} of the protocol, this kubelet version {VERSION}"
    )]
    Version {
        /// The pod.
        uid: String,
        /// Its version.
        theirs: u32,
    },
    /// It is not who it says.
    #[error("what dialled as the sandbox of pod {uid} is not known here")]
    Stranger {
        /// The pod.
        uid: String,
    },
    /// It said who it is, and then not what HTTP/2 says.
    #[error("the sandbox of pod {uid} does not speak HTTP/2")]
    Handshake {
        /// The pod.
        uid: String,
        /// Why.
        #[source]
        source: hyper::Error,
    },
}

/// Says who this sandbox is.
pub(super) async fn say(io: &mut (impl AsyncWrite + Unpin), hello: &Hello) -> io::Result<()> {
    let mut line = serde_json::to_vec(hello)?;
    line.push(b'\n');
    io.write_all(&line).await?;
    io.flush().await
}

/// Hears who dialled. Reads no further than the line, as far as the caller of `io` can see.
pub(super) async fn hear(io: &mut (impl AsyncBufRead + Unpin)) -> Result<Hello, HelloError> {
    let line = tokio::time::timeout(PATIENCE, line(io))
        .await
        .map_err(|_| HelloError::Silent)??;
    let hello: Hello = serde_json::from_slice(&line).map_err(HelloError::Nonsense)?;
    if hello.version != VERSION {
        return Err(HelloError::Version {
            uid: hello.uid,
            theirs: hello.version,
        });
    }
    Ok(hello)
}

async fn line(io: &mut (impl AsyncBufRead + Unpin)) -> Result<Vec<u8>, HelloError> {
    let mut line = Vec::new();
    loop {
        let more = io.fill_buf().await.map_err(HelloError::Gone)?;
        if more.is_empty() {
            return Err(HelloError::Gone(io::ErrorKind::UnexpectedEof.into()));
        }
        let end = memchr::memchr(b'\n', more);
        let taken = end.unwrap_or(more.len());
        if line.len() + taken > LONGEST {
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

    fn heard(said: &[u8], buffer: usize) -> Result<(Hello, Vec<u8>), HelloError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut io = BufReader::with_capacity(buffer, said);
            let hello = hear(&mut io).await?;
            let mut rest = Vec::new();
            io.read_to_end(&mut rest).await.unwrap();
            Ok((hello, rest))
        })
    }

    proptest! {
        #[test]
        fn anything_may_be_said(said: Vec<u8>, buffer in 1..64_usize) {
            let _ = heard(&said, buffer);
        }

        #[test]
        fn what_is_said_is_heard_and_no_more(
            token in ".{0,99}",
            uid in ".{0,99}",
            rest: Vec<u8>,
            buffer in 1..999_usize,
        ) {
            let hello = Hello { version: VERSION, token, uid };
            let mut said = serde_json::to_vec(&hello).unwrap();
            said.push(b'\n');
            said.extend_from_slice(&rest);
            let (heard, left) = heard(&said, buffer).unwrap();
            prop_assert_eq!(heard.token, hello.token);
            prop_assert_eq!(heard.uid, hello.uid);
            prop_assert_eq!(left, rest);
        }
    }
}
