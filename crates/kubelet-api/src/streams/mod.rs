//! Many streams over one connection, whatever carries them.
//!
//! A [`Protocol`] is a state machine without IO: SPDY, channels in a WebSocket, or SPDY in a WebSocket. The [`StreamDriver`] gives
//! it a socket. Handlers see neither: they take bytes from an [`IncomingStream`] and put bytes into an [`OutgoingStream`].
//!
//! Memory is bounded everywhere: an [`IncomingStream`] that nobody reads stops the reading of the whole connection, and an
//! [`OutgoingStream`] waits while the client doesn't read.

mod driver;

use bytes::{Bytes, BytesMut};
use tokio::sync::mpsc;

use crate::spdy::SpdyError;
use crate::websocket::WebSocketError;

pub(crate) use driver::{ConnectionEnd, StreamDriver, StreamTimeouts};

/// How a protocol numbers its streams.
pub(crate) type StreamId = u32;

/// What a client did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StreamEvent {
    /// It wants a new stream.
    Opened { stream: StreamId, headers: Headers },
    /// It sent bytes; never none.
    Data { stream: StreamId, bytes: Bytes },
    /// It will send nothing more on a stream.
    Finished(StreamId),
    /// It wants neither to send nor to receive on a stream.
    Reset(StreamId),
    /// It says goodbye.
    Closed,
}

/// What a handler wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StreamCommand {
    /// A stream that the client opened is welcome.
    Accept(StreamId),
    /// Bytes for the client.
    Data(StreamId, Bytes),
    /// Nothing more will be sent on a stream.
    Finish(StreamId),
    /// A stream is over in both directions.
    Reset(StreamId),
}

/// A protocol, without IO.
pub(crate) trait StreamProtocol: Send {
    /// Takes from `input` what can be understood so far. After an error the output holds the last words.
    fn receive(
        &mut self,
        input: &mut BytesMut,
        events: &mut Vec<StreamEvent>,
    ) -> Result<(), ProtocolError>;

    /// Turns a command into output.
    fn apply(&mut self, command: StreamCommand);

    /// Somebody took bytes of an [`StreamEvent::Data`].
    fn consumed(&mut self, _stream: StreamId, _bytes: usize) {}

    /// Whether commands may be given now, or the client must first make room.
    fn is_ready(&self) -> bool {
        true
    }

    /// Shows the client that we live, while what it sends is not read; and us that it does, for what is written to a client that
    /// is gone fails. It must want no answer, which would not be read.
    fn keep_alive(&mut self);

    /// Says goodbye.
    fn close(&mut self);

    /// What waits to be written; the caller takes it.
    fn output(&mut self) -> &mut BytesMut;
}

/// What a client did that its protocol doesn't allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ProtocolError {
    #[error("SPDY: {0}")]
    Spdy(#[from] SpdyError),
    #[error("WebSocket: {0}")]
    WebSocket(#[from] WebSocketError),
}

/// What a stream was opened with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Headers(Vec<(String, String)>);

impl Headers {
    pub(crate) fn new(headers: Vec<(String, String)>) -> Self {
        Self(headers)
    }

    /// The first value of a header, whose name may be in any case.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        let found = self
            .0
            .iter()
            .find(|(key, _)| key.eq_ignore_ascii_case(name));
        found.and_then(|(_, values)| values.split('\0').next())
    }
}

/// A stream that a client has opened and nobody has accepted yet.
#[derive(Debug)]
pub(crate) struct OpenedStream {
    pub(crate) stream: StreamId,
    pub(crate) headers: Headers,
    pub(crate) incoming: IncomingStream,
}

/// What a client sends on one stream.
#[derive(Debug)]
pub(crate) struct IncomingStream(mpsc::Receiver<Bytes>);

impl IncomingStream {
    /// The next bytes; nothing when the client has finished the stream.
    pub(crate) async fn next(&mut self) -> Option<Bytes> {
        self.0.recv().await
    }
}

/// Where commands go. When the last of these is gone, the connection ends in order.
#[derive(Clone, Debug)]
pub(crate) struct CommandSender(mpsc::Sender<StreamCommand>);

impl CommandSender {
    pub(crate) async fn send(&self, command: StreamCommand) -> Result<(), ConnectionClosed> {
        self.0.send(command).await.map_err(|_| ConnectionClosed)
    }

    /// One stream's way to the client.
    pub(crate) fn outgoing(&self, stream: StreamId) -> OutgoingStream {
        OutgoingStream {
            stream,
            commands: self.clone(),
        }
    }
}

/// The connection is gone, and with it everybody who would have read this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the client is gone")]
pub(crate) struct ConnectionClosed;

/// What a client receives on one stream.
#[derive(Clone, Debug)]
pub(crate) struct OutgoingStream {
    stream: StreamId,
    commands: CommandSender,
}

impl OutgoingStream {
    /// Waits until there is room; what is done then is on its way.
    pub(crate) async fn send(&self, bytes: Bytes) -> Result<(), ConnectionClosed> {
        self.commands
            .send(StreamCommand::Data(self.stream, bytes))
            .await
    }

    pub(crate) async fn accept(&self) -> Result<(), ConnectionClosed> {
        self.commands.send(StreamCommand::Accept(self.stream)).await
    }

    pub(crate) async fn finish(&self) -> Result<(), ConnectionClosed> {
        self.commands.send(StreamCommand::Finish(self.stream)).await
    }

    pub(crate) async fn reset(&self) -> Result<(), ConnectionClosed> {
        self.commands.send(StreamCommand::Reset(self.stream)).await
    }
}
