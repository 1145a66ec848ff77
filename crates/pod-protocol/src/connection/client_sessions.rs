//! The calls that speak both ways at once, as a kubelet makes them.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use futures::{Stream, StreamExt, stream};
use hyper::body::{Body, Incoming};
use serde::Serialize;
use tokio::io::{AsyncRead, ReadBuf};

use super::client::{ConnectionError, SandboxClient};
use crate::streams::{Kind, Word, Words, plain};
use crate::{AttachQuery, ExecQuery};

impl SandboxClient {
    /// Runs a command in a container. `input` is frames; it goes on until it ends, or the conversation is dropped.
    pub async fn exec(
        &self,
        query: &ExecQuery,
        input: impl Stream<Item = Bytes> + Send + 'static,
    ) -> Result<Conversation, ConnectionError> {
        self.begin("run a command", "/v1/exec", query, input).await
    }

    /// Connects to a container's own streams. `input` as for [`exec`](Self::exec).
    pub async fn attach(
        &self,
        query: &AttachQuery,
        input: impl Stream<Item = Bytes> + Send + 'static,
    ) -> Result<Conversation, ConnectionError> {
        self.begin("attach to a container", "/v1/attach", query, input)
            .await
    }

    /// Connects to a port of the pod, and sends `input` there; its end is heard by the pod.
    pub async fn port_forward(
        &self,
        port: u16,
        input: impl Stream<Item = Bytes> + Send + 'static,
    ) -> Result<Forwarded, ConnectionError> {
        let path = format!("/v1/port-forward/{port}");
        let answer = self.converse("forward a port", &path, input).await?;
        Ok(Forwarded {
            body: answer.into_body(),
            left: Bytes::new(),
        })
    }

    async fn begin(
        &self,
        call: &'static str,
        path: &str,
        query: &impl Serialize,
        input: impl Stream<Item = Bytes> + Send + 'static,
    ) -> Result<Conversation, ConnectionError> {
        let question = plain(Kind::Question, &self.encode(call, query)?);
        let input = stream::iter([question]).chain(input);
        let answer = self.converse(call, path, input).await?;
        Ok(Conversation(Words::new(answer.into_body())))
    }
}

/// What a session says. Dropping it before its end tells the sandbox that the client is gone.
#[derive(Debug)]
pub struct Conversation(Words);

impl Conversation {
    /// The next word; after the last one, or without it, `None` or an error. May be dropped while it waits.
    pub async fn next(&mut self) -> io::Result<Option<Word>> {
        self.0.next().await
    }
}

/// What comes from a port of the pod. Dropping it ends the connection.
#[derive(Debug)]
pub struct Forwarded {
    body: Incoming,
    left: Bytes,
}

impl AsyncRead for Forwarded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.left.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(context)) {
                None => return Poll::Ready(Ok(())),
                Some(frame) => {
                    let frame = frame.map_err(io::Error::other)?;
                    self.left = frame.into_data().unwrap_or_default();
                }
            }
        }
        let length = self.left.len().min(buffer.remaining());
        buffer.put_slice(&self.left[..length]);
        self.left.advance(length);
        Poll::Ready(Ok(()))
    }
}
