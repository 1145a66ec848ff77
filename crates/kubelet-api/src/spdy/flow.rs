//! Windows: how much may be sent before the other end has consumed what was sent before.
//!
//! SPDY/3.1 demands them, and no client of Kubernetes has them: spdystream neither sends nor heeds window updates, so whoever
//! waits for one waits for ever, and whoever sends them fills its queues. So they are kept from the start, but only count once the
//! other end has spoken of windows itself. Without them TCP holds the sender up, as it does between upstream's parts.

use super::SpdyError;

/// The window of a connection and of a stream, if nobody says otherwise.
const INITIAL_WINDOW: i64 = 64 * 1024;
const MAX: i64 = 0x7fff_ffff;
/// How much is consumed before the other end hears of it.
const UPDATE_THRESHOLD: u32 = 32 * 1024;

/// The windows of a connection.
#[derive(Debug)]
pub(super) struct Windows {
    enforced: bool,
    initial: i64,
    connection: Window,
}

/// What may still be sent, and what was consumed but not yet told.
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

    fn widen(&mut self, delta: u32) -> Result<(), WindowOverflow> {
        self.send += i64::from(delta);
        if self.send > MAX {
            Err(WindowOverflow)
        } else {
            Ok(())
        }
    }
}

/// A window was made wider than there are numbers for.
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

    /// How many bytes may be sent on a stream now.
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

    /// Bytes were consumed: what to tell the other end of the connection's window and of the stream's.
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

    /// The other end names the window of streams: all that are open change by the difference.
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

    pub(super) fn widen_connection(&mut self, delta: u32) -> Result<(), WindowOverflow> {
        self.enforced = true;
        self.connection.widen(delta)
    }

    pub(super) fn widen_stream(
        &mut self,
        stream: &mut Window,
        delta: u32,
    ) -> Result<(), WindowOverflow> {
        self.enforced = true;
        stream.widen(delta)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_without_windows_is_not_held_up() {
        let mut windows = Windows::new();
        let mut stream = windows.open();
        windows.sent(&mut stream, 10 << 20);
        assert_eq!(windows.room(&stream), usize::MAX);
        assert_eq!(windows.consumed(Some(&mut stream), 10 << 20), (None, None));
    }

    #[test]
    fn a_client_with_windows_is_heeded() {
        let mut windows = Windows::new();
        let mut stream = windows.open();
        windows.set_initial(1000, [&mut stream].into_iter());
        assert_eq!(windows.room(&stream), 1000);
        windows.sent(&mut stream, 1000);
        assert_eq!(windows.room(&stream), 0);
        windows.widen_stream(&mut stream, 100_000).unwrap();
        assert_eq!(windows.room(&stream), 64 * 1024 - 1000);
        windows.widen_connection(1 << 20).unwrap();
        assert_eq!(windows.room(&stream), 100_000);
        assert_eq!(windows.consumed(Some(&mut stream), 1000), (None, None));
        let told = Some(41_000);
        assert_eq!(windows.consumed(Some(&mut stream), 40_000), (told, told));
    }

    #[test]
    fn a_window_has_an_end() {
        let mut windows = Windows::new();
        let mut stream = windows.open();
        assert_eq!(
            windows.widen_stream(&mut stream, u32::MAX >> 1),
            Err(WindowOverflow)
        );
    }
}
