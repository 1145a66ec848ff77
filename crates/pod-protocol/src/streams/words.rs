//! What is said in a body of HTTP/2, word by word.

use std::io;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Incoming;

use super::frames::{Decoder, Word};

/// The words of a body, each taken when there is room for it.
#[derive(Debug)]
pub struct Words {
    body: Incoming,
    decoder: Decoder,
}

impl Words {
    /// Listens.
    pub fn new(body: Incoming) -> Self {
        Self {
            body,
            decoder: Decoder::default(),
        }
    }

    /// The next word; `None` at the end. An error means that the other side is gone, or says nonsense. May be dropped
    /// while it waits, and nothing is lost.
    pub async fn next(&mut self) -> io::Result<Option<Word>> {
        loop {
            if let Some(word) = self.decoder.take().map_err(io::Error::other)? {
                return Ok(Some(word));
            }
            match next_piece(&mut self.body).await? {
                Some(bytes) => self.decoder.push(bytes),
                None if self.decoder.is_between_frames() => return Ok(None),
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
    }
}

/// The next bytes of a body. What was taken makes room for as much again.
pub(super) async fn next_piece(body: &mut Incoming) -> io::Result<Option<Bytes>> {
    while let Some(frame) = body.frame().await {
        if let Ok(bytes) = frame.map_err(io::Error::other)?.into_data() {
            return Ok(Some(bytes));
        }
    }
    Ok(None)
}
