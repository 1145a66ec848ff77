//! Fan-out of a container's output to attached clients, on its way to the log.
//!
//! A slow client must hold up neither the container nor its log. Each client has a bounded buffer. While a buffer is more than
//! half full, reads of the container's output are delayed a little, so that a client of usual speed loses nothing. A client whose
//! buffer is full is dropped.

use std::cell::{Cell, RefCell};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures::Stream;
use pod_protocol::streams::{FrameKind, encode_frame};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::sync::mpsc;
use tokio::time::Sleep;

/// Buffer size of a client.
const MAX_BUFFERED: usize = 1024 * 1024;
/// Delay of the next read while a client's buffer is more than half full.
const READ_DELAY: Duration = Duration::from_millis(5);

/// The attached clients of one container.
#[derive(Debug, Default)]
pub struct OutputSubscribers {
    subscribers: RefCell<Vec<Subscriber>>,
    /// The output has ended.
    is_closed: Cell<bool>,
}

#[derive(Debug)]
struct Subscriber {
    frames: mpsc::UnboundedSender<Bytes>,
    state: Rc<SubscriberState>,
    stdout: bool,
    stderr: bool,
}

#[derive(Debug, Default)]
struct SubscriberState {
    buffered_bytes: Cell<usize>,
    /// The buffer was full, and the client was dropped.
    overrun: Cell<bool>,
}

impl OutputSubscribers {
    /// Adds a client of these streams.
    pub fn subscribe(&self, stdout: bool, stderr: bool) -> OutputSubscription {
        let (frames, receiver) = mpsc::unbounded_channel();
        let state = Rc::<SubscriberState>::default();
        if !self.is_closed.get() {
            self.subscribers.borrow_mut().push(Subscriber {
                frames,
                state: state.clone(),
                stdout,
                stderr,
            });
        }
        OutputSubscription {
            frames: receiver,
            state,
        }
    }

    /// Ends all subscriptions, after the buffered frames.
    pub fn close(&self) {
        self.is_closed.set(true);
        self.subscribers.borrow_mut().clear();
    }

    fn publish(&self, kind: FrameKind, bytes: &[u8]) {
        let mut subscribers = self.subscribers.borrow_mut();
        if subscribers.is_empty() || bytes.is_empty() {
            return;
        }
        let frame = encode_frame(kind, bytes);
        subscribers.retain(|subscriber| {
            let wanted = match kind {
                FrameKind::Stderr => subscriber.stderr,
                _ => subscriber.stdout,
            };
            if !wanted {
                return !subscriber.frames.is_closed();
            }
            let buffered = subscriber.state.buffered_bytes.get() + frame.len();
            if buffered > MAX_BUFFERED {
                subscriber.state.overrun.set(true);
                return false;
            }
            subscriber.state.buffered_bytes.set(buffered);
            subscriber.frames.send(frame.clone()).is_ok()
        });
    }

    /// Whether a client's buffer is more than half full.
    fn is_congested(&self) -> bool {
        let subscribers = self.subscribers.borrow();
        subscribers.iter().any(|subscriber| {
            subscriber.state.buffered_bytes.get() > MAX_BUFFERED / 2
                && !subscriber.frames.is_closed()
        })
    }
}

/// The frames for one client.
#[derive(Debug)]
pub struct OutputSubscription {
    frames: mpsc::UnboundedReceiver<Bytes>,
    state: Rc<SubscriberState>,
}

impl OutputSubscription {
    /// Whether it ended because the client was too slow.
    pub fn was_overrun(&self) -> bool {
        self.state.overrun.get()
    }
}

impl Stream for OutputSubscription {
    type Item = Bytes;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let frame = ready!(self.frames.poll_recv(context));
        if let Some(frame) = &frame {
            let buffered = self.state.buffered_bytes.get();
            self.state
                .buffered_bytes
                .set(buffered.saturating_sub(frame.len()));
        }
        Poll::Ready(frame)
    }
}

/// Reads a container's output and publishes it to subscribers.
#[derive(Debug)]
pub struct Tee<R> {
    from: R,
    kind: FrameKind,
    subscribers: Rc<OutputSubscribers>,
    delay: Option<Pin<Box<Sleep>>>,
}

impl<R> Tee<R> {
    /// Reads `from`.
    pub fn new(from: R, kind: FrameKind, subscribers: Rc<OutputSubscribers>) -> Self {
        Self {
            from,
            kind,
            subscribers,
            delay: None,
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
        if this.delay.is_none() && this.subscribers.is_congested() {
            this.delay = Some(Box::pin(tokio::time::sleep(READ_DELAY)));
        }
        if let Some(delay) = &mut this.delay {
            ready!(delay.as_mut().poll(context));
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut this.from).poll_read(context, buffer))?;
        this.delay = None;
        this.subscribers
            .publish(this.kind, &buffer.filled()[before..]);
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
        let mut total = 0;
        loop {
            match from.read(&mut buffer).await.unwrap() {
                0 => return total,
                read => total += read,
            }
        }
    }

    #[tokio::test]
    async fn subscriber_sees_output_since_it_subscribed() {
        let subscribers = Rc::<OutputSubscribers>::default();
        let mut source = Tee::new(&b"onetwo"[..], FrameKind::Stdout, subscribers.clone());
        let mut three = [0; 3];
        source.read_exact(&mut three).await.unwrap();
        let late = subscribers.subscribe(true, true);
        let stderr_only = subscribers.subscribe(false, true);
        drain(source).await;
        subscribers.close();
        let frames: Vec<Bytes> = late.collect().await;
        assert_eq!(frames.concat(), encode_frame(FrameKind::Stdout, b"two"));
        assert_eq!(stderr_only.count().await, 0);
        assert_eq!(subscribers.subscribe(true, true).count().await, 0);
    }

    #[tokio::test]
    async fn subscriber_that_does_not_read_is_dropped() {
        let subscribers = Rc::<OutputSubscribers>::default();
        let stuck = subscribers.subscribe(true, true);
        let total = 64 << 20;
        let source = tokio::io::repeat(7).take(total);
        let started = Instant::now();
        let read = drain(Tee::new(source, FrameKind::Stdout, subscribers.clone())).await;
        assert_eq!(read as u64, total);
        assert!(
            started.elapsed() < Duration::from_secs(5),
            "{:?}",
            started.elapsed()
        );
        assert!(stuck.was_overrun());
        let buffered: usize = stuck
            .map(|frame| frame.len())
            .fold(0, |a, b| async move { a + b })
            .await;
        assert!(buffered <= MAX_BUFFERED);
    }

    #[tokio::test]
    async fn subscriber_that_reads_loses_nothing() {
        let subscribers = Rc::<OutputSubscribers>::default();
        let mut client = subscribers.subscribe(true, true);
        let total: usize = 16 << 20;
        let source = tokio::io::repeat(7).take(total as u64);
        let copying = async {
            drain(Tee::new(source, FrameKind::Stdout, subscribers.clone())).await;
            subscribers.close();
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
        assert_eq!(seen, total);
        assert!(!client.was_overrun());
    }
}
