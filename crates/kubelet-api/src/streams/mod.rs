//! Multiplexed streams over one connection, for every protocol.
//!
//! A [`StreamProtocol`] is a state machine without IO: SPDY, channels in a WebSocket, or SPDY in a WebSocket. The [`StreamDriver`] runs
//! it on a socket. Handlers use neither: they read from [`IncomingStream`]s and write to [`OutgoingStream`]s.
//!
//! Memory is bounded: if a handler does not read an [`IncomingStream`], the driver stops reading the whole connection, and an
//! [`OutgoingStream`] blocks while the client does not read.

mod driver;

use bytes::{Bytes, BytesMut};
use tokio::sync::mpsc;

use crate::spdy::SpdyError;
use crate::websocket::WebSocketError;

pub(crate) use driver::{ConnectionEnd, StreamDriver, StreamTimeouts};

/// The number of a stream in its protocol.
pub(crate) type StreamId = u32;

/// An action of the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StreamEvent {
    /// Opened a stream.
    Opened { stream: StreamId, headers: Headers },
    /// Sent data; never empty.
    Data { stream: StreamId, bytes: Bytes },
    /// Closed its side of a stream.
    Finished(StreamId),
    /// Closed both directions of a stream.
    Reset(StreamId),
    /// Closed the connection.
    Closed,
}

/// An action of a handler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StreamCommand {
    /// Accept a stream that the client opened.
    Accept(StreamId),
    /// Send data.
    Data(StreamId, Bytes),
    /// Close our side of a stream.
    Finish(StreamId),
    /// Close both directions of a stream.
    Reset(StreamId),
}

/// A protocol without IO.
pub(crate) trait StreamProtocol: Send {
    /// Consumes the complete part of `input`. After an error the output contains the protocol's error frame.
    fn receive(
        &mut self,
        input: &mut BytesMut,
        events: &mut Vec<StreamEvent>,
    ) -> Result<(), ProtocolError>;

    /// Converts a command into output.
    fn apply(&mut self, command: StreamCommand);

    /// A handler has consumed bytes of a [`StreamEvent::Data`].
    fn consumed(&mut self, _stream: StreamId, _bytes: usize) {}

    /// Whether [`apply`](Self::apply) may be called, or a flow-control window is full.
    fn is_ready(&self) -> bool {
        true
    }

    /// Sends a keep-alive while the driver does not read: it shows the client that the server is alive, and the write fails if the client
    /// has disconnected. The client must not have to reply, since the reply would not be read.
    fn keep_alive(&mut self);

    /// Closes the connection.
    fn close(&mut self);

    /// Output to write; the caller drains it.
    fn output(&mut self) -> &mut BytesMut;
}

/// A violation of the protocol by the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ProtocolError {
    #[error("SPDY: {0}")]
    Spdy(#[from] SpdyError),
    #[error("WebSocket: {0}")]
    WebSocket(#[from] WebSocketError),
}

/// The headers of a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Headers(Vec<(String, String)>);

impl Headers {
    pub(crate) fn new(headers: Vec<(String, String)>) -> Self {
        Self(headers)
    }

    /// The first value of a header. Names are case-insensitive.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        let found = self
            .0
            .iter()
            .find(|(key, _)| key.eq_ignore_ascii_case(name));
        found.and_then(|(_, values)| values.split('\0').next())
    }
}

/// A stream that the client has opened and no handler has accepted yet.
#[derive(Debug)]
pub(crate) struct OpenedStream {
    pub(crate) stream: StreamId,
    pub(crate) headers: Headers,
    pub(crate) incoming: IncomingStream,
}

/// Data from the client on one stream.
#[derive(Debug)]
pub(crate) struct IncomingStream(mpsc::Receiver<Bytes>);

impl IncomingStream {
    /// The next bytes; `None` when the client has closed the stream.
    pub(crate) async fn next(&mut self) -> Option<Bytes> {
        self.0.recv().await
    }
}

/// Sends commands to the driver. When the last sender is dropped, the driver closes the connection.
#[derive(Clone, Debug)]
pub(crate) struct CommandSender(mpsc::Sender<StreamCommand>);

impl CommandSender {
    pub(crate) async fn send(&self, command: StreamCommand) -> Result<(), ConnectionClosed> {
        self.0.send(command).await.map_err(|_| ConnectionClosed)
    }

    /// The outgoing side of a stream.
    pub(crate) fn outgoing(&self, stream: StreamId) -> OutgoingStream {
        OutgoingStream {
            stream,
            commands: self.clone(),
        }
    }
}

/// The connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the connection has ended")]
pub(crate) struct ConnectionClosed;

/// Data to the client on one stream.
#[derive(Clone, Debug)]
pub(crate) struct OutgoingStream {
    stream: StreamId,
    commands: CommandSender,
}

impl OutgoingStream {
    /// Waits until the driver has queued the bytes.
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
