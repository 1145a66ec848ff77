//! Frames in the body of an HTTP/2 request or response.

use std::io;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Incoming;

use super::frames::{FrameDecoder, StreamFrame};

/// Reads frames from a body, and no more bytes of it than the caller asks for.
#[derive(Debug)]
pub struct FrameReader {
    body: Incoming,
    decoder: FrameDecoder,
}

impl FrameReader {
    /// A reader of this body.
    pub fn new(body: Incoming) -> Self {
        Self {
            body,
            decoder: FrameDecoder::default(),
        }
    }

    /// The next frame; `None` at the end of the body. An error means that the peer is gone or sent an invalid frame.
    /// Cancel-safe.
    pub async fn next(&mut self) -> io::Result<Option<StreamFrame>> {
        loop {
            if let Some(frame) = self.decoder.take().map_err(io::Error::other)? {
                return Ok(Some(frame));
            }
            match next_chunk(&mut self.body).await? {
                Some(bytes) => self.decoder.push(bytes),
                None if self.decoder.is_between_frames() => return Ok(None),
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
    }
}

/// The next bytes of a body. Taking them opens the flow control window for as many more.
pub(super) async fn next_chunk(body: &mut Incoming) -> io::Result<Option<Bytes>> {
    while let Some(frame) = body.frame().await {
        if let Ok(bytes) = frame.map_err(io::Error::other)?.into_data() {
            return Ok(Some(bytes));
        }
    }
    Ok(None)
}
