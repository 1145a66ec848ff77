//! Exec, attach and port-forward: connects the kubelet's HTTPS API with a pod's sandbox.
//!
//! Each channel holds one chunk of at most 64 KiB: a slow reader blocks the writer instead of filling memory.

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use kubelet_api::{
    AttachOptions, ContainerLogStream, ContainerSession, ExecOptions, PortConnection,
    RequestedStreams, SessionError, SessionExit, SessionOutput, TerminalSize,
};
use pod_protocol::connection::{ConnectionError, SandboxClient, SandboxSession};
use pod_protocol::streams::{
    FrameKind, SessionEnd, StreamFrame, TtySize, encode_frame, skip_bytes,
};
use pod_protocol::{AttachQuery, ExecQuery, RequestError, RequestErrorKind};
use tokio::sync::mpsc;

/// Maximum number of queued terminal resizes.
const RESIZE_QUEUE: usize = 4;

/// Runs a command in a container.
pub(super) async fn exec(
    sandbox: SandboxClient,
    options: ExecOptions,
) -> Result<ContainerSession, SessionError> {
    let requested = options.streams;
    let query = ExecQuery {
        container: options.container,
        command: options.command,
        stdin: requested.stdin,
        stdout: requested.stdout,
        stderr: requested.stderr && !requested.tty,
        tty: requested.tty,
    };
    let (streams, input) = ClientStreams::new(requested);
    let session = sandbox.exec(&query, input).await.map_err(session_error)?;
    Ok(streams.session(session))
}

/// Attaches to a container's standard streams.
pub(super) async fn attach(
    sandbox: SandboxClient,
    options: AttachOptions,
    log_bytes_seen: Option<u64>,
) -> Result<ContainerSession, SessionError> {
    let requested = options.streams;
    let query = AttachQuery {
        container: options.container,
        stdin: requested.stdin,
        stdout: requested.stdout,
        stderr: requested.stderr && !requested.tty,
        log_bytes_seen,
    };
    let (streams, input) = ClientStreams::new(requested);
    let session = sandbox.attach(&query, input).await.map_err(session_error)?;
    Ok(streams.session(session))
}

/// A session that attaches to nothing: the rest of a container's log after `seen` bytes.
pub(super) fn log_session(log: ContainerLogStream, seen: u64) -> ContainerSession {
    let output = skip_bytes(log, seen).map(|bytes| match bytes {
        Ok(bytes) => SessionOutput::Stdout(bytes),
        Err(error) => SessionOutput::Exit(SessionExit::Failed(error.to_string())),
    });
    let end = stream::iter([SessionOutput::Exit(SessionExit::Code(0))]);
    ContainerSession {
        stdin: None,
        resize: None,
        output: output.chain(end).boxed(),
    }
}

/// Connects to a port of the pod.
pub(super) async fn port_forward(
    sandbox: SandboxClient,
    port: u16,
) -> Result<PortConnection, SessionError> {
    let (to_pod, chunks) = mpsc::channel(1);
    let from_pod = sandbox.port_forward(port, into_stream(chunks)).await;
    let from_pod = from_pod.map_err(session_error)?;
    Ok(PortConnection { to_pod, from_pod })
}

/// The client's side of the streams to the sandbox.
struct ClientStreams {
    stdin: Option<mpsc::Sender<Bytes>>,
    resize: Option<mpsc::Sender<TerminalSize>>,
}

impl ClientStreams {
    /// Also returns the sandbox's side, as frames.
    fn new(requested: RequestedStreams) -> (Self, BoxStream<'static, Bytes>) {
        let (stdin, input) = channel(requested.stdin, 1);
        let (resize, sizes) = channel(requested.tty, RESIZE_QUEUE);
        // The end is also sent if the client has disconnected: that ends the session in another way.
        let input = input.map(|chunks| into_stream(chunks).map(input_frame).chain(end_of_input()));
        let sizes = sizes.map(|sizes| into_stream(sizes).map(size_frame));
        let frames = stream::select(stream::iter(input).flatten(), stream::iter(sizes).flatten());
        (Self { stdin, resize }, frames.boxed())
    }

    fn session(self, session: SandboxSession) -> ContainerSession {
        ContainerSession {
            stdin: self.stdin,
            resize: self.resize,
            output: output(session),
        }
    }
}

fn channel<T>(
    wanted: bool,
    capacity: usize,
) -> (Option<mpsc::Sender<T>>, Option<mpsc::Receiver<T>>) {
    wanted.then(|| mpsc::channel(capacity)).unzip()
}

fn into_stream<T: Send + 'static>(receiver: mpsc::Receiver<T>) -> BoxStream<'static, T> {
    stream::unfold(receiver, |mut receiver| async move {
        let item = receiver.recv().await?;
        Some((item, receiver))
    })
    .boxed()
}

fn input_frame(bytes: Bytes) -> Bytes {
    encode_frame(FrameKind::Stdin, &bytes)
}

fn end_of_input() -> BoxStream<'static, Bytes> {
    stream::iter([encode_frame(FrameKind::StdinEnd, &[])]).boxed()
}

fn size_frame(size: TerminalSize) -> Bytes {
    let TerminalSize { columns, rows } = size;
    TtySize { columns, rows }.to_frame()
}

/// The output of a session, until its exit or an error.
fn output(session: SandboxSession) -> BoxStream<'static, SessionOutput> {
    stream::unfold(Some(session), |session| async move {
        let mut session = session?;
        let exit = match session.next().await {
            Ok(Some(StreamFrame::Stdout(bytes))) => {
                return Some((SessionOutput::Stdout(bytes), Some(session)));
            }
            Ok(Some(StreamFrame::Stderr(bytes))) => {
                return Some((SessionOutput::Stderr(bytes), Some(session)));
            }
            Ok(Some(StreamFrame::Exit(SessionEnd::Code(code)))) => SessionExit::Code(code),
            Ok(Some(StreamFrame::Exit(SessionEnd::Failed(why)))) => SessionExit::Failed(why),
            Ok(Some(_)) => {
                SessionExit::Failed("the pod's sandbox sent an unexpected frame".to_owned())
            }
            Ok(None) => SessionExit::Failed("the pod's sandbox closed the session".to_owned()),
            Err(error) => {
                SessionExit::Failed(format!("connection to the pod's sandbox lost: {error}"))
            }
        };
        Some((SessionOutput::Exit(exit), None))
    })
    .boxed()
}

fn session_error(error: ConnectionError) -> SessionError {
    match &error {
        ConnectionError::Rejected {
            error: RequestError { kind, message },
            ..
        } => match kind {
            RequestErrorKind::NotFound => SessionError::not_found(message),
            RequestErrorKind::BadRequest | RequestErrorKind::Failed => {
                SessionError::internal(message)
            }
        },
        _ => SessionError::from_error(&error),
    }
}
