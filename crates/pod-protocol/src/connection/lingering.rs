//! A connection that outlives its HTTP/2.
//!
//! Closing a socket while the peer still writes makes that peer's writes fail, and a client whose write has failed
//! throws away what it has not read yet. So whoever says the last word holds the socket until the other has read it.

use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};

/// A socket that is shared with the HTTP/2 server on it. All on one thread, and never used by both at once.
pub(super) struct Lingering<IO>(Rc<RefCell<IO>>);

impl<IO> Clone for Lingering<IO> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<IO: AsyncRead + AsyncWrite + Unpin> Lingering<IO> {
    pub(super) fn new(io: IO) -> Self {
        Self(Rc::new(RefCell::new(io)))
    }

    /// Waits until the peer, who has been told that nothing more will come, has gone.
    pub(super) async fn until_peer_is_gone(mut self) {
        let mut unheard = [0; 256];
        while self.read(&mut unheard).await.is_ok_and(|read| read > 0) {}
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for Lingering<IO> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.borrow_mut()).poll_read(context, buffer)
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for Lingering<IO> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0.borrow_mut()).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0.borrow_mut()).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.borrow().is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.borrow_mut()).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.borrow_mut()).poll_shutdown(context)
    }
}
