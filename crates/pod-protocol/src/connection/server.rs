//! The sandbox's side: dials its kubelet, and answers it.

use std::cell::Cell;
use std::convert::Infallible;
use std::io;
use std::path::Path;
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
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::watch;
use tokio::time::Instant;

use super::lingering::Lingering;
use super::{FRAME, MAX_STREAMS, PING_EVERY, PING_PATIENCE, hello, sessions, state_lines};
use crate::streams::{Frames, Words};
use crate::usage::PodUsage;
use crate::{AttachQuery, Bundle, ExecQuery, Hello, LogQuery, PodState, Problem, Stop};

/// How long to wait before the kubelet is dialled again, at first and at most.
const REDIAL_FIRST: Duration = Duration::from_millis(50);
const REDIAL_AT_MOST: Duration = Duration::from_secs(1);
/// How long a kubelet may take to ask anything. One that listens but never asks is not there.
const FIRST_WORD_PATIENCE: Duration = Duration::from_secs(10);
/// How long answers under way may take once the sandbox ends.
const LAST_WORDS_PATIENCE: Duration = Duration::from_secs(2);
/// How large a request may be: a bundle, with the content of all its volumes.
const LARGEST_REQUEST: usize = 64 * 1024 * 1024;
/// How much of one request may wait to be read: enough that whoever sends a file into the pod need not wait for us each time.
const REQUEST_WINDOW: u32 = 256 * 1024;
/// Most answers are rare and small, so little is set aside for what is not sent yet.
const SEND_BUFFER: usize = 64 * 1024;

/// What a kubelet asks of a pod. All on one thread, so futures need not be `Send`.
#[allow(
    async_fn_in_trait,
    reason = "a sandbox runs on one thread; no caller needs Send futures"
)]
pub trait SandboxService: 'static {
    /// The pod as it should be, now and again. The same bundle may come many times.
    fn put_bundle(&self, bundle: Bundle);

    /// End the pod.
    fn stop(&self, stop: Stop);

    /// The pod's end is recorded: clean up and exit.
    fn dismiss(&self);

    /// The same, but the pod's logs stay where they are.
    fn retire(&self);

    /// The pod's state, whole, each time it changes.
    fn state(&self) -> watch::Receiver<PodState>;

    /// A part of a container's log.
    async fn logs(&self, query: LogQuery) -> Result<LogBytes, Problem>;

    /// What the pod uses now; `None` while there is nothing of it.
    async fn usage(&self) -> Option<PodUsage> {
        None
    }

    /// Runs a command in a container. `client` reads what the client sends after its query.
    async fn exec(&self, query: ExecQuery, client: Words) -> Result<Frames, Problem>;

    /// A container's own streams.
    async fn attach(&self, query: AttachQuery, client: Words) -> Result<Frames, Problem>;

    /// A connection to a port of the pod.
    async fn port_forward(&self, port: u16) -> Result<TcpStream, Problem>;
}

/// A log, as it is read.
pub type LogBytes = BoxStream<'static, io::Result<Bytes>>;

/// Why a sandbox stopped looking for its kubelet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parting {
    /// The sandbox itself was done.
    Done,
    /// There was no kubelet for longer than the sandbox had patience.
    Forsaken,
}

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The sandbox itself was done.
    Done,
    /// It broke, or the kubelet closed it, after the kubelet had asked for something.
    Broken,
    /// The kubelet never asked for anything.
    Unheard,
}

/// Finds the kubelet at a Unix socket, and again each time it is lost, until `done` or until there was none for
/// `patience`. Runs within a `LocalSet`.
///
/// After `done`, what the kubelet is being told is still told, the newest state above all.
pub async fn stay_connected<P: SandboxService>(
    socket: &Path,
    hello: &Hello,
    pod: Rc<P>,
    patience: Duration,
    done: impl Future<Output = ()>,
) -> Parting {
    let mut done = pin!(done.fuse());
    let mut last_heard = Instant::now();
    let mut redial = REDIAL_FIRST;
    loop {
        let end = dial(socket, hello, &pod, &mut done, last_heard + patience).await;
        match end {
            Ok(Ended::Done) => return Parting::Done,
            Ok(Ended::Broken) => {
                tracing::debug!("the connection to the kubelet is lost");
                last_heard = Instant::now();
                redial = REDIAL_FIRST;
            }
            Ok(Ended::Unheard) => tracing::debug!("the kubelet listens but does not ask"),
            Err(error) => tracing::trace!(%error, "no kubelet yet"),
        }
        let forsaken = last_heard + patience;
        tokio::select! {
            biased;
            () = &mut done => return Parting::Done,
            () = tokio::time::sleep_until(forsaken) => return Parting::Forsaken,
            () = tokio::time::sleep(redial) => {}
        }
        redial = (redial * 2).min(REDIAL_AT_MOST);
    }
}

