//! The server's side of a SPDY connection: turns received frames into events, and commands into frames to send.

use std::collections::{HashMap, VecDeque};

use bytes::{Bytes, BytesMut};

use super::SpdyError;
use super::flow::{Window, Windows};
use super::frame::{self, Frame, GoAwayStatus, Parser, ResetStatus};
use super::headers::{HeaderReader, HeaderWriter};
use crate::streams::{ProtocolError, StreamCommand, StreamEvent, StreamId, StreamProtocol};

/// Limit for open streams. Each connection that `kubectl port-forward` forwards has two: data and error.
const MAX_STREAMS: usize = 1024;
/// Limit for unsent output while a client sends frames that need replies and does not read them.
const MAX_PENDING_REPLIES: usize = 1 << 20;

/// The id of keep-alive frames. It is odd, so the frame is a reply to a ping of the client. Clients count their pings from 1 and
/// ignore replies to ids that they have not used. A ping with an even id would require a reply, and a client that blocks while it
/// writes the reply does not read, which could deadlock the connection.
const UNUSED_PING_ID: u32 = u32::MAX;

/// State of a connection.
pub(crate) struct SpdyConnection {
    parser: Parser,
    reader: HeaderReader,
    writer: HeaderWriter,
    windows: Windows,
    streams: HashMap<StreamId, Stream>,
    last_stream: StreamId,
    /// Data that waits for flow control.
    pending: VecDeque<Pending>,
    output: BytesMut,
}

struct Stream {
    window: Window,
    /// The client has not closed its side.
    receive_open: bool,
    /// We have not closed our side.
    send_open: bool,
}

struct Pending {
    stream: StreamId,
    bytes: Bytes,
    fin: bool,
}

impl SpdyConnection {
    pub(crate) fn new() -> Self {
        Self {
            parser: Parser::default(),
            reader: HeaderReader::new(),
            writer: HeaderWriter::new(),
            windows: Windows::new(),
            streams: HashMap::new(),
            last_stream: 0,
            pending: VecDeque::new(),
            output: BytesMut::new(),
        }
    }

    fn frames(
        &mut self,
        input: &mut BytesMut,
        events: &mut Vec<StreamEvent>,
    ) -> Result<(), SpdyError> {
        while let Some(frame) = self.parser.next(input)? {
            self.frame(frame, events)?;
            if self.output.len() > MAX_PENDING_REPLIES {
                return Err(SpdyError::Flood);
            }
        }
        Ok(())
    }

    fn frame(&mut self, frame: Frame, events: &mut Vec<StreamEvent>) -> Result<(), SpdyError> {
        match frame {
            Frame::SynStream { stream, fin, block } => self.open(stream, fin, &block, events)?,
            Frame::Data { stream, fin, bytes } => self.data(stream, fin, bytes, events),
            Frame::SynReply { stream, fin, block } | Frame::Headers { stream, fin, block } => {
                // Decompress it although it is not used: later blocks depend on it.
                self.reader.read(&block)?;
                self.data(stream, fin, Bytes::new(), events);
            }
            Frame::Reset { stream } => {
                if self.streams.remove(&stream).is_some() {
                    self.pending.retain(|pending| pending.stream != stream);
                    events.push(StreamEvent::Reset(stream));
                }
            }
            // Ignore even ids: they would be replies to pings of ours, and we send none.
            Frame::Ping(id) if id % 2 == 1 => frame::ping(&mut self.output, id),
            Frame::GoAway => events.push(StreamEvent::Closed),
            Frame::Settings {
                initial_window: Some(initial),
            } => {
                let windows = self.streams.values_mut().map(|stream| &mut stream.window);
                self.windows.set_initial(initial, windows);
                self.send_pending();
            }
            Frame::WindowUpdate { stream, delta } => self.increase_window(stream, delta)?,
            Frame::Ping(_) | Frame::Settings { .. } | Frame::Unknown => {}
        }
        Ok(())
    }

    fn open(
        &mut self,
        stream: StreamId,
        fin: bool,
        block: &[u8],
        events: &mut Vec<StreamEvent>,
    ) -> Result<(), SpdyError> {
        let headers = self.reader.read(block)?;
        if stream.is_multiple_of(2) || stream <= self.last_stream {
            frame::reset(&mut self.output, stream, ResetStatus::ProtocolError);
            return Ok(());
        }
        self.last_stream = stream;
        if self.streams.len() >= MAX_STREAMS {
            frame::reset(&mut self.output, stream, ResetStatus::RefusedStream);
            return Ok(());
        }
        let window = self.windows.open();
        let opened = Stream {
            window,
            receive_open: true,
            send_open: true,
        };
        self.streams.insert(stream, opened);
        events.push(StreamEvent::Opened { stream, headers });
        self.data(stream, fin, Bytes::new(), events);
        Ok(())
    }

