//! The server's end of a connection: frames to events, commands to frames.

use std::collections::{HashMap, VecDeque};

use bytes::{Bytes, BytesMut};

use super::SpdyError;
use super::flow::{Window, Windows};
use super::frame::{self, Frame, GoAwayStatus, Parser, ResetStatus};
use super::headers::{HeaderReader, HeaderWriter};
use crate::streams::{ProtocolError, StreamCommand, StreamEvent, StreamId, StreamProtocol};

/// How many streams a client may have open. A forwarded connection has two.
const MAX_STREAMS: usize = 1024;
/// How much may wait to be written in answer to what a client sends without reading.
const MAX_PENDING_REPLIES: usize = 1 << 20;

/// The answer to a ping that no client sends, for they count from 1, so that it is ignored. A ping of our own would be answered, and
/// clients that can't write their answer don't read either: a process that writes before it reads would wait for ever.
const UNUSED_PING_ID: u32 = u32::MAX;

/// A connection with a client.
pub(crate) struct SpdyConnection {
    parser: Parser,
    reader: HeaderReader,
    writer: HeaderWriter,
    windows: Windows,
    streams: HashMap<StreamId, Stream>,
    last_stream: StreamId,
    /// Data that waits for a window.
    pending: VecDeque<Pending>,
    output: BytesMut,
}

struct Stream {
    window: Window,
    /// The client may still send.
    receives: bool,
    /// We may still send.
    sends: bool,
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
                // Of no interest, but the blocks that follow can't be read without it.
                self.reader.read(&block)?;
                self.data(stream, fin, Bytes::new(), events);
            }
            Frame::Reset { stream } => {
                if self.streams.remove(&stream).is_some() {
                    self.pending.retain(|pending| pending.stream != stream);
                    events.push(StreamEvent::Reset(stream));
                }
            }
            // Even ids would be those of our own pings, and we send none.
            Frame::Ping(id) if id % 2 == 1 => frame::ping(&mut self.output, id),
            Frame::GoAway => events.push(StreamEvent::Closed),
            Frame::Settings {
                initial_window: Some(initial),
            } => {
                let windows = self.streams.values_mut().map(|stream| &mut stream.window);
                self.windows.set_initial(initial, windows);
                self.send_pending();
            }
            Frame::WindowUpdate { stream, delta } => self.widen(stream, delta)?,
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
            receives: true,
            sends: true,
        };
        self.streams.insert(stream, opened);
        events.push(StreamEvent::Opened { stream, headers });
        self.data(stream, fin, Bytes::new(), events);
        Ok(())
    }

    fn data(&mut self, id: StreamId, fin: bool, bytes: Bytes, events: &mut Vec<StreamEvent>) {
        let open = self.streams.get_mut(&id).filter(|stream| stream.receives);
        let Some(stream) = open else {
            // Was on its way when we reset the stream, or was never opened; either way nobody will take it.
            self.consumed(id, bytes.len());
            return;
        };
        if fin {
            stream.receives = false;
        }
        if !bytes.is_empty() {
            events.push(StreamEvent::Data { stream: id, bytes });
        }
        if fin {
            events.push(StreamEvent::Finished(id));
            self.remove_if_closed(id);
        }
    }

    fn widen(&mut self, id: StreamId, delta: u32) -> Result<(), SpdyError> {
        if id == 0 {
            self.windows.widen_connection(delta)?;
        } else if let Some(stream) = self.streams.get_mut(&id)
            && self
                .windows
                .widen_stream(&mut stream.window, delta)
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

    /// Sends in order what the windows allow. One stream whose window is shut holds the others up; nothing in
    /// Kubernetes has windows, so this is simple rather than fair.
    fn send_pending(&mut self) {
        while let Some(pending) = self.pending.front_mut() {
            let open = self.streams.get_mut(&pending.stream);
            let Some(stream) = open.filter(|stream| stream.sends) else {
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
                stream.sends = false;
            }
            if whole {
                self.pending.pop_front();
            }
            self.remove_if_closed(id);
        }
    }

    fn remove_if_closed(&mut self, id: StreamId) {
        if let Some(stream) = self.streams.get(&id)
            && !stream.receives
            && !stream.sends
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
            // An empty frame would say nothing.
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
            // What we have finished is over for the client too once it hears that we go away.
            if stream.sends {
                frame::reset(&mut self.output, id, ResetStatus::Cancel);
            }
        }
        frame::go_away(&mut self.output, self.last_stream, GoAwayStatus::Ok);
    }

    fn output(&mut self) -> &mut BytesMut {
        &mut self.output
    }
}
