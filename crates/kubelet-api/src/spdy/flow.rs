//! Flow control: windows limit how much may be sent before the client has consumed earlier data.
//!
//! SPDY/3.1 requires it, but no Kubernetes client has it: spdystream neither sends nor handles window updates. Waiting for one would block for
//! ever, and sending them would fill its queues. So windows are tracked from the start, but enforced only after the client has
//! used flow control itself. Without it TCP limits the sender, as between upstream's components.

use super::SpdyError;

/// The default window of a connection and of a stream.
const INITIAL_WINDOW: i64 = 64 * 1024;
const MAX_WINDOW: i64 = 0x7fff_ffff;
/// Consumed bytes before a window update is sent.
const UPDATE_THRESHOLD: u32 = 32 * 1024;

/// Flow control of a connection.
#[derive(Debug)]
pub(super) struct Windows {
    enforced: bool,
    initial: i64,
    connection: Window,
}

/// Bytes that may still be sent, and consumed bytes that are not reported yet.
#[derive(Debug)]
pub(super) struct Window {
    send: i64,
    consumed: u32,
}

impl Window {
    fn new(send: i64) -> Self {
        Self { send, consumed: 0 }
    }

    fn take(&mut self, bytes: usize) -> Option<u32> {
        self.consumed = self.consumed.saturating_add(bytes as u32);
        (self.consumed >= UPDATE_THRESHOLD).then(|| std::mem::take(&mut self.consumed))
    }

    fn increase(&mut self, delta: u32) -> Result<(), WindowOverflow> {
        self.send += i64::from(delta);
        if self.send > MAX_WINDOW {
            Err(WindowOverflow)
        } else {
            Ok(())
        }
    }
}

/// A window update exceeds the maximum window size.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct WindowOverflow;

impl From<WindowOverflow> for SpdyError {
    fn from(_: WindowOverflow) -> Self {
        Self::Flood
    }
}

impl Windows {
    pub(super) fn new() -> Self {
        Self {
            enforced: false,
            initial: INITIAL_WINDOW,
            connection: Window::new(INITIAL_WINDOW),
        }
    }

    /// The window of a new stream.
    pub(super) fn open(&self) -> Window {
        Window::new(self.initial)
    }

    /// The number of bytes that may be sent on a stream now.
    pub(super) fn room(&self, stream: &Window) -> usize {
        if !self.enforced {
            return usize::MAX;
        }
        let room = self.connection.send.min(stream.send).max(0);
        usize::try_from(room).unwrap_or(usize::MAX)
    }

    pub(super) fn sent(&mut self, stream: &mut Window, bytes: usize) {
        self.connection.send -= bytes as i64;
        stream.send -= bytes as i64;
    }

    /// Counts consumed bytes. Returns the window updates to send for the connection and for the stream.
    pub(super) fn consumed(
        &mut self,
        stream: Option<&mut Window>,
        bytes: usize,
    ) -> (Option<u32>, Option<u32>) {
        let connection = self.connection.take(bytes);
        let stream = stream.and_then(|stream| stream.take(bytes));
        if self.enforced {
            (connection, stream)
        } else {
            (None, None)
        }
    }

    /// The client has changed the initial window. Adjusts the open streams by the difference.
    pub(super) fn set_initial<'a>(
        &mut self,
        initial: u32,
        streams: impl Iterator<Item = &'a mut Window>,
    ) {
        self.enforced = true;
        let change = i64::from(initial) - self.initial;
        self.initial = i64::from(initial);
        for stream in streams {
            stream.send += change;
        }
    }

    pub(super) fn increase_connection(&mut self, delta: u32) -> Result<(), WindowOverflow> {
        self.enforced = true;
        self.connection.increase(delta)
    }

    pub(super) fn increase_stream(
        &mut self,
        stream: &mut Window,
        delta: u32,
    ) -> Result<(), WindowOverflow> {
        self.enforced = true;
        stream.increase(delta)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_without_flow_control_is_not_limited() {
        let mut windows = Windows::new();
        let mut stream = windows.open();
        windows.sent(&mut stream, 10 << 20);
        assert_eq!(windows.room(&stream), usize::MAX);
        assert_eq!(windows.consumed(Some(&mut stream), 10 << 20), (None, None));
    }

    #[test]
    fn windows_limit_the_client_that_uses_them() {
        let mut windows = Windows::new();
        let mut stream = windows.open();
        windows.set_initial(1000, [&mut stream].into_iter());
        assert_eq!(windows.room(&stream), 1000);
        windows.sent(&mut stream, 1000);
        assert_eq!(windows.room(&stream), 0);
        windows.increase_stream(&mut stream, 100_000).unwrap();
        assert_eq!(windows.room(&stream), 64 * 1024 - 1000);
        windows.increase_connection(1 << 20).unwrap();
        assert_eq!(windows.room(&stream), 100_000);
        assert_eq!(windows.consumed(Some(&mut stream), 1000), (None, None));
        let update = Some(41_000);
        assert_eq!(
            windows.consumed(Some(&mut stream), 40_000),
            (update, update)
        );
    }

    #[test]
    fn window_overflow_is_an_error() {
        let mut windows = Windows::new();
        let mut stream = windows.open();
        assert_eq!(
            windows.increase_stream(&mut stream, u32::MAX >> 1),
            Err(WindowOverflow)
        );
    }
}
