//! Clients that are attached to a container see its output on its way to the log.
//!
//! A client that is slow must not hold up the container, nor its log. Each has a ring of bounded size; while one is half full
//! the container is slowed a little, so that whoever reads at a usual speed loses nothing; one that is full is given up.

use std::cell::{Cell, RefCell};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures::Stream;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::sync::mpsc;
use tokio::time::Sleep;

use pod_protocol::streams::{Kind, plain};

/// How much a client may be behind.
const RING: usize = 1024 * 1024;
/// How long the container's next block waits for a client that is half of that behind.
const PAUSE: Duration = Duration::from_millis(5);

/// The clients of one container.
#[derive(Debug, Default)]
pub struct Taps {
    taps: RefCell<Vec<Tap>>,
    /// Nothing more will come.
    closed: Cell<bool>,
}

#[derive(Debug)]
struct Tap {
    frames: mpsc::UnboundedSender<Bytes>,
    shared: Rc<Shared>,
    output: bool,
    errors: bool,
}

#[derive(Debug, Default)]
struct Shared {
    /// Bytes that are not taken yet.
    waiting: Cell<usize>,
    /// It was too slow.
    overrun: Cell<bool>,
}

impl Taps {
    /// One more client, who wants these streams.
    pub fn add(&self, output: bool, errors: bool) -> Tapped {
        let (frames, taken) = mpsc::unbounded_channel();
        let shared = Rc::<Shared>::default();
        if !self.closed.get() {
            self.taps.borrow_mut().push(Tap {
                frames,
                shared: shared.clone(),
                output,
                errors,
            });
        }
        Tapped {
            frames: taken,
            shared,
        }
    }

    /// Nothing more will come: clients take what is there, and end.
    pub fn close(&self) {
        self.closed.set(true);
        self.taps.borrow_mut().clear();
    }

    fn give(&self, kind: Kind, bytes: &[u8]) {
        let mut taps = self.taps.borrow_mut();
        if taps.is_empty() || bytes.is_empty() {
            return;
        }
        let frame = plain(kind, bytes);
        taps.retain(|tap| {
            let wanted = match kind {
                Kind::Errors => tap.errors,
                _ => tap.output,
            };
            if !wanted {
                return !tap.frames.is_closed();
            }
            let waiting = tap.shared.waiting.get() + frame.len();
            if waiting > RING {
                tap.shared.overrun.set(true);
                return false;
            }
            tap.shared.waiting.set(waiting);
            tap.frames.send(frame.clone()).is_ok()
        });
    }

    fn is_crowded(&self) -> bool {
        let taps = self.taps.borrow();
        taps.iter()
            .any(|tap| tap.shared.waiting.get() > RING / 2 && !tap.frames.is_closed())
    }
}

/// What one client is shown.
#[derive(Debug)]
pub struct Tapped {
    frames: mpsc::UnboundedReceiver<Bytes>,
    shared: Rc<Shared>,
}

impl Tapped {
    /// Whether it ended because the client was too slow.
    pub fn was_too_slow(&self) -> bool {
        self.shared.overrun.get()
    }
}

impl Stream for Tapped {
    type Item = Bytes;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let frame = ready!(self.frames.poll_recv(context));
        if let Some(frame) = &frame {
            let waiting = self.shared.waiting.get();
            self.shared.waiting.set(waiting.saturating_sub(frame.len()));
        }
        Poll::Ready(frame)
    }
}

/// A container's output, of which clients see what is read.
#[derive(Debug)]
pub struct Tee<R> {
    from: R,
    kind: Kind,
    taps: Rc<Taps>,
    pause: Option<Pin<Box<Sleep>>>,
}

impl<R> Tee<R> {
    /// Reads `from`.
    pub fn new(from: R, kind: Kind, taps: Rc<Taps>) -> Self {
        Self {
            from,
            kind,
            taps,
            pause: None,
        }
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for Tee<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.pause.is_none() && this.taps.is_crowded() {
            this.pause = Some(Box::pin(tokio::time::sleep(PAUSE)));
        }
        if let Some(pause) = &mut this.pause {
            ready!(pause.as_mut().poll(context));
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut this.from).poll_read(context, buffer))?;
        this.pause = None;
        this.taps.give(this.kind, &buffer.filled()[before..]);
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use futures::StreamExt;
    use tokio::io::AsyncReadExt;

    use super::*;

    async fn drain(mut from: impl AsyncRead + Unpin) -> usize {
        let mut buffer = vec![0; 64 * 1024];
        let mut all = 0;
        loop {
            match from.read(&mut buffer).await.unwrap() {
                0 => return all,
                read => all += read,
            }
        }
    }

    #[tokio::test]
    async fn clients_see_what_is_read_from_when_they_came() {
        let taps = Rc::<Taps>::default();
        let mut source = Tee::new(&b"onetwo"[..], Kind::Output, taps.clone());
        let mut three = [0; 3];
        source.read_exact(&mut three).await.unwrap();
        let late = taps.add(true, true);
        let of_errors = taps.add(false, true);
        drain(source).await;
        taps.close();
        let frames: Vec<Bytes> = late.collect().await;
        assert_eq!(frames.concat(), plain(Kind::Output, b"two"));
        assert_eq!(of_errors.count().await, 0);
        assert_eq!(taps.add(true, true).count().await, 0);
    }

    #[tokio::test]
    async fn a_client_that_does_not_read_is_given_up_and_holds_nobody_up() {
        let taps = Rc::<Taps>::default();
        let stuck = taps.add(true, true);
        let all = 64 << 20;
        let source = tokio::io::repeat(7).take(all);
        let started = Instant::now();
        let read = drain(Tee::new(source, Kind::Output, taps.clone())).await;
        assert_eq!(read as u64, all);
        assert!(
            started.elapsed() < Duration::from_secs(5),
            "{:?}",
            started.elapsed()
        );
        assert!(stuck.was_too_slow());
        let kept: usize = stuck
            .map(|frame| frame.len())
            .fold(0, |a, b| async move { a + b })
            .await;
        assert!(kept <= RING);
    }

    #[tokio::test]
    async fn a_client_that_reads_loses_nothing() {
        let taps = Rc::<Taps>::default();
        let mut client = taps.add(true, true);
        let all: usize = 16 << 20;
        let source = tokio::io::repeat(7).take(all as u64);
        let copying = async {
            drain(Tee::new(source, Kind::Output, taps.clone())).await;
            taps.close();
        };
        let reading = async {
            let mut seen = 0;
            while let Some(frame) = client.next().await {
                seen += frame.len() - 4;
                tokio::task::yield_now().await;
            }
            seen
        };
        let ((), seen) = tokio::join!(copying, reading);
        assert_eq!(seen, all);
        assert!(!client.was_too_slow());
    }
}