/// One attempt: an error if nobody listens.
async fn dial<P: SandboxService>(
    socket: &Path,
    hello: &Hello,
    pod: &Rc<P>,
    done: impl Future<Output = ()>,
    forsaken: Instant,
) -> io::Result<Ended> {
    let io = UnixStream::connect(socket).await?;
    let patience = forsaken.duration_since(Instant::now());
    Ok(serve_for(
        io,
        hello,
        Rc::clone(pod),
        done,
        patience.min(FIRST_WORD_PATIENCE),
    )
    .await)
}

/// Says hello on a connection that was just made, and answers the kubelet until it is lost or `done`. Runs within a
/// `LocalSet`.
pub async fn serve<IO, P>(
    io: IO,
    hello: &Hello,
    pod: Rc<P>,
    done: impl Future<Output = ()>,
) -> Ended
where
    IO: AsyncRead + AsyncWrite + Unpin + 'static,
    P: SandboxService,
{
    serve_for(io, hello, pod, done, FIRST_WORD_PATIENCE).await
}

async fn serve_for<IO, P>(
    mut io: IO,
    hello: &Hello,
    pod: Rc<P>,
    done: impl Future<Output = ()>,
    patience: Duration,
) -> Ended
where
    IO: AsyncRead + AsyncWrite + Unpin + 'static,
    P: SandboxService,
{
    let mut done = pin!(done);
    let heard = Rc::new(Cell::new(false));
    let (open, closing) = watch::channel(());
    let service = service_fn({
        let heard = Rc::clone(&heard);
        let desk = Desk { pod, closing };
        move |request| {
            heard.set(true);
            let desk = desk.clone();
            async move { Ok::<_, Infallible>(desk.answer(request).await) }
        }
    });

    let silence = tokio::time::sleep(patience);
    let mut silence = pin!(silence);
    let said = tokio::select! {
        said = hello::say(&mut io, hello) => said,
        () = &mut silence => return Ended::Unheard,
        () = &mut done => return Ended::Done,
    };
    if said.is_err() {
        return Ended::Unheard;
    }
    let io = Lingering::new(io);
    let connection = http2::Builder::new(LocalExecutor)
        .timer(TokioTimer::new())
        .initial_stream_window_size(REQUEST_WINDOW)
        // All streams together never fill it: a command that does not read its input holds up nobody else.
        .initial_connection_window_size(MAX_STREAMS * REQUEST_WINDOW)
        .max_frame_size(FRAME)
        .max_concurrent_streams(MAX_STREAMS)
        .max_send_buf_size(SEND_BUFFER)
        .auto_date_header(false)
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_PATIENCE)
        .serve_connection(TokioIo::new(io.clone()), service);
    let mut connection = pin!(connection);
    loop {
        tokio::select! {
            ended = &mut connection => {
                if let Err(error) = ended {
                    tracing::debug!(error = &error as &dyn std::error::Error, "the connection to the kubelet broke");
                }
                return if heard.get() { Ended::Broken } else { Ended::Unheard };
            }
            () = &mut silence, if !heard.get() => {
                if !heard.get() {
                    return Ended::Unheard;
                }
            }
            () = &mut done => break,
        }
    }
    drop(open);
    connection.as_mut().graceful_shutdown();
    let last_words = async {
        if connection.await.is_ok() {
            io.until_peer_is_gone().await;
        }
    };
    let _ = tokio::time::timeout(LAST_WORDS_PATIENCE, last_words).await;
    Ended::Done
}

/// Runs hyper's tasks where the sandbox runs.
#[derive(Clone, Copy)]
struct LocalExecutor;

impl<F: Future<Output: 'static> + 'static> hyper::rt::Executor<F> for LocalExecutor {
    fn execute(&self, task: F) {
        tokio::task::spawn_local(task);
    }
}

pub(super) type Answer =
    Response<Either<Full<Bytes>, StreamBody<LocalBoxStream<'static, io::Result<Frame<Bytes>>>>>>;
/// The answer to what can't be done.
pub(super) type Refusal = (StatusCode, Problem);

