//! The kubelet's side: lets a sandbox in, and asks it.

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
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite, BufReader};

use super::state_lines::StateLines;
use super::{
    ANSWER_WINDOW, CONNECTION_WINDOW, FRAME, HelloError, PING_EVERY, PING_PATIENCE, hello,
};
use crate::usage::PodUsage;
use crate::{Bundle, Hello, LogQuery, PodState, Problem, Stop};

/// How long a sandbox may take to begin an answer. It does nothing long before it does.
const ANSWER_PATIENCE: Duration = Duration::from_secs(15);
/// How much of what is sent on one stream waits in here.
const SEND_BUFFER: usize = 64 * 1024;
/// How large the figures of a pod may be.
const LARGEST_USAGE: usize = 4 * 1024 * 1024;
/// How large the text of a refusal may be.
const LARGEST_REFUSAL: usize = 64 * 1024;

/// Why a sandbox could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// The connection broke.
    #[error("the sandbox of pod {pod} was lost while asked to {call}")]
    Lost {
        /// The pod.
        pod: Arc<str>,
        /// What was asked.
        call: &'static str,
        /// What HTTP/2 says.
        #[source]
        source: hyper::Error,
    },
    /// It is there, but does not answer.
    #[error("the sandbox of pod {pod} does not answer when asked to {call}")]
    Silent {
        /// The pod.
        pod: Arc<str>,
        /// What was asked.
        call: &'static str,
    },
    /// It won't.
    #[error("{}", problem.message)]
    Refused {
        /// The pod.
        pod: Arc<str>,
        /// What was asked.
        call: &'static str,
        /// Why not.
        problem: Problem,
    },
    /// Its answer, or what it was to be asked, can't be understood.
    #[error("the sandbox of pod {pod} can't be understood when asked to {call}")]
    Nonsense {
        /// The pod.
        pod: Arc<str>,
        /// What was asked.
        call: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Lets a sandbox in that has just dialled, if `recognise` knows it: it looks at pod and token, and gives the name by
/// which the pod goes in messages.
pub async fn accept<IO>(
    io: IO,
    recognise: impl FnOnce(&Hello) -> Option<String>,
) -> Result<(Hello, SandboxClient), HelloError>
where
    IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    // What follows the line may come with it, so the reader that took both is kept. Its buffer is smaller than what
    // HTTP/2 reads at once, so it is empty and out of the way from then on.
    let mut io = BufReader::with_capacity(hello::LONGEST, io);
    let hello = hello::hear(&mut io).await?;
    let Some(pod) = recognise(&hello) else {
        return Err(HelloError::Stranger { uid: hello.uid });
    };
    let (requests, connection) = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .initial_stream_window_size(ANSWER_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME)
        .max_send_buf_size(SEND_BUFFER)
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_PATIENCE)
        .keep_alive_while_idle(true)
        .handshake(TokioIo::new(io))
        .await
        .map_err(|source| HelloError::Handshake {
            uid: hello.uid.clone(),
            source,
        })?;
    let pod: Arc<str> = pod.into();
    tokio::spawn({
        let pod = Arc::clone(&pod);
        async move {
            if let Err(error) = connection.await {
                tracing::debug!(
                    %pod,
                    error = &error as &dyn std::error::Error,
                    "the connection to a sandbox broke"
                );
            }
        }
    });
    Ok((hello, SandboxClient { pod, requests }))
}

/// What is asked is there as a whole, or comes while the answer does.
type Body = Either<Full<Bytes>, StreamBody<BoxStream<'static, Result<Frame<Bytes>, Infallible>>>>;

/// A sandbox that is connected. Clones ask over the same connection, which ends when the last of them is dropped and
/// the last stream has ended.
#[derive(Clone, Debug)]
pub struct SandboxClient {
    pod: Arc<str>,
    requests: SendRequest<Body>,
}

impl SandboxClient {
    /// Says what the pod should be.
    pub async fn put_bundle(&self, bundle: &Bundle) -> Result<(), ConnectionError> {
        self.tell("run its pod", Method::PUT, "/v1/pod", bundle)
            .await
    }

    /// Ends the pod.
    pub async fn stop(&self, stop: &Stop) -> Result<(), ConnectionError> {
        self.tell("stop its pod", Method::POST, "/v1/stop", stop)
            .await
    }

    /// Lets the sandbox of a finished pod go.
    pub async fn dismiss(&self) -> Result<(), ConnectionError> {
        self.tell("clean up", Method::POST, "/v1/dismiss", &())
            .await
    }

    /// Lets the sandbox of a finished pod go, and leave the pod's logs where they are.
    pub async fn retire(&self) -> Result<(), ConnectionError> {
        self.tell("leave the logs and go", Method::POST, "/v1/retire", &())
            .await
    }

