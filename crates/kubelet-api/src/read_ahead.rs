//! A read buffer below TLS.
//!
//! rustls reads 4 KiB at a time. Without a buffer that would be five system calls for each full TLS record.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};

/// Bytes per read: four full TLS records.
const READ_AHEAD_SIZE: usize = 64 * 1024;

/// A socket with a read buffer. Writes go to the socket directly.
#[derive(Debug)]
pub(crate) struct ReadAhead<IO> {
    io: IO,
    /// Bytes read from the socket but not consumed yet. Holds no memory while the peer is idle.
    buffered: BytesMut,
}

impl<IO> ReadAhead<IO> {
    pub(crate) fn new(io: IO) -> Self {
        let buffered = BytesMut::new();
        Self { io, buffered }
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for ReadAhead<IO> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { io, buffered } = &mut *self;
        if buffered.is_empty() {
            if buffer.remaining() >= READ_AHEAD_SIZE {
                return Pin::new(io).poll_read(context, buffer);
            }
            buffered.reserve(READ_AHEAD_SIZE);
            let read = pin!(io.read_buf(buffered)).poll(context);
            if read.is_pending() {
                *buffered = BytesMut::new();
            }
            ready!(read)?;
        }
        let length = buffered.len().min(buffer.remaining());
        buffer.put_slice(&buffered[..length]);
        buffered.advance(length);
        Poll::Ready(Ok(()))
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for ReadAhead<IO> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncWriteExt, duplex};

    use super::*;

    #[tokio::test]
    async fn all_bytes_arrive_in_order_before_eof() {
        let sent: Vec<u8> = (0..300_000_u32).map(|number| number as u8).collect();
        let (mut theirs, ours) = duplex(100_000);
        let mut ours = ReadAhead::new(ours);
        let to_send = sent.clone();
        tokio::spawn(async move { theirs.write_all(&to_send).await });
        let (mut received, mut piece) = (Vec::new(), [0; 4096]);
        loop {
            let read = ours.read(&mut piece).await.unwrap();
            if read == 0 {
                break;
            }
            received.extend_from_slice(&piece[..read]);
        }
        assert_eq!(received, sent);
        assert_eq!(ours.read(&mut piece).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn idle_connection_holds_no_buffer() {
        let (mut theirs, ours) = duplex(1000);
        let mut ours = ReadAhead::new(ours);
        let mut piece = [0; 10];
        theirs.write_all(b"hello").await.unwrap();
        assert_eq!(ours.read(&mut piece).await.unwrap(), 5);
        let silent = futures::FutureExt::now_or_never(ours.read(&mut piece));
        assert!(silent.is_none());
        assert_eq!(ours.buffered.capacity(), 0);
    }
}