/// Where requests are answered.
struct Desk<P> {
    pod: Rc<P>,
    /// Closed when the sandbox ends.
    closing: watch::Receiver<()>,
}

impl<P> Clone for Desk<P> {
    fn clone(&self) -> Self {
        Self {
            pod: Rc::clone(&self.pod),
            closing: self.closing.clone(),
        }
    }
}

impl<P: SandboxService> Desk<P> {
    async fn answer(self, request: Request<Incoming>) -> Answer {
        let (head, body) = request.into_parts();
        match self.find(&head.method, head.uri.path(), body).await {
            Ok(answer) => answer,
            Err((code, problem)) => {
                tracing::debug!(method = %head.method, path = head.uri.path(), %code, problem = problem.message, "refused");
                refusal(code, &problem)
            }
        }
    }

    async fn find(self, method: &Method, path: &str, body: Incoming) -> Result<Answer, Refusal> {
        if let Some(port) = path.strip_prefix("/v1/port-forward/") {
            return sessions::port_forward(&*self.pod, port, body).await;
        }
        match (method.as_str(), path) {
            ("PUT", "/v1/pod") => self.pod.put_bundle(read(body).await?),
            ("POST", "/v1/stop") => self.pod.stop(read(body).await?),
            ("POST", "/v1/dismiss") => self.pod.dismiss(),
            ("POST", "/v1/retire") => self.pod.retire(),
            ("GET", "/v1/state") => return Ok(streamed(states(self.pod.state(), self.closing))),
            ("GET", "/v1/usage") => return told(self.pod.usage().await.as_ref()),
            ("POST", "/v1/logs") => {
                let query = read(body).await?;
                let log = self.pod.logs(query).await;
                return log.map(streamed).map_err(refused);
            }
            ("POST", "/v1/exec") => return sessions::exec(&*self.pod, body).await,
            ("POST", "/v1/attach") => return sessions::attach(&*self.pod, body).await,
            _ => {
                return Err((
                    StatusCode::NOT_FOUND,
                    problem("NotFound", format!("a sandbox has no {method} {path}")),
                ));
            }
        }
        Ok(whole(StatusCode::NO_CONTENT, Bytes::new()))
    }
}

/// Each state that is the newest when there is room to send it, beginning with the one that is; the last one too.
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
        let line = state_lines::line(&states.borrow_and_update())?;
        Ok(Some((Bytes::from(line), (states, closing))))
    })
    .boxed()
}

async fn read<T: DeserializeOwned>(body: Incoming) -> Result<T, Refusal> {
    let body = Limited::new(body, LARGEST_REQUEST).collect().await;
    let bytes = body.map_err(|error| bad(error.to_string()))?.to_bytes();
    serde_json::from_slice(&bytes).map_err(|error| bad(error.to_string()))
}

/// What was asked makes no sense.
pub(super) fn bad(why: String) -> Refusal {
    (StatusCode::BAD_REQUEST, problem("BadRequest", why))
}

/// The pod won't, or can't.
pub(super) fn refused(problem: Problem) -> Refusal {
    (StatusCode::UNPROCESSABLE_ENTITY, problem)
}

fn problem(reason: &str, message: String) -> Problem {
    Problem {
        reason: reason.to_owned(),
        message,
    }
}

pub(super) fn streamed(bytes: impl Stream<Item = io::Result<Bytes>> + 'static) -> Answer {
    Response::new(Either::Right(StreamBody::new(
        bytes.map_ok(Frame::data).boxed_local(),
    )))
}

fn refusal(code: StatusCode, problem: &Problem) -> Answer {
    // Two strings: nothing in them can fail to be JSON.
    whole(code, serde_json::to_vec(problem).unwrap_or_default().into())
}

/// An answer that may not be there.
fn told(what: Option<&impl Serialize>) -> Result<Answer, (StatusCode, Problem)> {
    let missing = || problem("NotFound", "the pod has not begun".to_owned());
    let what = what.ok_or_else(|| (StatusCode::NOT_FOUND, missing()))?;
    let text = serde_json::to_vec(what).map_err(|error| {
        let problem = problem("Internal", error.to_string());
        (StatusCode::INTERNAL_SERVER_ERROR, problem)
    })?;
    Ok(whole(StatusCode::OK, text.into()))
}

fn whole(code: StatusCode, bytes: Bytes) -> Answer {
    let mut answer = Response::new(Either::Left(Full::new(bytes)));
    *answer.status_mut() = code;
    answer
}
