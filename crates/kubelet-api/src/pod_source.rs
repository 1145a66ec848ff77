//! The interface of this API to the kubelet: pods, logs and sessions.

use std::error::Error;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::mpsc;

use crate::error::error_chain;
use crate::stats::NodeSource;

/// The pods of the node. The kubelet implements this.
pub trait PodSource: Send + Sync {
    /// The pods bound to this node, each with the kubelet's newest status, which the API server may not have yet.
    fn pods(&self) -> Vec<Arc<Pod>>;

    /// The log of a container of the pod with this uid, or the part that `options` select.
    ///
    /// Called only for containers that have started, according to [`pods`](Self::pods). The stream ends at the end of the log; with
    /// `follow`, when the container has ended. The text of an error becomes the response.
    fn logs(
        &self,
        uid: &str,
        options: LogOptions,
    ) -> BoxFuture<'static, Result<ContainerLogStream, LogError>>;

    /// Stats of the node and its pods; `None` if they are not collected.
    fn node(&self) -> Option<Arc<dyn NodeSource>> {
        None
    }

    /// Runs a command in a running container of the pod with this uid.
    fn exec(
        &self,
        uid: &str,
        options: ExecOptions,
    ) -> BoxFuture<'static, Result<ContainerSession, SessionError>>;

    /// Whether a client can attach to a container that does not run, because it starts soon or has just ended.
    fn is_attachable(&self, _uid: &str, _container: &str) -> bool {
        false
    }

    /// Attaches to the main process of a container that runs or [is attachable](Self::is_attachable).
    fn attach(
        &self,
        uid: &str,
        options: AttachOptions,
    ) -> BoxFuture<'static, Result<ContainerSession, SessionError>>;

    /// Opens a TCP connection to a port of the pod, on the loopback address of the pod's network namespace.
    fn port_forward(
        &self,
        uid: &str,
        port: u16,
    ) -> BoxFuture<'static, Result<PortConnection, SessionError>>;
}

/// The bytes of a log, as they are read.
pub type ContainerLogStream = BoxStream<'static, io::Result<Bytes>>;

/// Why a log cannot be read. Its text, with its sources, goes to the client.
pub type LogError = Box<dyn Error + Send + Sync>;

/// A container and the part of its log to read: upstream's `PodLogOptions`, validated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogOptions {
    /// The container, of any kind.
    pub container: String,
    /// Read the log of the run before the latest. While a container waits for a restart, the run that has just ended is the latest.
    pub previous: bool,
    /// Follow the log until the container ends.
    pub follow: bool,
    /// Read only this many lines from the end.
    pub tail_lines: Option<u64>,
    /// Read only lines written since then.
    pub since: Option<Timestamp>,
    /// Prefix each line with its time.
    pub timestamps: bool,
    /// Limit for the output, in bytes.
    pub limit_bytes: Option<u64>,
    /// The output streams to read.
    pub stream: LogStream,
}

/// Output streams of a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogStream {
    /// Both, interleaved as written.
    #[default]
    All,
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// A command to run in a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecOptions {
    /// The container, of any kind.
    pub container: String,
    /// The program and its arguments; never empty.
    pub command: Vec<String>,
    /// The streams that the client requests.
    pub streams: RequestedStreams,
}

/// A container to attach to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachOptions {
    /// The container, of any kind.
    pub container: String,
    /// The streams that the client requests, except that `tty` says whether the container has a terminal.
    pub streams: RequestedStreams,
}

/// The streams that a client requests: at least one of the first three.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestedStreams {
    /// Standard input.
    pub stdin: bool,
    /// Standard output.
    pub stdout: bool,
    /// Standard error; never together with a terminal.
    pub stderr: bool,
    /// A terminal. For `attach` the container's spec decides, not the client.
    pub tty: bool,
}

/// Streams to and from a process in a container.
///
/// All streams are bounded: unread output blocks the process, and a process that does not read blocks the sender of its input.
pub struct ContainerSession {
    /// Present if requested. Dropping it closes the standard input.
    pub stdin: Option<mpsc::Sender<Bytes>>,
    /// New sizes of the terminal; the last one is in effect. Absent without a terminal.
    pub resize: Option<mpsc::Sender<TerminalSize>>,
    /// The requested output; the last item is the exit. The receiver drops it earlier if the client disconnects.
    pub output: BoxStream<'static, SessionOutput>,
}

/// Output of a process in a container, or its exit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionOutput {
    /// Standard output; with a terminal, all of its output.
    Stdout(Bytes),
    /// Standard error.
    Stderr(Bytes),
    /// The end of the session.
    Exit(SessionExit),
}

/// A connection to a port of a pod. Both directions are bounded.
pub struct PortConnection {
    /// Bytes for the pod. Dropping it closes only this direction.
    pub to_pod: mpsc::Sender<Bytes>,
    /// Bytes from the pod. Dropping it closes the connection.
    pub from_pod: BoxStream<'static, io::Result<Bytes>>,
}

/// The size of a terminal, in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalSize {
    /// Width.
    pub columns: u16,
    /// Height.
    pub rows: u16,
}

/// How a session ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionExit {
    /// The exit code of the process; 128 + N if signal N killed it. Always 0 for `attach`, after the streams
    /// have ended.
    Code(i32),
    /// The exit code is unknown, for this reason.
    Failed(String),
}

/// Why a session cannot start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct SessionError {
    /// Selects the HTTP status code.
    pub kind: SessionErrorKind,
    /// The message for the user.
    pub message: String,
}

/// The kind of a [`SessionError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionErrorKind {
    /// There is no such pod or container (404).
    NotFound,
    /// Any other failure (500).
    Internal,
}

impl SessionError {
    /// The pod or container does not exist.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(SessionErrorKind::NotFound, message)
    }

    /// Any other failure.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(SessionErrorKind::Internal, message)
    }

    /// An internal error with this cause.
    pub fn from_error(error: &dyn Error) -> Self {
        Self::internal(error_chain(error))
    }

    fn new(kind: SessionErrorKind, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { kind, message }
    }
}
