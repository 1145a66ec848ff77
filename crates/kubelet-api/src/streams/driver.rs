//! Gives a [`StreamProtocol`] a socket: one loop reads, one writes, and neither waits for the other.

use std::collections::HashMap;
use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
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

/// How much is read at once.
const READ_SIZE: usize = 64 * 1024;
/// A smaller rest of a buffer is not worth a system call.
const MIN_READ_SIZE: usize = 4 * 1024;
/// How much is written at once.
const WRITE_SIZE: usize = 64 * 1024;
/// How many pieces of at most [`READ_SIZE`] bytes a stream holds that nobody takes.
const INCOMING_QUEUE: usize = 4;
/// How many commands wait for the socket.
const COMMAND_QUEUE: usize = 1;
/// How many streams wait for somebody to accept them.
const OPENED_QUEUE: usize = 16;

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamTimeouts {
    /// How long a connection may be silent in both directions.
    pub(crate) idle: Duration,
    /// How often a client hears from us that waits for us to read.
    pub(crate) keep_alive: Duration,
    /// How long the last words may take to be written.
    pub(crate) flush: Duration,
    /// How long the client may take to close its end after us. Until then what it sends is read and thrown away:
    /// closing a socket with unread bytes in it destroys what the other end hasn't read yet.
    pub(crate) linger: Duration,
}

impl Default for StreamTimeouts {
    fn default() -> Self {
        Self {
            idle: crate::STREAM_IDLE_TIMEOUT,
            // kubectl gives up after a minute without an answer to its pings.
            keep_alive: Duration::from_secs(10),
            flush: Duration::from_secs(1),
            linger: Duration::from_secs(10),
        }
    }
}

/// How a connection ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectionEnd {
    /// All [`CommandSender`] were dropped, and everything was written.
    #[error("everything is said")]
    Done,
    #[error("the client closed it")]
    ByClient,
    #[error("nothing happened for too long")]
    Idle,
    #[error("the client broke the protocol: {0}")]
    Protocol(ProtocolError),
    #[error("the connection broke: {0}")]
    Io(io::Error),
}

/// A connection, before it runs.
pub(crate) struct StreamDriver<P> {
    protocol: P,
    limits: StreamTimeouts,
    commands: mpsc::Receiver<StreamCommand>,
    incoming: HashMap<StreamId, mpsc::Sender<Bytes>>,
    opened: Option<mpsc::Sender<OpenedStream>>,
}

impl<P: StreamProtocol> StreamDriver<P> {
    pub(crate) fn new(protocol: P, limits: StreamTimeouts) -> (Self, CommandSender) {
        let (sender, commands) = mpsc::channel(COMMAND_QUEUE);
        let driver = Self {
            protocol,
            limits,
            commands,
            incoming: HashMap::new(),
            opened: None,
        };
        (driver, CommandSender(sender))
    }

    /// A stream that is open from the start. What a client sends on streams that nobody expects is thrown away.
    pub(crate) fn expect(&mut self, stream: StreamId) -> IncomingStream {
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

    /// Carries bytes until the connection ends.
    pub(crate) async fn run(self, io: impl AsyncRead + AsyncWrite + Send) -> ConnectionEnd {
        let (read, write) = tokio::io::split(io);
        let limits = self.limits;
        let shared = Shared {
            state: Mutex::new(State {
                protocol: self.protocol,
                last_activity: Instant::now(),
                closing: false,
            }),
            has_output: Notify::new(),
            limits,
        };
        let reader = Reader {
            shared: &shared,
            incoming: self.incoming,
            opened: self.opened,
        };
        let mut reading = pin!(reader.run(read));
        let mut writing = pin!(write_all(&shared, self.commands, write));
        let mut idle = pin!(shared.idle());

        let ended = tokio::select! {
            ended = &mut reading => ended,
            () = &mut idle => return ConnectionEnd::Idle,
            written = &mut writing => {
                if let Err(error) = written {
                    return ConnectionEnd::Io(error);
                }
                // Only to let the client read in peace.
                let _ = timeout(limits.linger, reading).await;
                return ConnectionEnd::Done;
            }
        };
        if !matches!(ended, ConnectionEnd::Io(_)) {
            shared.lock().closing = true;
            shared.has_output.notify_one();
            let _ = timeout(limits.flush, writing).await;
        }
        ended
    }
}

/// What both loops use.
struct Shared<P> {
    state: Mutex<State<P>>,
    has_output: Notify,
    limits: StreamTimeouts,
}

struct State<P> {
    protocol: P,
    last_activity: Instant,
    /// The protocol has said its last words, which are only to be written.
    closing: bool,
}

impl<P: StreamProtocol> Shared<P> {
    fn lock(&self) -> MutexGuard<'_, State<P>> {
        // A panic inside of a protocol ends its connection's task, so nobody is left to see a broken state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the protocol do something that may give output.
    fn with<T>(&self, act: impl FnOnce(&mut P) -> T) -> T {
        let mut state = self.lock();
        let was_ready = state.protocol.is_ready();
        let done = act(&mut state.protocol);
        if !state.protocol.output().is_empty() || was_ready != state.protocol.is_ready() {
            self.has_output.notify_one();
        }
        done
    }

