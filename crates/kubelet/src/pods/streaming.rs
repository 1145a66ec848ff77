//! Exec, attach and port-forward: connects the kubelet's HTTPS API with a pod's sandbox.
//!
//! ```text
//!   API: stdin ── ChunkWriter ──┐                              ┌── copy_output ──► ChunkReader ── API: stdout, stderr
//!   API: resize ────────────────┴─► request ═ sandbox ═ response ─────────────────► exit
//! ```
//!
//! Each channel holds one chunk of at most 64 KiB: a slow reader blocks the writer instead of filling memory.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use kubelet_api::{
    AttachOptions, ContainerSession, ExecOptions, PortConnection, RequestedStreams, SessionError,
    SessionExit, TerminalSize,
};
use pod_protocol::connection::{ConnectionError, SandboxClient, SandboxSession};
use pod_protocol::streams::{
    BLOCK_SIZE, FrameKind, SessionEnd, StreamFrame, TtySize, encode_frame,
};
use pod_protocol::{AttachQuery, ExecQuery};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::PollSender;

/// Maximum number of queued terminal resizes.
const RESIZE_QUEUE: usize = 4;

/// Runs a command in a container.
pub(super) async fn exec(
    sandbox: SandboxClient,
    options: ExecOptions,
) -> Result<ContainerSession, SessionError> {
    let RequestedStreams {
        stdin,
        stdout,
        stderr,
        tty,
    } = options.streams;
    let query = ExecQuery {
        container: options.container,
        command: options.command,
        stdin,
        stdout,
        stderr: stderr && !tty,
        tty,
    };
    let (streams, input) = ClientStreams::new(stdin, tty);
    let session = sandbox.exec(&query, input).await.map_err(session_error)?;
    Ok(streams.session(session, query.stdout, query.stderr))
}

/// Attaches to a container's standard streams.
pub(super) async fn attach(
    sandbox: SandboxClient,
    options: AttachOptions,
) -> Result<ContainerSession, SessionError> {
    let RequestedStreams {
        stdin,
        stdout,
        stderr,
        tty,
    } = options.streams;
    let query = AttachQuery {
        container: options.container,
        stdin,
        stdout,
        stderr: stderr && !tty,
    };
    let (streams, input) = ClientStreams::new(stdin, tty);
    let session = sandbox.attach(&query, input).await.map_err(session_error)?;
    Ok(streams.session(session, query.stdout, query.stderr))
}

/// Connects to a port of the pod.
pub(super) async fn port_forward(
    sandbox: SandboxClient,
    port: u16,
) -> Result<PortConnection, SessionError> {
    let (sender, chunks) = mpsc::channel(1);
    let from = sandbox.port_forward(port, into_stream(chunks)).await;
    let from = from.map_err(session_error)?;
    let to = ChunkWriter::new(sender, Bytes::copy_from_slice);
    Ok(Box::pin(tokio::io::join(from, to)))
}

/// The client's side of the streams to the sandbox.
struct ClientStreams {
    stdin: Option<mpsc::Sender<Bytes>>,
    resize: Option<mpsc::Sender<TerminalSize>>,
}

impl ClientStreams {
    /// Also returns the sandbox's side, as frames.
    fn new(stdin: bool, terminal: bool) -> (Self, BoxStream<'static, Bytes>) {
        let (stdin, input) = channel(stdin, 1);
        let (resize, sizes) = channel(terminal, RESIZE_QUEUE);
        // Also sent if the client has disconnected: that ends the session in another way.
        let input = input.map(|chunks| into_stream(chunks).chain(end_of_input()));
        let sizes = sizes.map(|sizes| into_stream(sizes).map(size_frame));
        let frames = stream::select(stream::iter(input).flatten(), stream::iter(sizes).flatten());
        (Self { stdin, resize }, frames.boxed())
    }

