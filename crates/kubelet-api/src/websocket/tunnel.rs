//! SPDY inside of a WebSocket: the bytes of the messages, put together, are another protocol's connection.

use bytes::BytesMut;

use super::WebSocketError;
use super::frame::{Framing, Kind, MAX_ANSWERS, Piece};
use crate::streams::{Command, Event, Protocol, ProtocolError, StreamId};

/// A protocol in binary messages.
pub(crate) struct Tunnel<P> {
    framing: Framing,
    input: BytesMut,
    inner: P,
}

impl<P: Protocol> Tunnel<P> {
    pub(crate) fn new(inner: P) -> Self {
        Self {
            framing: Framing::default(),
            input: BytesMut::new(),
            inner,
        }
    }

    fn pieces(
        &mut self,
        input: &mut BytesMut,
        events: &mut Vec<Event>,
    ) -> Result<(), ProtocolError> {
        while let Some(piece) = self.framing.next(input)? {
            match piece {
                // Mostly the inner protocol has taken everything before, and nothing is copied.
                Piece::Part(bytes) if self.input.is_empty() => {
                    self.input = bytes;
                    self.inner.receive(&mut self.input, events)?;
                }
                Piece::Part(bytes) => {
                    self.input.extend_from_slice(&bytes);
                    self.inner.receive(&mut self.input, events)?;
                }
                Piece::Close => events.push(Event::Closed),
                Piece::Begin | Piece::End => {}
            }
        }
        self.wrap();
        if self.framing.output.len() > MAX_ANSWERS {
            return Err(WebSocketError::Flood.into());
        }
        Ok(())
    }

    /// Puts what the inner protocol says into a message.
    fn wrap(&mut self) {
        let bytes = self.inner.output();
        if !bytes.is_empty() {
            self.framing.message(Kind::Binary, &[bytes]);
            bytes.clear();
        }
    }
}

impl<P: Protocol> Protocol for Tunnel<P> {
    fn receive(
        &mut self,
        input: &mut BytesMut,
        events: &mut Vec<Event>,
    ) -> Result<(), ProtocolError> {
        self.pieces(input, events).inspect_err(|_| {
            self.wrap();
            self.framing.fail();
        })
    }

    fn apply(&mut self, command: Command) {
        self.inner.apply(command);
        self.wrap();
    }

    fn taken(&mut self, stream: StreamId, bytes: usize) {
        self.inner.taken(stream, bytes);
        self.wrap();
    }

    fn is_ready(&self) -> bool {
        self.inner.is_ready()
    }

    fn keep_alive(&mut self) {
        self.framing.keep_alive();
    }

    fn close(&mut self) {
        self.inner.close();
        self.wrap();
        self.framing.close();
    }

    fn output(&mut self) -> &mut BytesMut {
        &mut self.framing.output
    }
}
