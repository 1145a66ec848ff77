//! Runs a [`StreamProtocol`] on a socket. One loop reads and one writes; neither waits for the other.

use std::collections::HashMap;
use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::Mutex;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::{
    CommandSender, Headers, IncomingStream, OpenedStream, ProtocolError, StreamCommand,
    StreamEvent, StreamId, StreamProtocol,
};

/// Bytes per read.
const STREAM_READ_SIZE: usize = 64 * 1024;
/// The read loop reserves more space if the buffer has less free space than this.
const MIN_READ_SIZE: usize = 4 * 1024;
/// Bytes of output to collect before a write.
const STREAM_WRITE_SIZE: usize = 64 * 1024;
/// Chunks of up to [`STREAM_READ_SIZE`] bytes that an [`IncomingStream`] queues.
const INCOMING_QUEUE: usize = 4;
/// Commands that wait for the write loop.
const COMMAND_QUEUE: usize = 1;
/// Opened streams that wait for the handler.
const OPENED_QUEUE: usize = 16;

/// Time-outs of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamTimeouts {
    /// The connection ends after this time without traffic in either direction.
    pub(crate) idle: Duration,
    /// Interval of keep-alives while the read loop waits for a handler, and so responds to no pings.
    pub(crate) keep_alive: Duration,
    /// Time limit for writing the last output.
    pub(crate) flush: Duration,
    /// How long to wait for the client to close its side. Until then its data is read and discarded: closing a socket
    /// with unread data sends a reset, and the client could lose output that it has not read yet.
    pub(crate) linger: Duration,
}

impl Default for StreamTimeouts {
    fn default() -> Self {
        Self {
            idle: crate::STREAM_IDLE_TIMEOUT,
            // kubectl disconnects after a minute without a pong.
            keep_alive: Duration::from_secs(10),
            flush: Duration::from_secs(1),
            linger: Duration::from_secs(10),
        }
    }
}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectionEnd {
    /// All [`CommandSender`]s were dropped, and all output was written.
    #[error("session finished")]
    Done,
    #[error("closed by the client")]
    ByClient,
    #[error("idle time-out")]
    Idle,
    #[error("protocol error: {0}")]
    Protocol(ProtocolError),
    #[error("I/O error: {0}")]
    Io(io::Error),
}

/// A connection that is not running yet.
pub(crate) struct StreamDriver<P> {
    protocol: P,
    timeouts: StreamTimeouts,
    commands: mpsc::Receiver<StreamCommand>,
    incoming: HashMap<StreamId, mpsc::Sender<Bytes>>,
    opened: Option<mpsc::Sender<OpenedStream>>,
}

impl<P: StreamProtocol> StreamDriver<P> {
    pub(crate) fn new(protocol: P, timeouts: StreamTimeouts) -> (Self, CommandSender) {
        let (sender, commands) = mpsc::channel(COMMAND_QUEUE);
        let driver = Self {
            protocol,
            timeouts,
            commands,
            incoming: HashMap::new(),
            opened: None,
        };
        (driver, CommandSender(sender))
    }

    /// Registers a stream that is open from the start. Data on unregistered streams is discarded.
    pub(crate) fn register(&mut self, stream: StreamId) -> IncomingStream {
        let (sender, incoming) = mpsc::channel(INCOMING_QUEUE);
        self.incoming.insert(stream, sender);
        IncomingStream(incoming)
    }

    /// The streams that the client opens.
    pub(crate) fn opened(&mut self) -> mpsc::Receiver<OpenedStream> {
        let (sender, opened) = mpsc::channel(OPENED_QUEUE);
        self.opened = Some(sender);
        opened
    }

    /// Runs the connection until it ends.
    pub(crate) async fn run(self, io: impl AsyncRead + AsyncWrite + Send) -> ConnectionEnd {
        let (read, write) = tokio::io::split(io);
        let timeouts = self.timeouts;
        let shared = Shared {
            state: Mutex::new(State {
                protocol: self.protocol,
                last_activity: Instant::now(),
                closing: false,
            }),
            has_output: Notify::new(),
            timeouts,
        };
        let reader = Reader {
            shared: &shared,
            incoming: self.incoming,
            opened: self.opened,
        };
        let mut reading = pin!(reader.run(read));
        let mut writing = pin!(write_loop(&shared, self.commands, write));
        let mut idle = pin!(shared.idle());

        let ended = tokio::select! {
            ended = &mut reading => ended,
            () = &mut idle => return ConnectionEnd::Idle,
            written = &mut writing => {
                if let Err(error) = written {
                    return ConnectionEnd::Io(error);
                }
                // Discard input until the client closes: see `linger`.
                let _ = timeout(timeouts.linger, reading).await;
                return ConnectionEnd::Done;
            }
        };
        if !matches!(ended, ConnectionEnd::Io(_)) {
            shared.state.lock().unwrap().closing = true;
            shared.has_output.notify_one();
            let _ = timeout(timeouts.flush, writing).await;
        }
        ended
    }
}

/// State that both loops use.
struct Shared<P> {
    state: Mutex<State<P>>,
    has_output: Notify,
    timeouts: StreamTimeouts,
}

struct State<P> {
    protocol: P,
    last_activity: Instant,
    /// The read loop has ended: write the remaining output, then close.
    closing: bool,
}

impl<P: StreamProtocol> Shared<P> {
    /// Calls the protocol, and wakes the write loop if there is output.
    fn with<T>(&self, act: impl FnOnce(&mut P) -> T) -> T {
        let mut state = self.state.lock().unwrap();
        let was_ready = state.protocol.is_ready();
        let done = act(&mut state.protocol);
        if !state.protocol.output().is_empty() || was_ready != state.protocol.is_ready() {
            self.has_output.notify_one();
        }
        done
    }