    fn data(&mut self, id: StreamId, fin: bool, bytes: Bytes, events: &mut Vec<StreamEvent>) {
        let open = self
            .streams
            .get_mut(&id)
            .filter(|stream| stream.receive_open);
        let Some(stream) = open else {
            // We have reset the stream, or it was never opened. Discard the data, but count it as consumed.
            self.consumed(id, bytes.len());
            return;
        };
        if fin {
            stream.receive_open = false;
        }
        if !bytes.is_empty() {
            events.push(StreamEvent::Data { stream: id, bytes });
        }
        if fin {
            events.push(StreamEvent::Finished(id));
            self.remove_if_closed(id);
        }
    }

    fn increase_window(&mut self, id: StreamId, delta: u32) -> Result<(), SpdyError> {
        if id == 0 {
            self.windows.increase_connection(delta)?;
        } else if let Some(stream) = self.streams.get_mut(&id)
            && self
                .windows
                .increase_stream(&mut stream.window, delta)
                .is_err()
        {
            return Err(SpdyError::Flood);
        }
        self.send_pending();
        Ok(())
    }

    fn consumed(&mut self, id: StreamId, bytes: usize) {
        let stream = self.streams.get_mut(&id).map(|stream| &mut stream.window);
        let (connection, stream) = self.windows.consumed(stream, bytes);
        for (id, delta) in [(0, connection), (id, stream)] {
            if let Some(delta) = delta {
                frame::window_update(&mut self.output, id, delta);
            }
        }
    }

    fn send(&mut self, stream: StreamId, bytes: Bytes, fin: bool) {
        self.pending.push_back(Pending { stream, bytes, fin });
        self.send_pending();
    }

    /// Sends pending data in order, as far as flow control allows. A stream whose window is full blocks the others. This is
    /// acceptable because no Kubernetes client uses flow control.
    fn send_pending(&mut self) {
        while let Some(pending) = self.pending.front_mut() {
            let open = self.streams.get_mut(&pending.stream);
            let Some(stream) = open.filter(|stream| stream.send_open) else {
                self.pending.pop_front();
                continue;
            };
            let room = self.windows.room(&stream.window).min(pending.bytes.len());
            let whole = room == pending.bytes.len();
            if !whole && room == 0 {
                return;
            }
            let part = pending.bytes.split_to(room);
            let fin = whole && pending.fin;
            self.windows.sent(&mut stream.window, room);
            frame::data(&mut self.output, pending.stream, fin, &part);
            let id = pending.stream;
            if fin {
                stream.send_open = false;
            }
            if whole {
                self.pending.pop_front();
            }
            self.remove_if_closed(id);
        }
    }

    fn remove_if_closed(&mut self, id: StreamId) {
        if let Some(stream) = self.streams.get(&id)
            && !stream.receive_open
            && !stream.send_open
        {
            self.streams.remove(&id);
        }
    }

    fn reset(&mut self, id: StreamId) {
        if self.streams.remove(&id).is_some() {
            frame::reset(&mut self.output, id, ResetStatus::Cancel);
        }
    }
}

impl StreamProtocol for SpdyConnection {
    fn receive(
        &mut self,
        input: &mut BytesMut,
        events: &mut Vec<StreamEvent>,
    ) -> Result<(), ProtocolError> {
        self.frames(input, events).map_err(|error| {
            self.output.clear();
            let last = self.last_stream;
            frame::go_away(&mut self.output, last, GoAwayStatus::ProtocolError);
            error.into()
        })
    }

    fn apply(&mut self, command: StreamCommand) {
        match command {
            StreamCommand::Accept(id) => {
                if self.streams.contains_key(&id) {
                    let block = self.writer.write(&[]);
                    frame::syn_reply(&mut self.output, id, &block);
                }
            }
            // An empty frame without FIN has no effect.
            StreamCommand::Data(_, bytes) if bytes.is_empty() => {}
            StreamCommand::Data(id, bytes) => self.send(id, bytes, false),
            StreamCommand::Finish(id) => self.send(id, Bytes::new(), true),
            StreamCommand::Reset(id) => self.reset(id),
        }
    }

    fn consumed(&mut self, stream: StreamId, bytes: usize) {
        self.consumed(stream, bytes);
    }

    fn is_ready(&self) -> bool {
        self.pending.is_empty()
    }

    fn keep_alive(&mut self) {
        frame::ping(&mut self.output, UNUSED_PING_ID);
    }

    fn close(&mut self) {
        let mut open: Vec<_> = self.streams.drain().collect();
        open.sort_by_key(|(id, _)| *id);
        for (id, stream) in open {
            // GOAWAY implicitly ends the streams whose sending side we have closed.
            if stream.send_open {
                frame::reset(&mut self.output, id, ResetStatus::Cancel);
            }
        }
        frame::go_away(&mut self.output, self.last_stream, GoAwayStatus::Ok);
    }

    fn output(&mut self) -> &mut BytesMut {
        &mut self.output
    }
}
