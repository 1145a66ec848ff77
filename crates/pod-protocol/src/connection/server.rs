//! The sandbox's end: connects to its kubelet, and serves its requests.

use std::cell::Cell;
use std::convert::Infallible;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures::stream::{self, BoxStream, LocalBoxStream, StreamExt, TryStreamExt};
use futures::{FutureExt, Stream};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Either, Full, Limited, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite, BufReader};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::Instant;

use super::shared_socket::SharedSocket;
use super::transport::KubeletEndpoint;
use super::{
    MAX_FRAME_SIZE, MAX_STREAMS, PING_INTERVAL, PING_TIMEOUT, hello, server_streams, state_lines,
};
use crate::streams::{FrameReader, FrameStream};
use crate::usage::PodUsage;
use crate::{
    AttachQuery, Bundle, ExecQuery, LogQuery, PodState, RequestError, RequestErrorKind,
    SandboxCredential, SandboxHello, Stop,
};

/// The first and the longest delay before the sandbox connects again.
const RECONNECT_DELAY: Duration = Duration::from_millis(50);
const MAX_RECONNECT_DELAY: Duration = Duration::from_secs(1);
/// A kubelet that accepts connections but sends no request within this time counts as absent.
const FIRST_REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for responses in progress when the sandbox exits.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);
/// Limit of a request: a bundle, with the content of all its volumes.
const MAX_REQUEST_SIZE: usize = 64 * 1024 * 1024;
/// Flow control window of one request: enough that the upload of a file into the pod is not limited by round trips.
const REQUEST_WINDOW: u32 = 256 * 1024;
/// Most responses are rare and small.
const SEND_BUFFER_SIZE: usize = 64 * 1024;

/// The requests of a kubelet that a sandbox serves. All on one thread, so futures need not be `Send`.
#[allow(
    async_fn_in_trait,
    reason = "a sandbox runs on one thread; no caller needs Send futures"
)]
pub trait SandboxService: 'static {
    /// Applies the desired pod. The same bundle may arrive many times.
    fn put_bundle(&self, bundle: Bundle);

    /// Stops the pod.
    fn stop(&self, stop: Stop);

    /// The pod's final status is recorded: clean up and exit.
    fn dismiss(&self);

    /// As [`dismiss`](Self::dismiss), but keeps the pod's log files.
    fn retire(&self);

    /// The pod's state, complete, on each change.
    fn state(&self) -> watch::Receiver<PodState>;

    /// Reads a container's log.
    async fn logs(&self, query: LogQuery) -> Result<LogByteStream, RequestError>;

    /// The pod's resource usage; `None` before the first bundle.
    async fn usage(&self) -> Option<PodUsage> {
        None
    }

    /// Runs a command in a container. `client` reads the frames that the client sends after its query.
    async fn exec(
        &self,
        query: ExecQuery,
        client: FrameReader,
    ) -> Result<FrameStream, RequestError>;

    /// Attaches to the streams of a running container.
    async fn attach(
        &self,
        query: AttachQuery,
        client: FrameReader,
    ) -> Result<FrameStream, RequestError>;

    /// Connects to a port of the pod.
    async fn port_forward(&self, port: u16) -> Result<TcpStream, RequestError>;
}

/// The bytes of a log.
pub type LogByteStream = BoxStream<'static, io::Result<Bytes>>;

/// Why [`stay_connected`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StayConnectedEnd {
    /// `done` completed.
    Done,
    /// No kubelet was reachable for longer than the time-out.
    KubeletLost,
}

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServeEnd {
    /// `done` completed.
    Done,
    /// It broke, or the kubelet closed it, after at least one request.
    ConnectionLost,
    /// The kubelet sent no request.
    NoRequest,
}

/// Serves the kubelet, and connects again each time the connection is lost, until `done` completes or no kubelet was
/// reachable for `kubelet_timeout`. The kubelet's welcome replaces the credential in `hello`. Must run in a `LocalSet`.
///
/// After `done`, responses in progress are completed, above all the newest state.
pub async fn stay_connected<S: SandboxService>(
    kubelet: &KubeletEndpoint,
    hello: &mut SandboxHello,
    service: Rc<S>,
    kubelet_timeout: Duration,
    done: impl Future<Output = ()>,
) -> StayConnectedEnd {
    let mut done = pin!(done.fuse());
    let mut last_contact = Instant::now();
    let mut delay = RECONNECT_DELAY;
    loop {
        let deadline = last_contact + kubelet_timeout;
        match connect(kubelet, hello, &service, &mut done, deadline).await {
            Ok(ServeEnd::Done) => return StayConnectedEnd::Done,
            Ok(ServeEnd::ConnectionLost) => {
                tracing::debug!("connection to the kubelet lost");
                last_contact = Instant::now();
                delay = RECONNECT_DELAY;
            }
            Ok(ServeEnd::NoRequest) => tracing::debug!("kubelet accepted but sent no request"),
            Err(error) => tracing::trace!(%error, "cannot connect to the kubelet"),
        }
        let deadline = last_contact + kubelet_timeout;
        tokio::select! {
            biased;
            () = &mut done => return StayConnectedEnd::Done,
            () = tokio::time::sleep_until(deadline) => return StayConnectedEnd::KubeletLost,
            () = tokio::time::sleep(delay) => {}
        }
        delay = (delay * 2).min(MAX_RECONNECT_DELAY);
    }
}

