//! Bidirectional requests, from the kubelet's end.

use std::io;

use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{Stream, StreamExt, TryStreamExt};
use http_body_util::BodyExt;

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
        let call = "run a command";
        let query = encode_frame(FrameKind::Query, &self.encode(call, query)?);
        let input = stream::iter([query]).chain(input);
        let response = self.request_streaming(call, "/v1/exec", input);
        let response = self.within_timeout(call, response).await?;
        Ok(SandboxSession(FrameReader::new(response.into_body())))
    }

    /// Attaches to the streams of a container. Waits, without a time-out, until the container runs. `input` as for
    /// [`exec`](Self::exec).
    pub async fn attach(
        &self,
        query: &AttachQuery,
        input: impl Stream<Item = Bytes> + Send + 'static,
    ) -> Result<SandboxSession, ConnectionError> {
        let call = "attach to a container";
        let query = encode_frame(FrameKind::Query, &self.encode(call, query)?);
        let input = stream::iter([query]).chain(input);
        // The sandbox waits for the start of the container.
        let response = self.request_streaming(call, "/v1/attach", input).await?;
        Ok(SandboxSession(FrameReader::new(response.into_body())))
    }

    /// Connects to a port of the pod, and sends `input` to it. The end of `input` closes that direction. Returns a stream of the
    /// bytes from the port; dropping the stream closes the connection.
    pub async fn port_forward(
        &self,
        port: u16,
        input: impl Stream<Item = Bytes> + Send + 'static,
    ) -> Result<BoxStream<'static, io::Result<Bytes>>, ConnectionError> {
        let path = format!("/v1/port-forward/{port}");
        let call = "forward a port";
        let response = self.request_streaming(call, &path, input);
        let response = self.within_timeout(call, response).await?;
        let bytes = response.into_body().into_data_stream();
        Ok(bytes.map_err(io::Error::other).boxed())
    }
}

/// A session of exec or attach. Dropping it before its end resets the HTTP/2 stream: the sandbox sees a disconnected client.
#[derive(Debug)]
pub struct SandboxSession(FrameReader);

impl SandboxSession {
    /// The next frame; `None` or an error at the end of the stream. Cancel-safe.
    pub async fn next(&mut self) -> io::Result<Option<StreamFrame>> {
        self.0.next().await
    }
}
