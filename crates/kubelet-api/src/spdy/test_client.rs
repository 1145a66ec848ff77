//! A client without IO, for tests.

use bytes::BytesMut;

use super::frame::{self, Frame, Parser};
use super::headers::{HeaderReader, HeaderWriter};

/// A frame from the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Received {
    Reply(u32),
    Data { stream: u32, bytes: Vec<u8> },
    Finished(u32),
    Reset(u32),
    Ping(u32),
    GoAway,
    WindowUpdate { stream: u32, delta: u32 },
}

/// The state of a client.
pub(crate) struct SpdyTestClient {
    writer: HeaderWriter,
    reader: HeaderReader,
    parser: Parser,
    input: BytesMut,
    last: Option<u32>,
}

impl SpdyTestClient {
    pub(crate) fn new() -> Self {
        Self {
            writer: HeaderWriter::new(),
            reader: HeaderReader::new(),
            parser: Parser::default(),
            input: BytesMut::new(),
            last: None,
        }
    }

    /// Opens the next stream. Returns its number and the bytes to send.
    pub(crate) fn open(&mut self, headers: &[(&str, &str)]) -> (u32, Vec<u8>) {
        let stream = self.last.map_or(1, |last| last + 2);
        self.last = Some(stream);
        let mut output = BytesMut::new();
        let block = self.writer.write(headers);
        frame::syn_stream(&mut output, stream, false, &block);
        (stream, output.to_vec())
    }

    pub(crate) fn data(&self, stream: u32, bytes: &[u8], fin: bool) -> Vec<u8> {
        let mut output = BytesMut::new();
        frame::data(&mut output, stream, fin, bytes);
        output.to_vec()
    }

    pub(crate) fn reset(&self, stream: u32) -> Vec<u8> {
        let mut output = BytesMut::new();
        frame::reset(&mut output, stream, frame::ResetStatus::Cancel);
        output.to_vec()
    }

    pub(crate) fn window_update(&self, stream: u32, delta: u32) -> Vec<u8> {
        let mut output = BytesMut::new();
        frame::window_update(&mut output, stream, delta);
        output.to_vec()
    }

    pub(crate) fn receive(&mut self, bytes: &[u8]) -> Vec<Received> {
        self.input.extend_from_slice(bytes);
        let mut received = Vec::new();
        while let Some(frame) = self.parser.next(&mut self.input).unwrap() {
            match frame {
                Frame::SynReply { stream, block, .. } => {
                    self.reader.read(&block).unwrap();
                    received.push(Received::Reply(stream));
                }
                Frame::Data { stream, fin, bytes } => {
                    if !bytes.is_empty() {
                        let bytes = bytes.to_vec();
                        received.push(Received::Data { stream, bytes });
                    }
                    if fin {
                        received.push(Received::Finished(stream));
                    }
                }
                Frame::Reset { stream } => received.push(Received::Reset(stream)),
                Frame::Ping(id) => received.push(Received::Ping(id)),
                Frame::GoAway => received.push(Received::GoAway),
                Frame::WindowUpdate { stream, delta } => {
                    received.push(Received::WindowUpdate { stream, delta });
                }
                other => panic!("a server sent {other:?}"),
            }
        }
        received
    }
}
