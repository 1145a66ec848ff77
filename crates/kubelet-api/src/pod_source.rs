//! What this API asks of the kubelet.

use std::error::Error;
use std::io;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;

use crate::error::causes;
use crate::stats::NodeSource;

/// Where this API learns which pods the node has, and what they wrote: the seam to the kubelet.
pub trait PodSource: Send + Sync {
    /// The pods bound to this node, each with the newest status that the kubelet knows, written to the API or not.
    fn pods(&self) -> Vec<Arc<Pod>>;

    /// The log of a container of the pod with this uid, from its start or as `options` say.
    ///
    /// Asked only for containers that [`pods`](Self::pods) shows as started. The stream ends with the log, and with
    /// `follow` when the container has ended. An error becomes the answer's text.
    fn logs(
        &self,
        uid: &str,
        options: LogOptions,
    ) -> BoxFuture<'static, Result<LogByteStream, LogError>>;

    /// What the node and its pods use; `None` where nobody measures.
    fn node(&self) -> Option<Arc<dyn NodeSource>> {
        None
    }

    /// Runs a command in a running container of the pod with this uid.
    fn exec(
        &self,
        uid: &str,
        options: ExecOptions,
    ) -> BoxFuture<'static, Result<ContainerSession, SessionError>>;

    /// Connects to the streams of a running container's own program.
    fn attach(
        &self,
        uid: &str,
        options: AttachOptions,
    ) -> BoxFuture<'static, Result<ContainerSession, SessionError>>;

    /// One TCP connection to a port of the pod, made in the pod's network to its loopback address.
    ///
    /// `shutdown` of the stream closes that direction only. Dropping it ends the connection.
    fn port_forward(
        &self,
        uid: &str,
        port: u16,
    ) -> BoxFuture<'static, Result<PortConnection, SessionError>>;
}

/// A log, as it comes.
pub type LogByteStream = BoxStream<'static, io::Result<Bytes>>;

/// Why there is no log to show; its text, and that of its sources, goes to the caller.
pub type LogError = Box<dyn Error + Send + Sync>;

/// Which part of which container's log; upstream's `PodLogOptions`, understood and checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogOptions {
    /// The container, of any kind.
    pub container: String,
    /// The run before the newest one. A container that waits to be started again has no newer run than its last.
    pub previous: bool,
    /// Go on until the container ends.
    pub follow: bool,
    /// Only so many lines from the end.
    pub tail_lines: Option<u64>,
    /// Only what was written since then.
    pub since: Option<Timestamp>,
    /// Put the time before each line.
    pub timestamps: bool,
    /// At most so many bytes.
    pub limit_bytes: Option<u64>,
    /// Which of the container's outputs.
    pub stream: LogStream,
}

/// Which of a container's outputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogStream {
    /// Both, as they were written.
    #[default]
    All,
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// A command for a running container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecOptions {
    /// The container, of any kind.
    pub container: String,
    /// The program and its arguments; never empty.
    pub command: Vec<String>,
    /// Which streams the client wants.
    pub streams: RequestedStreams,
}

/// Which container to attach to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachOptions {
    /// The container, of any kind.
    pub container: String,
    /// Which streams the client wants; and whether the container has a terminal, which is not the client's choice.
    pub streams: RequestedStreams,
}

/// Which streams a client wants; at least one of the first three.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestedStreams {
    /// Standard input.
    pub stdin: bool,
    /// Standard output.
    pub stdout: bool,
    /// Standard error; never together with a terminal.
    pub stderr: bool,
    /// A terminal. For `attach` this says what the client expects: its pod's spec says what there is.
    pub tty: bool,
}

/// Streams to and from a process in a container.
///
/// All streams are bounded: a reader that is not read holds the process up, a writer that is full is not ready.
/// Dropping a session before [`exit`](Self::exit) is done means that the client is gone.
pub struct ContainerSession {
    /// Present if asked for. `shutdown` is the end of the input, and leaves everything else open.
    pub stdin: Option<ByteWriter>,
    /// Present if asked for; with a terminal, all of its output.
    pub stdout: Option<ByteReader>,
    /// Present if asked for, and there is no terminal.
    pub stderr: Option<ByteReader>,
    /// New sizes of the terminal; the newest counts. Absent without a terminal.
    pub resize: Option<mpsc::Sender<TerminalSize>>,
    /// How it ended. Done when the process is, even if what the process wrote is not read yet.
    pub exit: BoxFuture<'static, SessionExit>,
}

/// What a process in a container writes.
pub type ByteReader = Pin<Box<dyn AsyncRead + Send>>;

/// What a process in a container reads.
pub type ByteWriter = Pin<Box<dyn AsyncWrite + Send>>;

/// Bytes both ways.
pub trait Duplex: AsyncRead + AsyncWrite + Send {}

impl<T: AsyncRead + AsyncWrite + Send> Duplex for T {}

/// A connection to a port of a pod.
pub type PortConnection = Pin<Box<dyn Duplex>>;

/// The size of a terminal, in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalSize {
    /// Characters in a line.
    pub columns: u16,
    /// Lines.
    pub rows: u16,
}

/// How a session ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionExit {
    /// The process ended by itself or by a signal, which counts as 128 and its number. For `attach`, where the
    /// client's streams have ended, always 0.
    Code(i32),
    /// Nobody knows how: the message say why.
    Failed(String),
}

/// Why there is no session: a kind that becomes the status code, and message for the user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct SessionError {
    /// Whose fault it is.
    pub kind: SessionErrorKind,
    /// What the user reads.
    pub message: String,
}

/// Whose fault it is that there is no session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionErrorKind {
    /// There is no such pod or container (404).
    NotFound,
    /// It can't be done like that (400).
    BadRequest,
    /// It should have worked (500).
    Internal,
}

impl SessionError {
    /// There is no such pod or container.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(SessionErrorKind::NotFound, message)
    }

    /// It can't be done like that.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(SessionErrorKind::BadRequest, message)
    }

    /// It should have worked.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(SessionErrorKind::Internal, message)
    }

    /// It should have worked, but for this.
    pub fn from_error(error: &dyn Error) -> Self {
        Self::internal(causes(error))
    }

    fn new(kind: SessionErrorKind, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { kind, message }
    }
}
