//! Bidirectional requests, from the kubelet's end.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use futures::{Stream, StreamExt, stream};
use hyper::body::{Body, Incoming};
use serde::Serialize;
use tokio::io::{AsyncRead, ReadBuf};

use super::client::{ConnectionError, SandboxClient};
use crate::streams::{FrameKind, FrameReader, StreamFrame, encode_frame};
use crate::{AttachQuery, ExecQuery};

impl SandboxClient {
    /// Runs a command in a container. `input` yields encoded frames, and is polled until it ends or the session is dropped.
    pub async fn exec(
        &self,
        query: &ExecQuery,
        input: impl Stream<Item = Bytes> + Send + 'static,
    ) -> Result<SandboxSession, ConnectionError> {
        self.open_session("run a command", "/v1/exec", query, input)
            .await
    }

    /// Attaches to the streams of a running container. `input` as for [`exec`](Self::exec).
    pub async fn attach(
        &self,
        query: &AttachQuery,
        input: impl Stream<Item = Bytes> + Send + 'static,
    ) -> Result<SandboxSession, ConnectionError> {
        self.open_session("attach to a container", "/v1/attach", query, input)
            .await
    }

    /// Connects to a port of the pod, and sends `input` there. The end of `input` closes that direction.
    pub async fn port_forward(
        &self,
        port: u16,
        input: impl Stream<Item = Bytes> + Send + 'static,
    ) -> Result<PortForwardReader, ConnectionError> {
        let path = format!("/v1/port-forward/{port}");
        let response = self
            .request_streaming("forward a port", &path, input)
            .await?;
        Ok(PortForwardReader {
            body: response.into_body(),
            unread: Bytes::new(),
        })
    }

    async fn open_session(
        &self,
        call: &'static str,
        path: &str,
        query: &impl Serialize,
        input: impl Stream<Item = Bytes> + Send + 'static,
    ) -> Result<SandboxSession, ConnectionError> {
        let query = encode_frame(FrameKind::Query, &self.encode(call, query)?);
        let input = stream::iter([query]).chain(input);
        let response = self.request_streaming(call, path, input).await?;
        Ok(SandboxSession(FrameReader::new(response.into_body())))
    }
}

/// A session of exec or attach. Dropping it before its end tells the sandbox that the client is gone.
#[derive(Debug)]
pub struct SandboxSession(FrameReader);

impl SandboxSession {
    /// The next frame; `None` or an error at the end of the stream. Cancel-safe.
    pub async fn next(&mut self) -> io::Result<Option<StreamFrame>> {
        self.0.next().await
    }
}

/// The bytes that a port of the pod sends. Dropping it closes the connection.
#[derive(Debug)]
pub struct PortForwardReader {
    body: Incoming,
    unread: Bytes,
}

impl AsyncRead for PortForwardReader {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.unread.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(context)) {
                None => return Poll::Ready(Ok(())),
                Some(frame) => {
                    let frame = frame.map_err(io::Error::other)?;
                    self.unread = frame.into_data().unwrap_or_default();
                }
            }
        }
        let length = self.unread.len().min(buffer.remaining());
        buffer.put_slice(&self.unread[..length]);
        self.unread.advance(length);
        Poll::Ready(Ok(()))
    }
}
