//! Many streams over one connection, whatever carries them.
//!
//! A [`Protocol`] is a state machine without IO: SPDY, channels in a WebSocket, or SPDY in a WebSocket. The [`Driver`] gives
//! it a socket. Handlers see neither: they take bytes from an [`Incoming`] and put bytes into an [`Outgoing`].
//!
//! Memory is bounded everywhere: an [`Incoming`] that nobody reads stops the reading of the whole connection, and an
//! [`Outgoing`] waits while the client doesn't read.

mod driver;

use bytes::{Bytes, BytesMut};
use tokio::sync::mpsc;

use crate::spdy::SpdyError;
use crate::websocket::WebSocketError;

pub(crate) use driver::{Driver, Ended, Limits};

/// How a protocol numbers its streams.
pub(crate) type StreamId = u32;

/// What a client did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
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
pub(crate) enum Command {
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
pub(crate) trait Protocol: Send {
    /// Takes from `input` what can be understood so far. After an error the output holds the last words.
    fn receive(
        &mut self,
        input: &mut BytesMut,
        events: &mut Vec<Event>,
    ) -> Result<(), ProtocolError>;

    /// Turns a command into output.
    fn apply(&mut self, command: Command);

    /// Somebody took bytes of an [`Event::Data`].
    fn taken(&mut self, _stream: StreamId, _bytes: usize) {}

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
pub(crate) struct Opened {
    pub(crate) stream: StreamId,
    pub(crate) headers: Headers,
    pub(crate) incoming: Incoming,
}

/// What a client sends on one stream.
#[derive(Debug)]
pub(crate) struct Incoming(mpsc::Receiver<Bytes>);

impl Incoming {
    /// The next bytes; nothing when the client has finished the stream.
    pub(crate) async fn next(&mut self) -> Option<Bytes> {
        self.0.recv().await
    }
}

/// Where commands go. When the last of these is gone, the connection ends in order.
#[derive(Clone, Debug)]
pub(crate) struct Commands(mpsc::Sender<Command>);

impl Commands {
    pub(crate) async fn send(&self, command: Command) -> Result<(), Gone> {
        self.0.send(command).await.map_err(|_| Gone)
    }

    /// One stream's way to the client.
    pub(crate) fn outgoing(&self, stream: StreamId) -> Outgoing {
        Outgoing {
            stream,
            commands: self.clone(),
        }
    }
}

/// The connection is gone, and with it everybody who would have read this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the client is gone")]
pub(crate) struct Gone;

/// What a client receives on one stream.
#[derive(Clone, Debug)]
pub(crate) struct Outgoing {
    stream: StreamId,
    commands: Commands,
}

impl Outgoing {
    /// Waits until there is room; what is done then is on its way.
    pub(crate) async fn send(&self, bytes: Bytes) -> Result<(), Gone> {
        self.commands.send(Command::Data(self.stream, bytes)).await
    }

    pub(crate) async fn accept(&self) -> Result<(), Gone> {
        self.commands.send(Command::Accept(self.stream)).await
    }

    pub(crate) async fn finish(&self) -> Result<(), Gone> {
        self.commands.send(Command::Finish(self.stream)).await
    }

    pub(crate) async fn reset(&self) -> Result<(), Gone> {
        self.commands.send(Command::Reset(self.stream)).await
    }
}