/// Connects once, and serves the connection. Fails if no kubelet listens.
async fn connect<S: SandboxService>(
    kubelet: &KubeletEndpoint,
    hello: &mut SandboxHello,
    service: &Rc<S>,
    done: impl Future<Output = ()>,
    deadline: Instant,
) -> io::Result<ServeEnd> {
    let mut done = pin!(done);
    let io = tokio::select! {
        connected = tokio::time::timeout_at(deadline, kubelet.connect()) => connected??,
        () = &mut done => return Ok(ServeEnd::Done),
    };
    let timeout = deadline.duration_since(Instant::now());
    Ok(serve_with_timeout(
        io,
        hello,
        Rc::clone(service),
        done,
        timeout.min(FIRST_REQUEST_TIMEOUT),
    )
    .await)
}

/// Sends the hello on a new connection, and serves the kubelet's requests until the connection is lost or `done`
/// completes. The kubelet's welcome replaces the credential in `hello`. Must run in a `LocalSet`.
pub async fn serve<IO, S>(
    io: IO,
    hello: &mut SandboxHello,
    service: Rc<S>,
    done: impl Future<Output = ()>,
) -> ServeEnd
where
    IO: AsyncRead + AsyncWrite + Unpin + 'static,
    S: SandboxService,
{
    serve_with_timeout(io, hello, service, done, FIRST_REQUEST_TIMEOUT).await
}

async fn serve_with_timeout<IO, S>(
    io: IO,
    hello: &mut SandboxHello,
    service: Rc<S>,
    done: impl Future<Output = ()>,
    first_request_timeout: Duration,
) -> ServeEnd
where
    IO: AsyncRead + AsyncWrite + Unpin + 'static,
    S: SandboxService,
{
    let mut done = pin!(done);
    let requested = Rc::new(Cell::new(false));
    let (open, closing) = watch::channel(());
    let handler = service_fn({
        let requested = Rc::clone(&requested);
        let handler = RequestHandler { service, closing };
        move |request| {
            requested.set(true);
            let handler = handler.clone();
            async move { Ok::<_, Infallible>(handler.handle(request).await) }
        }
    });

    let timeout = tokio::time::sleep(first_request_timeout);
    let mut timeout = pin!(timeout);
    // Bytes after the welcome may be read with it, so the buffered reader is kept.
    let mut io = BufReader::with_capacity(hello::MAX_HELLO_LINE, io);
    let welcomed = tokio::select! {
        welcomed = exchange_hello(&mut io, hello) => welcomed,
        () = &mut timeout => return ServeEnd::NoRequest,
        () = &mut done => return ServeEnd::Done,
    };
    if let Err(error) = welcomed {
        tracing::debug!(
            error = &error as &dyn std::error::Error,
            "kubelet did not welcome the sandbox"
        );
        return ServeEnd::NoRequest;
    }
    let io = SharedSocket::new(io);
    let connection = http2::Builder::new(LocalExecutor)
        .timer(TokioTimer::new())
        .initial_stream_window_size(REQUEST_WINDOW)
        // All streams together cannot exhaust it: a command that does not read its input delays no other request.
        .initial_connection_window_size(MAX_STREAMS * REQUEST_WINDOW)
        .max_frame_size(MAX_FRAME_SIZE)
        .max_concurrent_streams(MAX_STREAMS)
        .max_send_buf_size(SEND_BUFFER_SIZE)
        .auto_date_header(false)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .serve_connection(TokioIo::new(io.clone()), handler);
    let mut connection = pin!(connection);
    loop {
        tokio::select! {
            ended = &mut connection => {
                if let Err(error) = ended {
                    tracing::debug!(error = &error as &dyn std::error::Error, "connection to the kubelet broke");
                }
                return if requested.get() { ServeEnd::ConnectionLost } else { ServeEnd::NoRequest };
            }
            () = &mut timeout, if !requested.get() => {
                if !requested.get() {
                    return ServeEnd::NoRequest;
                }
            }
            () = &mut done => break,
        }
    }
    drop(open);
    connection.as_mut().graceful_shutdown();
    let shutdown = async {
        if connection.await.is_ok() {
            io.wait_for_close().await;
        }
    };
    let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, shutdown).await;
    ServeEnd::Done
}

/// Sends the hello and waits for the welcome.
async fn exchange_hello<IO: AsyncRead + AsyncWrite + Unpin>(
    io: &mut BufReader<IO>,
    hello: &mut SandboxHello,
) -> Result<(), hello::HelloError> {
    hello::send(io, hello)
        .await
        .map_err(hello::HelloError::Closed)?;
    let welcome = hello::receive_welcome(io).await?;
    if let Some(key) = welcome.key {
        hello.credential = SandboxCredential::Key(key);
    }
    Ok(())
}

