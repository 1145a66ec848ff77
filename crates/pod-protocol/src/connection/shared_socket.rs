//! A socket that stays open after its HTTP/2 server has finished.
//!
//! Closing a socket while the peer still writes makes the peer's writes fail, and an HTTP/2 client whose write has failed
//! discards responses that it has not read yet. So the server keeps the socket open until the peer has closed its side.

use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};

/// A socket shared with the HTTP/2 server on it. Both are on one thread, and never use it at the same time.
pub(super) struct SharedSocket<IO>(Rc<RefCell<IO>>);

impl<IO> Clone for SharedSocket<IO> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<IO: AsyncRead + AsyncWrite + Unpin> SharedSocket<IO> {
    pub(super) fn new(io: IO) -> Self {
        Self(Rc::new(RefCell::new(io)))
    }

    /// Waits until the peer, which has received GOAWAY, closes its side.
    pub(super) async fn wait_for_close(mut self) {
        let mut discarded = [0; 256];
        while self.read(&mut discarded).await.is_ok_and(|read| read > 0) {}
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for SharedSocket<IO> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.borrow_mut()).poll_read(context, buffer)
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for SharedSocket<IO> {
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