    /// The pod's state, at once and whenever it changes; who is slow sees the newest only. Ends with the connection.
    pub async fn states(
        &self,
    ) -> Result<impl Stream<Item = Result<PodState, ConnectionError>> + Send + use<>, ConnectionError>
    {
        let call = "tell its state";
        let answer = self
            .ask(call, Method::GET, "/v1/state", Bytes::new())
            .await?;
        let coming = Coming {
            body: Some(answer.into_body()),
            lines: StateLines::default(),
        };
        let pod = Arc::clone(&self.pod);
        Ok(
            stream::try_unfold(coming, Coming::next).map_err(move |source| {
                ConnectionError::Nonsense {
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
        let call = "show a log";
        let query = self.encode(call, query)?;
        let answer = self.ask(call, Method::POST, "/v1/logs", query).await?;
        let pod = Arc::clone(&self.pod);
        Ok(answer
            .into_body()
            .into_data_stream()
            .map_err(move |source| ConnectionError::Lost {
                pod: Arc::clone(&pod),
                call,
                source,
            }))
    }

    /// What the pod uses now.
    pub async fn usage(&self) -> Result<PodUsage, ConnectionError> {
        let call = "tell what its pod uses";
        let asked = self.ask(call, Method::GET, "/v1/usage", Bytes::new());
        let body = Limited::new(asked.await?.into_body(), LARGEST_USAGE);
        let text = tokio::time::timeout(ANSWER_PATIENCE, body.collect())
            .await
            .map_err(|_| ConnectionError::Silent {
                pod: Arc::clone(&self.pod),
                call,
            })?
            .map_err(|error| self.nonsense(call, io::Error::other(error)))?
            .to_bytes();
        serde_json::from_slice(&text).map_err(|error| self.nonsense(call, error.into()))
    }

    /// Whether the connection has ended, so that no call can succeed.
    pub fn is_closed(&self) -> bool {
        self.requests.is_closed()
    }

    async fn tell(
        &self,
        call: &'static str,
        method: Method,
        path: &str,
        what: &impl Serialize,
    ) -> Result<(), ConnectionError> {
        let body = self.encode(call, what)?;
        self.ask(call, method, path, body).await.map(|_| ())
    }

    pub(super) fn encode(
        &self,
        call: &'static str,
        what: &impl Serialize,
    ) -> Result<Bytes, ConnectionError> {
        match serde_json::to_vec(what) {
            Ok(body) => Ok(body.into()),
            Err(error) => Err(self.nonsense(call, error.into())),
        }
    }

    /// Asks, and waits for an answer to begin.
    async fn ask(
        &self,
        call: &'static str,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Response<Incoming>, ConnectionError> {
        self.ask_with(call, method, path, Either::Left(Full::new(body)))
            .await
    }

    /// Asks with a body that goes on while the answer comes.
    pub(super) async fn converse(
        &self,
        call: &'static str,
        path: &str,
        body: impl Stream<Item = Bytes> + Send + 'static,
    ) -> Result<Response<Incoming>, ConnectionError> {
        let frames = body.map(|bytes| Ok(Frame::data(bytes))).boxed();
        self.ask_with(
            call,
            Method::POST,
            path,
            Either::Right(StreamBody::new(frames)),
        )
        .await
    }

    async fn ask_with(
        &self,
        call: &'static str,
        method: Method,
        path: &str,
        body: Body,
    ) -> Result<Response<Incoming>, ConnectionError> {
        let asked = self.ask_in_time(call, method, path, body);
        match tokio::time::timeout(ANSWER_PATIENCE, asked).await {
            Ok(answer) => answer,
            Err(_) => Err(ConnectionError::Silent {
                pod: Arc::clone(&self.pod),
                call,
            }),
        }
    }

    async fn ask_in_time(
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
            .map_err(|error| self.nonsense(call, io::Error::other(error)))?;
        let answer = self.requests.clone().send_request(request).await;
        let answer = answer.map_err(|source| ConnectionError::Lost {
            pod: Arc::clone(&self.pod),
            call,
            source,
        })?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        let text = Limited::new(answer.into_body(), LARGEST_REFUSAL)
            .collect()
            .await
            .map_err(|error| self.nonsense(call, io::Error::other(error)))?
            .to_bytes();
        let problem = serde_json::from_slice(&text);
        Err(ConnectionError::Refused {
            pod: Arc::clone(&self.pod),
            call,
            problem: problem.map_err(|error| self.nonsense(call, error.into()))?,
        })
    }

    fn nonsense(&self, call: &'static str, source: io::Error) -> ConnectionError {
        ConnectionError::Nonsense {
            pod: Arc::clone(&self.pod),
            call,
            source,
        }
    }
}

/// States on their way.
struct Coming {
    /// None once it has ended.
    body: Option<Incoming>,
    lines: StateLines,
}

impl Coming {
    /// The newest state, waiting for one if none has come. A broken connection is an end like any other: what there is
    /// to know about it is said by the next call.
    async fn next(mut self) -> io::Result<Option<(PodState, Self)>> {
        loop {
            let here = self
                .body
                .as_mut()
                .and_then(|body| body.frame().now_or_never());
            let frame = match here {
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
