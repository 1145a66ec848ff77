//! Sessions with a pod's containers and ports, for the kubelet's HTTPS API: carried over the connection to its sandbox.
//!
//! ```text
//!   API: stdin ── PieceWriter ──┐                          ┌── pump ──► PieceReader ── API: stdout, stderr
//!   API: resize ────────────────┴─► request ═ sandbox ═ answer ──────► exit
//! ```
//!
//! Each arrow holds one piece of at most 64 KiB, so that whoever is slow holds up the other end and costs no memory.

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
use pod_protocol::connection::{ConnectionError, Conversation, SandboxClient};
use pod_protocol::streams::{BLOCK, Ending, Kind, Size, Word, plain};
use pod_protocol::{AttachQuery, ExecQuery};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::PollSender;

/// So many changes of size wait, at most.
const SIZES: usize = 4;

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
    let (ends, input) = Ends::new(stdin, tty);
    let conversation = sandbox.exec(&query, input).await.map_err(refused)?;
    Ok(ends.session(conversation, query.stdout, query.stderr))
}

/// Connects to a container's own streams.
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
    let (ends, input) = Ends::new(stdin, tty);
    let conversation = sandbox.attach(&query, input).await.map_err(refused)?;
    Ok(ends.session(conversation, query.stdout, query.stderr))
}

/// Connects to a port.
pub(super) async fn port_forward(
    sandbox: SandboxClient,
    port: u16,
) -> Result<PortConnection, SessionError> {
    let (sender, pieces) = mpsc::channel(1);
    let from = sandbox.port_forward(port, received(pieces)).await;
    let from = from.map_err(refused)?;
    let to = PieceWriter::new(sender, Bytes::copy_from_slice);
    Ok(Box::pin(tokio::io::join(from, to)))
}

/// The client's ends of what goes to the sandbox.
struct Ends {
    stdin: Option<mpsc::Sender<Bytes>>,
    resize: Option<mpsc::Sender<TerminalSize>>,
}

impl Ends {
    /// And the other end of it, as frames.
    fn new(stdin: bool, terminal: bool) -> (Self, BoxStream<'static, Bytes>) {
        let (stdin, input) = channel(stdin, 1);
        let (resize, sizes) = channel(terminal, SIZES);
        // However the input ended: a client that is gone is known by more than that.
        let input = input.map(|pieces| received(pieces).chain(end_of_input()));
        let sizes = sizes.map(|sizes| received(sizes).map(size_frame));
        let frames = stream::select(stream::iter(input).flatten(), stream::iter(sizes).flatten());
        (Self { stdin, resize }, frames.boxed())
    }

    fn session(self, conversation: Conversation, stdout: bool, stderr: bool) -> ContainerSession {
        let (output, stdout) = channel(stdout, 1);
        let (errors, stderr) = channel(stderr, 1);
        let (tell, told) = oneshot::channel();
        tokio::spawn(pump(conversation, output, errors, tell));
        let frame = |bytes: &[u8]| plain(Kind::Input, bytes);
        ContainerSession {
            stdin: self
                .stdin
                .map(|sender| Box::pin(PieceWriter::new(sender, frame)) as _),
            stdout: stdout.map(|pieces| Box::pin(PieceReader::new(pieces)) as _),
            stderr: stderr.map(|pieces| Box::pin(PieceReader::new(pieces)) as _),
            resize: self.resize,
            exit: Box::pin(async move {
                told.await
                    .unwrap_or_else(|_| SessionExit::Failed("the session was given up".to_owned()))
            }),
        }
    }
}

fn channel<T>(wanted: bool, room: usize) -> (Option<mpsc::Sender<T>>, Option<mpsc::Receiver<T>>) {
    wanted.then(|| mpsc::channel(room)).unzip()
}

fn received<T: Send + 'static>(receiver: mpsc::Receiver<T>) -> BoxStream<'static, T> {
    stream::unfold(receiver, |mut receiver| async move {
        let item = receiver.recv().await?;
        Some((item, receiver))
    })
    .boxed()
}

fn end_of_input() -> BoxStream<'static, Bytes> {
    stream::iter([plain(Kind::InputEnd, &[])]).boxed()
}

fn size_frame(size: TerminalSize) -> Bytes {
    let TerminalSize { columns, rows } = size;
    Size { columns, rows }.frame()
}

/// Hands out what the sandbox says, until it has said how it ended or nobody waits for that.
async fn pump(
    mut conversation: Conversation,
    output: Option<mpsc::Sender<Bytes>>,
    errors: Option<mpsc::Sender<Bytes>>,
    mut tell: oneshot::Sender<SessionExit>,
) {
    let exit = loop {
        let word = tokio::select! {
            biased;
            () = tell.closed() => return,
            word = conversation.next() => word,
        };
        let (bytes, reader) = match word {
            Ok(Some(Word::Output(bytes))) => (bytes, &output),
            Ok(Some(Word::Errors(bytes))) => (bytes, &errors),
            Ok(Some(Word::Ended(Ending::Code(code)))) => break SessionExit::Code(code),
            Ok(Some(Word::Ended(Ending::Failed(why)))) => break SessionExit::Failed(why),
            Ok(Some(_)) => break SessionExit::Failed("the pod's sandbox says nonsense".to_owned()),
            Ok(None) => break SessionExit::Failed("the pod's sandbox has ended".to_owned()),
            Err(error) => {
                break SessionExit::Failed(format!("the pod's sandbox was lost: {error}"));
            }
        };
        // A reader that was dropped does not want it.
        if let Some(reader) = reader {
            let _ = reader.send(bytes).await;
        }
    };
    let _ = tell.send(exit);
}

fn refused(error: ConnectionError) -> SessionError {
    if let ConnectionError::Refused { problem, .. } = &error {
        return match problem.reason.as_str() {
            "NotFound" => SessionError::not_found(&problem.message),
            "BadRequest" => SessionError::bad_request(&problem.message),
            _ => SessionError::internal(&problem.message),
        };
    }
    SessionError::from_error(&error)
}

/// Makes pieces of what is written.
struct PieceWriter {
    pieces: PollSender<Bytes>,
    wrap: fn(&[u8]) -> Bytes,
}

impl PieceWriter {
    fn new(pieces: mpsc::Sender<Bytes>, wrap: fn(&[u8]) -> Bytes) -> Self {
        Self {
            pieces: PollSender::new(pieces),
            wrap,
        }
    }
}

impl AsyncWrite for PieceWriter {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let gone = |_| io::Error::from(io::ErrorKind::BrokenPipe);
        ready!(self.pieces.poll_reserve(context)).map_err(gone)?;
        let length = bytes.len().min(BLOCK);
        let piece = (self.wrap)(&bytes[..length]);
        self.pieces.send_item(piece).map_err(gone)?;
        Poll::Ready(Ok(length))
    }

    /// What is here is on its way.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.pieces.close();
        Poll::Ready(Ok(()))
    }
}

/// Reads pieces.
struct PieceReader {
    pieces: mpsc::Receiver<Bytes>,
    left: Bytes,
}

impl PieceReader {
    fn new(pieces: mpsc::Receiver<Bytes>) -> Self {
        Self {
            pieces,
            left: Bytes::new(),
        }
    }
}

impl AsyncRead for PieceReader {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.left.is_empty() {
            match ready!(self.pieces.poll_recv(context)) {
                Some(piece) => self.left = piece,
                None => return Poll::Ready(Ok(())),
            }
        }
        let length = self.left.len().min(buffer.remaining());
        buffer.put_slice(&self.left[..length]);
        self.left.advance(length);
        Poll::Ready(Ok(()))
    }
}