    /// Resolves after the idle time-out.
    async fn idle(&self) {
        loop {
            let deadline = self.state.lock().unwrap().last_activity + self.timeouts.idle;
            if deadline <= Instant::now() {
                return;
            }
            sleep_until(deadline).await;
        }
    }
}

struct Reader<'a, P> {
    shared: &'a Shared<P>,
    incoming: HashMap<StreamId, mpsc::Sender<Bytes>>,
    opened: Option<mpsc::Sender<OpenedStream>>,
}

impl<P: StreamProtocol> Reader<'_, P> {
    async fn run(mut self, mut io: impl AsyncRead + Unpin) -> ConnectionEnd {
        let mut buffer = BytesMut::new();
        let mut events = Vec::new();
        loop {
            if buffer.capacity() - buffer.len() < MIN_READ_SIZE {
                buffer.reserve(STREAM_READ_SIZE);
            }
            match poll_fn(|context| fill(&mut io, &mut buffer, context)).await {
                Ok(0) => return ConnectionEnd::ByClient,
                Ok(_) => {}
                Err(error) => return ConnectionEnd::Io(error),
            }
            self.shared.state.lock().unwrap().last_activity = Instant::now();
            let receive = |protocol: &mut P| protocol.receive(&mut buffer, &mut events);
            let received = self.shared.with(receive);
            for event in events.drain(..) {
                match event {
                    StreamEvent::Opened { stream, headers } => self.open(stream, headers).await,
                    StreamEvent::Data { stream, bytes } => self.deliver(stream, bytes).await,
                    StreamEvent::Finished(stream) | StreamEvent::Reset(stream) => {
                        self.incoming.remove(&stream);
                    }
                    StreamEvent::Closed => return ConnectionEnd::ByClient,
                }
            }
            if let Err(error) = received {
                return ConnectionEnd::Protocol(error);
            }
        }
    }

    async fn open(&mut self, stream: StreamId, headers: Headers) {
        let (sender, incoming) = mpsc::channel(INCOMING_QUEUE);
        let new = OpenedStream {
            stream,
            headers,
            incoming: IncomingStream(incoming),
        };
        if let Some(opened) = &self.opened
            && opened.send(new).await.is_ok()
        {
            self.incoming.insert(stream, sender);
        } else {
            let reset = |protocol: &mut P| protocol.apply(StreamCommand::Reset(stream));
            self.shared.with(reset);
        }
    }

    async fn deliver(&mut self, stream: StreamId, bytes: Bytes) {
        let length = bytes.len();
        if let Some(sender) = self.incoming.get(&stream) {
            match sender.try_send(bytes) {
                Ok(()) => {}
                // The handler has dropped the stream. Discard the data.
                Err(TrySendError::Closed(_)) => {
                    self.incoming.remove(&stream);
                }
                Err(TrySendError::Full(bytes)) => self.wait_for_room(sender, bytes).await,
            }
        }
        self.shared
            .with(|protocol| protocol.consumed(stream, length));
    }

    async fn wait_for_room(&self, sender: &mpsc::Sender<Bytes>, bytes: Bytes) {
        let mut sending = pin!(sender.send(bytes));
        loop {
            tokio::select! {
                _ = &mut sending => return,
                () = sleep(self.shared.timeouts.keep_alive) => {
                    self.shared.with(StreamProtocol::keep_alive);
                }
            }
        }
    }
}

/// Reads all available data that fits into the buffer. TLS returns one record per read, and larger chunks cost less to
/// forward to the pod.
fn fill(
    io: &mut (impl AsyncRead + Unpin),
    buffer: &mut BytesMut,
    context: &mut Context<'_>,
) -> Poll<io::Result<usize>> {
    let mut total = 0;
    loop {
        match pin!(io.read_buf(buffer)).poll(context) {
            Poll::Ready(Ok(read)) if read > 0 => {
                total += read;
                if buffer.capacity() - buffer.len() < MIN_READ_SIZE {
                    return Poll::Ready(Ok(total));
                }
            }
            // Return the data first: the next read detects an end of file or an error.
            _ if total > 0 => return Poll::Ready(Ok(total)),
            other => return other,
        }
    }
}

/// Writes until all command senders are dropped or `closing` is set, then shuts down the write side.
async fn write_loop<P: StreamProtocol>(
    shared: &Shared<P>,
    mut commands: mpsc::Receiver<StreamCommand>,
    mut io: impl AsyncWrite + Unpin,
) -> io::Result<()> {
    loop {
        let ready = shared.state.lock().unwrap().protocol.is_ready();
        let mut last = false;
        tokio::select! {
            command = commands.recv(), if ready => {
                let mut state = shared.state.lock().unwrap();
                match command {
                    Some(command) => state.protocol.apply(command),
                    None => {
                        state.protocol.close();
                        last = true;
                    }
                }
                // Collect the output of all waiting commands into one write.
                while state.protocol.output().len() < STREAM_WRITE_SIZE
                    && state.protocol.is_ready()
                    && let Ok(command) = commands.try_recv()
                {
                    state.protocol.apply(command);
                }
            }
            () = shared.has_output.notified() => {}
        }
        let bytes = {
            let mut state = shared.state.lock().unwrap();
            last |= state.closing;
            let bytes = state.protocol.output().split();
            if !bytes.is_empty() {
                state.last_activity = Instant::now();
            }
            bytes
        };
        if !bytes.is_empty() {
            io.write_all(&bytes).await?;
            io.flush().await?;
        }
        if last {
            // Fails if the client has already closed the connection.
            let _ = timeout(shared.timeouts.flush, io.shutdown()).await;
            return Ok(());
        }
    }
}
