//! The kubelet's end: accepts the connection of a sandbox, and sends it requests.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::stream::{self, BoxStream, Stream};
use futures::{FutureExt, StreamExt, TryStreamExt};
use http::{Method, Request, Response};
use http_body_util::{BodyExt, Either, Full, Limited, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http2::{self, SendRequest};
use hyper::rt::Executor;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite, BufReader};
use tokio_util::sync::CancellationToken;

use super::state_lines::StateLines;
use super::{
    CONNECTION_WINDOW, HelloError, MAX_FRAME_SIZE, PING_INTERVAL, PING_TIMEOUT, RESPONSE_WINDOW,
    hello,
};
use crate::usage::PodUsage;
use crate::{Bundle, LogQuery, PodState, RequestError, SandboxHello, SandboxWelcome, Stop};

/// Time until a sandbox begins its response. Only attach may take longer: it waits for the start of its container.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(15);
/// Send buffer of one stream.
const SEND_BUFFER_SIZE: usize = 64 * 1024;
/// Limit of a response with usage figures.
const MAX_USAGE_SIZE: usize = 4 * 1024 * 1024;
/// Limit of the body of an error response.
const MAX_REJECTION_SIZE: usize = 64 * 1024;

/// Why a request to a sandbox failed.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// The connection broke.
    #[error("cannot {call}: connection to the sandbox of pod {pod} lost")]
    Lost {
        /// The pod.
        pod: Arc<str>,
        /// The request.
        call: &'static str,
        /// HTTP/2's error.
        #[source]
        source: hyper::Error,
    },
    /// No response in time.
    #[error("cannot {call}: no response from the sandbox of pod {pod} within {} s", RESPONSE_TIMEOUT.as_secs())]
    Timeout {
        /// The pod.
        pod: Arc<str>,
        /// The request.
        call: &'static str,
    },
    /// The sandbox responded with an error.
    #[error("{}", error.message)]
    Rejected {
        /// The pod.
        pod: Arc<str>,
        /// The request.
        call: &'static str,
        /// The sandbox's error.
        error: RequestError,
    },
    /// The request cannot be encoded, or the response cannot be decoded.
    #[error("cannot {call}: invalid message to or from the sandbox of pod {pod}")]
    Invalid {
        /// The pod.
        pod: Arc<str>,
        /// The request.
        call: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Accepts the connection of a sandbox. `authenticate` checks the sandbox's credential, and returns the response, or `None` to
/// reject the sandbox.
pub async fn accept<IO>(
    io: IO,
    authenticate: impl FnOnce(&SandboxHello) -> Option<SandboxWelcome>,
) -> Result<(SandboxHello, SandboxClient), HelloError>
where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    // Bytes after the line may have been read with it, so the buffered reader is kept. Its buffer is smaller than the
    // reads of HTTP/2, which bypass it once it is empty.
    let mut io = BufReader::with_capacity(hello::MAX_HELLO_LINE, io);
    let hello = hello::receive(&mut io).await?;
    let Some(welcome) = authenticate(&hello) else {
        return Err(HelloError::Unauthenticated { uid: hello.uid });
    };
    hello::send(&mut io, &welcome)
        .await
        .map_err(HelloError::Closed)?;
    let tasks = ConnectionTasks::default();
    let (requests, connection) = http2::Builder::new(tasks.clone())
        .timer(TokioTimer::new())
        .initial_stream_window_size(RESPONSE_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(MAX_FRAME_SIZE)
        .max_send_buf_size(SEND_BUFFER_SIZE)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true)
        .handshake(TokioIo::new(io))
        .await
        .map_err(|source| HelloError::Handshake {
            uid: hello.uid.clone(),
            source,
        })?;
    let pod: Arc<str> = hello.uid.as_str().into();
    tasks.execute({
        let pod = Arc::clone(&pod);
        async move {
            if let Err(error) = connection.await {
                tracing::debug!(
                    %pod,
                    error = &error as &dyn std::error::Error,
                    "connection to sandbox broke"
                );
            }
        }
    });
    let client = SandboxClient {
        pod,
        requests,
        tasks,
    };
    Ok((hello, client))
}

/// A complete request body, or one that is streamed while the response arrives.
type Body = Either<Full<Bytes>, StreamBody<BoxStream<'static, Result<Frame<Bytes>, Infallible>>>>;