    fn session(self, session: SandboxSession, stdout: bool, stderr: bool) -> ContainerSession {
        let (output, stdout) = channel(stdout, 1);
        let (errors, stderr) = channel(stderr, 1);
        let (exit_sender, exit) = oneshot::channel();
        tokio::spawn(copy_output(session, output, errors, exit_sender));
        let frame = |bytes: &[u8]| encode_frame(FrameKind::Stdin, bytes);
        ContainerSession {
            stdin: self
                .stdin
                .map(|sender| Box::pin(ChunkWriter::new(sender, frame)) as _),
            stdout: stdout.map(|chunks| Box::pin(ChunkReader::new(chunks)) as _),
            stderr: stderr.map(|chunks| Box::pin(ChunkReader::new(chunks)) as _),
            resize: self.resize,
            exit: Box::pin(async move {
                exit.await
                    .unwrap_or_else(|_| SessionExit::Failed("the session was aborted".to_owned()))
            }),
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

fn end_of_input() -> BoxStream<'static, Bytes> {
    stream::iter([encode_frame(FrameKind::StdinEnd, &[])]).boxed()
}

fn size_frame(size: TerminalSize) -> Bytes {
    let TerminalSize { columns, rows } = size;
    TtySize { columns, rows }.to_frame()
}

/// Copies the sandbox's output to the client, until the exit is received or the client has dropped the session.
async fn copy_output(
    mut session: SandboxSession,
    output: Option<mpsc::Sender<Bytes>>,
    errors: Option<mpsc::Sender<Bytes>>,
    mut exit_sender: oneshot::Sender<SessionExit>,
) {
    let exit = loop {
        let frame = tokio::select! {
            biased;
            () = exit_sender.closed() => return,
            frame = session.next() => frame,
        };
        let (bytes, reader) = match frame {
            Ok(Some(StreamFrame::Stdout(bytes))) => (bytes, &output),
            Ok(Some(StreamFrame::Stderr(bytes))) => (bytes, &errors),
            Ok(Some(StreamFrame::Exit(SessionEnd::Code(code)))) => break SessionExit::Code(code),
            Ok(Some(StreamFrame::Exit(SessionEnd::Failed(why)))) => break SessionExit::Failed(why),
            Ok(Some(_)) => {
                break SessionExit::Failed("the pod's sandbox sent an unexpected frame".to_owned());
            }
            Ok(None) => {
                break SessionExit::Failed("the pod's sandbox closed the session".to_owned());
            }
            Err(error) => {
                break SessionExit::Failed(format!(
                    "connection to the pod's sandbox lost: {error}"
                ));
            }
        };
        // An error means that the client has dropped this stream.
        if let Some(reader) = reader {
            let _ = reader.send(bytes).await;
        }
    };
    let _ = exit_sender.send(exit);
}

fn session_error(error: ConnectionError) -> SessionError {
    if let ConnectionError::Rejected { problem, .. } = &error {
        return match problem.reason.as_str() {
            "NotFound" => SessionError::not_found(&problem.message),
            "BadRequest" => SessionError::bad_request(&problem.message),
            _ => SessionError::internal(&problem.message),
        };
    }
    SessionError::from_error(&error)
}

/// Sends the bytes that are written as chunks.
struct ChunkWriter {
    chunks: PollSender<Bytes>,
    wrap: fn(&[u8]) -> Bytes,
}

impl ChunkWriter {
    fn new(chunks: mpsc::Sender<Bytes>, wrap: fn(&[u8]) -> Bytes) -> Self {
        Self {
            chunks: PollSender::new(chunks),
            wrap,
        }
    }
}

impl AsyncWrite for ChunkWriter {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let closed = |_| io::Error::from(io::ErrorKind::BrokenPipe);
        ready!(self.chunks.poll_reserve(context)).map_err(closed)?;
        let length = bytes.len().min(BLOCK_SIZE);
        let chunk = (self.wrap)(&bytes[..length]);
        self.chunks.send_item(chunk).map_err(closed)?;
        Poll::Ready(Ok(length))
    }

    /// Chunks are not buffered here.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.chunks.close();
        Poll::Ready(Ok(()))
    }
}

/// Reads from received chunks.
struct ChunkReader {
    chunks: mpsc::Receiver<Bytes>,
    rest: Bytes,
}

impl ChunkReader {
    fn new(chunks: mpsc::Receiver<Bytes>) -> Self {
        Self {
            chunks,
            rest: Bytes::new(),
        }
    }
}

impl AsyncRead for ChunkReader {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.rest.is_empty() {
            match ready!(self.chunks.poll_recv(context)) {
                Some(chunk) => self.rest = chunk,
                None => return Poll::Ready(Ok(())),
            }
        }
        let length = self.rest.len().min(buffer.remaining());
        buffer.put_slice(&self.rest[..length]);
        self.rest.advance(length);
        Poll::Ready(Ok(()))
    }
}