/// Runs hyper's tasks on the sandbox's thread.
#[derive(Clone, Copy)]
struct LocalExecutor;

impl<F: Future<Output: 'static> + 'static> hyper::rt::Executor<F> for LocalExecutor {
    fn execute(&self, task: F) {
        tokio::task::spawn_local(task);
    }
}

pub(super) type ServiceResponse =
    Response<Either<Full<Bytes>, StreamBody<LocalBoxStream<'static, io::Result<Frame<Bytes>>>>>>;

struct RequestHandler<S> {
    service: Rc<S>,
    /// Closed when the sandbox exits.
    closing: watch::Receiver<()>,
}

impl<S> Clone for RequestHandler<S> {
    fn clone(&self) -> Self {
        Self {
            service: Rc::clone(&self.service),
            closing: self.closing.clone(),
        }
    }
}

impl<S: SandboxService> RequestHandler<S> {
    async fn handle(self, request: Request<Incoming>) -> ServiceResponse {
        let (head, body) = request.into_parts();
        match self.route(&head.method, head.uri.path(), body).await {
            Ok(response) => response,
            Err(error) => {
                tracing::debug!(method = %head.method, path = head.uri.path(), ?error, "request rejected");
                error_response(&error)
            }
        }
    }

    async fn route(
        self,
        method: &Method,
        path: &str,
        body: Incoming,
    ) -> Result<ServiceResponse, RequestError> {
        if let Some(port) = path.strip_prefix("/v1/port-forward/") {
            return server_streams::port_forward(&*self.service, port, body).await;
        }
        match (method.as_str(), path) {
            ("PUT", "/v1/pod") => self.service.put_bundle(read_json(body).await?),
            ("POST", "/v1/stop") => self.service.stop(read_json(body).await?),
            ("POST", "/v1/dismiss") => self.service.dismiss(),
            ("POST", "/v1/retire") => self.service.retire(),
            ("GET", "/v1/state") => {
                return Ok(streaming(states(self.service.state(), self.closing)));
            }
            ("GET", "/v1/usage") => return usage(self.service.usage().await.as_ref()),
            ("POST", "/v1/logs") => {
                let query = read_json(body).await?;
                let log = self.service.logs(query).await;
                return log.map(streaming);
            }
            ("POST", "/v1/exec") => return server_streams::exec(&*self.service, body).await,
            ("POST", "/v1/attach") => return server_streams::attach(&*self.service, body).await,
            _ => {
                let message = format!("unknown request {method} {path}");
                return Err(RequestError::not_found(message));
            }
        }
        Ok(complete(StatusCode::NO_CONTENT, Bytes::new()))
    }
}

/// The current state, then each state that is the newest when the connection has room for it. The last state before the
/// sandbox exits is always sent.
fn states(
    mut states: watch::Receiver<PodState>,
    closing: watch::Receiver<()>,
) -> BoxStream<'static, io::Result<Bytes>> {
    states.mark_changed();
    stream::try_unfold((states, closing), |(mut states, mut closing)| async move {
        tokio::select! {
            biased;
            changed = states.changed() => if changed.is_err() {
                return Ok(None);
            },
            _ = closing.changed() => return Ok(None),
        }
        let line = state_lines::encode_line(&states.borrow_and_update())?;
        Ok(Some((Bytes::from(line), (states, closing))))
    })
    .boxed()
}

async fn read_json<T: DeserializeOwned>(body: Incoming) -> Result<T, RequestError> {
    let body = Limited::new(body, MAX_REQUEST_SIZE).collect().await;
    let bytes = body.map_err(|error| RequestError::bad_request(error.to_string()))?;
    serde_json::from_slice(&bytes.to_bytes())
        .map_err(|error| RequestError::bad_request(error.to_string()))
}

pub(super) fn streaming(bytes: impl Stream<Item = io::Result<Bytes>> + 'static) -> ServiceResponse {
    Response::new(Either::Right(StreamBody::new(
        bytes.map_ok(Frame::data).boxed_local(),
    )))
}

fn error_response(error: &RequestError) -> ServiceResponse {
    let code = match error.kind {
        RequestErrorKind::BadRequest => StatusCode::BAD_REQUEST,
        RequestErrorKind::NotFound => StatusCode::NOT_FOUND,
        RequestErrorKind::Failed => StatusCode::UNPROCESSABLE_ENTITY,
    };
    // An enum and a string always serialize.
    complete(code, serde_json::to_vec(error).unwrap_or_default().into())
}

fn usage(usage: Option<&impl Serialize>) -> Result<ServiceResponse, RequestError> {
    let missing = || RequestError::not_found("the pod has not been started yet");
    let usage = usage.ok_or_else(missing)?;
    let text =
        serde_json::to_vec(usage).map_err(|error| RequestError::failed(error.to_string()))?;
    Ok(complete(StatusCode::OK, text.into()))
}

fn complete(code: StatusCode, bytes: Bytes) -> ServiceResponse {
    let mut response = Response::new(Either::Left(Full::new(bytes)));
    *response.status_mut() = code;
    response
}