/// A connected sandbox. Clones share the connection, which ends when the last of them is dropped and
/// the last stream has ended, or when one of them closes it.
#[derive(Clone, Debug)]
pub struct SandboxClient {
    pod: Arc<str>,
    requests: SendRequest<Body>,
    tasks: ConnectionTasks,
}

/// Runs the tasks of one connection until it is closed.
#[derive(Clone, Debug, Default)]
struct ConnectionTasks(CancellationToken);

impl<F: Future<Output: Send> + Send + 'static> Executor<F> for ConnectionTasks {
    fn execute(&self, task: F) {
        let closed = self.0.clone();
        tokio::spawn(async move { closed.run_until_cancelled(task).await.is_some() });
    }
}

impl SandboxClient {
    /// Sends the desired pod.
    pub async fn put_bundle(&self, bundle: &Bundle) -> Result<(), ConnectionError> {
        self.send("apply the bundle", Method::PUT, "/v1/pod", bundle)
            .await
    }

    /// Stops the pod.
    pub async fn stop(&self, stop: &Stop) -> Result<(), ConnectionError> {
        self.send("stop the pod", Method::POST, "/v1/stop", stop)
            .await
    }

    /// Makes the sandbox of a finished pod clean up and exit.
    pub async fn dismiss(&self) -> Result<(), ConnectionError> {
        self.send("dismiss the sandbox", Method::POST, "/v1/dismiss", &())
            .await
    }

    /// As [`dismiss`](Self::dismiss), but keeps the pod's log files.
    pub async fn retire(&self) -> Result<(), ConnectionError> {
        self.send("retire the sandbox", Method::POST, "/v1/retire", &())
            .await
    }

    /// The pod's state, now and after each change; a slow reader gets only the newest. Ends with the connection.
    pub async fn states(
        &self,
    ) -> Result<impl Stream<Item = Result<PodState, ConnectionError>> + Send + use<>, ConnectionError>
    {
        let call = "watch the pod's state";
        let response = self
            .request(call, Method::GET, "/v1/state", Bytes::new())
            .await?;
        let reader = StateReader {
            body: Some(response.into_body()),
            lines: StateLines::default(),
        };
        let pod = Arc::clone(&self.pod);
        Ok(
            stream::try_unfold(reader, StateReader::next).map_err(move |source| {
                ConnectionError::Invalid {
                    pod: Arc::clone(&pod),
                    call,
                    source,
                }
            }),
        )
    }

    /// A container's log. Ends with an error if the connection breaks first.
    pub async fn logs(
        &self,
        query: &LogQuery,
    ) -> Result<impl Stream<Item = Result<Bytes, ConnectionError>> + Send + use<>, ConnectionError>
    {
        let call = "read a log";
        let query = self.encode(call, query)?;
        let response = self.request(call, Method::POST, "/v1/logs", query).await?;
        let pod = Arc::clone(&self.pod);
        Ok(response
            .into_body()
            .into_data_stream()
            .map_err(move |source| ConnectionError::Lost {
                pod: Arc::clone(&pod),
                call,
                source,
            }))
    }

    /// The pod's resource usage.
    pub async fn usage(&self) -> Result<PodUsage, ConnectionError> {
        let call = "read the pod's usage";
        let response = self.request(call, Method::GET, "/v1/usage", Bytes::new());
        let body = Limited::new(response.await?.into_body(), MAX_USAGE_SIZE);
        let text = tokio::time::timeout(RESPONSE_TIMEOUT, body.collect())
            .await
            .map_err(|_| ConnectionError::Timeout {
                pod: Arc::clone(&self.pod),
                call,
            })?
            .map_err(|error| self.invalid(call, io::Error::other(error)))?
            .to_bytes();
        serde_json::from_slice(&text).map_err(|error| self.invalid(call, error.into()))
    }

    /// Closes the connection and breaks its streams. The sandbox then connects again, which it does not do as long as a stream of a
    /// connection that no longer works keeps that open.
    pub fn close(&self) {
        self.tasks.0.cancel();
    }

    /// Whether the connection has ended, so that no call can succeed.
    pub fn is_closed(&self) -> bool {
        self.requests.is_closed()
    }

