//! SPDY inside of a WebSocket: the payloads of the binary messages are the byte stream of the inner protocol.

use bytes::BytesMut;

use super::WebSocketError;
use super::frame::{Framing, MAX_PENDING_REPLIES, MessagePiece, MessageType};
use crate::streams::{ProtocolError, StreamCommand, StreamEvent, StreamId, StreamProtocol};

/// Tunnels a protocol through binary messages.
pub(crate) struct Tunnel<P> {
    framing: Framing,
    input: BytesMut,
    inner: P,
}

impl<P: StreamProtocol> Tunnel<P> {
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
        events: &mut Vec<StreamEvent>,
    ) -> Result<(), ProtocolError> {
        while let Some(piece) = self.framing.next(input)? {
            match piece {
                // The usual case: no unconsumed input, so no copy.
                MessagePiece::Part(bytes) if self.input.is_empty() => {
                    self.input = bytes;
                    self.inner.receive(&mut self.input, events)?;
                }
                MessagePiece::Part(bytes) => {
                    self.input.extend_from_slice(&bytes);
                    self.inner.receive(&mut self.input, events)?;
                }
                MessagePiece::Close => events.push(StreamEvent::Closed),
                MessagePiece::Begin | MessagePiece::End => {}
            }
        }
        self.wrap();
        if self.framing.output.len() > MAX_PENDING_REPLIES {
            return Err(WebSocketError::Flood.into());
        }
        Ok(())
    }

    /// Wraps the output of the inner protocol into a message.
    fn wrap(&mut self) {
        let bytes = self.inner.output();
        if !bytes.is_empty() {
            self.framing.message(MessageType::Binary, &[bytes]);
            bytes.clear();
        }
    }
}

impl<P: StreamProtocol> StreamProtocol for Tunnel<P> {
    fn receive(
        &mut self,
        input: &mut BytesMut,
        events: &mut Vec<StreamEvent>,
    ) -> Result<(), ProtocolError> {
        self.pieces(input, events).inspect_err(|_| {
            self.wrap();
            self.framing.fail();
        })
    }

    fn apply(&mut self, command: StreamCommand) {
        self.inner.apply(command);
        self.wrap();
    }

    fn consumed(&mut self, stream: StreamId, bytes: usize) {
        self.inner.consumed(stream, bytes);
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