    /// Done when nothing has happened for too long.
    async fn idle(&self) {
        loop {
            let deadline = self.lock().last_activity + self.limits.idle;
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
                buffer.reserve(READ_SIZE);
            }
            match poll_fn(|context| fill(&mut io, &mut buffer, context)).await {
                Ok(0) => return ConnectionEnd::ByClient,
                Ok(_) => {}
                Err(error) => return ConnectionEnd::Io(error),
            }
            self.shared.lock().last_activity = Instant::now();
            let receive = |protocol: &mut P| protocol.receive(&mut buffer, &mut events);
            let understood = self.shared.with(receive);
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
            if let Err(error) = understood {
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
            let refuse = |protocol: &mut P| protocol.apply(StreamCommand::Reset(stream));
            self.shared.with(refuse);
        }
    }

    async fn deliver(&mut self, stream: StreamId, bytes: Bytes) {
        let length = bytes.len();
        if let Some(sender) = self.incoming.get(&stream) {
            match sender.try_send(bytes) {
                Ok(()) => {}
                // Nobody wants it any more, but the client may not know yet.
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
                () = sleep(self.shared.limits.keep_alive) => {
                    self.shared.with(StreamProtocol::keep_alive);
                }
            }
        }
    }
}

/// Reads as much as is there and fits: TLS hands out one record at a time, and each piece has its price all the way to the pod.
fn fill(
    io: &mut (impl AsyncRead + Unpin),
    buffer: &mut BytesMut,
    context: &mut Context<'_>,
) -> Poll<io::Result<usize>> {
    let mut all = 0;
    loop {
        match pin!(io.read_buf(buffer)).poll(context) {
            Poll::Ready(Ok(read)) if read > 0 => {
                all += read;
                if buffer.capacity() - buffer.len() < MIN_READ_SIZE {
                    return Poll::Ready(Ok(all));
                }
            }
            // An end or an error is there the next time too.
            _ if all > 0 => return Poll::Ready(Ok(all)),
            other => return other,
        }
    }
}

/// Writes until all who give commands are gone, and then says goodbye.
async fn write_all<P: StreamProtocol>(
    shared: &Shared<P>,
    mut commands: mpsc::Receiver<StreamCommand>,
    mut io: impl AsyncWrite + Unpin,
) -> io::Result<()> {
    loop {
        let ready = shared.lock().protocol.is_ready();
        let mut last = false;
        tokio::select! {
            command = commands.recv(), if ready => {
                let mut state = shared.lock();
                match command {
                    Some(command) => state.protocol.apply(command),
                    None => {
                        state.protocol.close();
                        last = true;
                    }
                }
                // One system call for as much as waits.
                while state.protocol.output().len() < WRITE_SIZE
                    && state.protocol.is_ready()
                    && let Ok(command) = commands.try_recv()
                {
                    state.protocol.apply(command);
                }
            }
            () = shared.has_output.notified() => {}
        }
        let bytes = {
            let mut state = shared.lock();
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
            // The client may have closed its end already.
            let _ = timeout(shared.limits.flush, io.shutdown()).await;
            return Ok(());
        }
    }
}