    async fn send(
        &self,
        call: &'static str,
        method: Method,
        path: &str,
        value: &impl Serialize,
    ) -> Result<(), ConnectionError> {
        let body = self.encode(call, value)?;
        self.request(call, method, path, body).await.map(|_| ())
    }

    pub(super) fn encode(
        &self,
        call: &'static str,
        value: &impl Serialize,
    ) -> Result<Bytes, ConnectionError> {
        match serde_json::to_vec(value) {
            Ok(body) => Ok(body.into()),
            Err(error) => Err(self.invalid(call, error.into())),
        }
    }

    /// Sends a request, and waits until its response begins.
    async fn request(
        &self,
        call: &'static str,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Response<Incoming>, ConnectionError> {
        self.request_with_body(call, method, path, Either::Left(Full::new(body)))
            .await
    }

    /// Sends a request whose body is streamed while the response arrives. The caller limits the time until the response begins.
    pub(super) async fn request_streaming(
        &self,
        call: &'static str,
        path: &str,
        body: impl Stream<Item = Bytes> + Send + 'static,
    ) -> Result<Response<Incoming>, ConnectionError> {
        let frames = body.map(|bytes| Ok(Frame::data(bytes))).boxed();
        let body = Either::Right(StreamBody::new(frames));
        self.request_untimed(call, Method::POST, path, body).await
    }

    /// Limits the time until a response begins.
    pub(super) async fn within_timeout(
        &self,
        call: &'static str,
        response: impl Future<Output = Result<Response<Incoming>, ConnectionError>>,
    ) -> Result<Response<Incoming>, ConnectionError> {
        match tokio::time::timeout(RESPONSE_TIMEOUT, response).await {
            Ok(response) => response,
            Err(_) => Err(ConnectionError::Timeout {
                pod: Arc::clone(&self.pod),
                call,
            }),
        }
    }

    async fn request_with_body(
        &self,
        call: &'static str,
        method: Method,
        path: &str,
        body: Body,
    ) -> Result<Response<Incoming>, ConnectionError> {
        let response = self.request_untimed(call, method, path, body);
        self.within_timeout(call, response).await
    }

    async fn request_untimed(
        &self,
        call: &'static str,
        method: Method,
        path: &str,
        body: Body,
    ) -> Result<Response<Incoming>, ConnectionError> {
        let request = Request::builder()
            .method(method)
            .uri(format!("http://sandbox{path}"))
            .body(body)
            .map_err(|error| self.invalid(call, io::Error::other(error)))?;
        let response = self.requests.clone().send_request(request).await;
        let response = response.map_err(|source| ConnectionError::Lost {
            pod: Arc::clone(&self.pod),
            call,
            source,
        })?;
        if response.status().is_success() {
            return Ok(response);
        }
        let text = Limited::new(response.into_body(), MAX_REJECTION_SIZE)
            .collect()
            .await
            .map_err(|error| self.invalid(call, io::Error::other(error)))?
            .to_bytes();
        let error =
            serde_json::from_slice(&text).map_err(|error| self.invalid(call, error.into()))?;
        Err(ConnectionError::Rejected {
            pod: Arc::clone(&self.pod),
            call,
            error,
        })
    }

    fn invalid(&self, call: &'static str, source: io::Error) -> ConnectionError {
        ConnectionError::Invalid {
            pod: Arc::clone(&self.pod),
            call,
            source,
        }
    }
}

/// Reads states from a response.
struct StateReader {
    /// `None` after its end.
    body: Option<Incoming>,
    lines: StateLines,
}

impl StateReader {
    /// The newest state; waits for one if none has arrived. Treats a broken connection like an end: the next request
    /// returns its error.
    async fn next(mut self) -> io::Result<Option<(PodState, Self)>> {
        loop {
            let available = self
                .body
                .as_mut()
                .and_then(|body| body.frame().now_or_never());
            let frame = match available {
                Some(frame) => frame,
                None => {
                    if let Some(state) = self.lines.newest()? {
                        return Ok(Some((state, self)));
                    }
                    let Some(body) = &mut self.body else {
                        return Ok(None);
                    };
                    body.frame().await
                }
            };
            match frame {
                Some(Ok(frame)) => {
                    if let Ok(bytes) = frame.into_data() {
                        self.lines.push(&bytes)?;
                    }
                }
                Some(Err(_)) | None => self.body = None,
            }
        }
    }
}
