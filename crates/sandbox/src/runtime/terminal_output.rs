//! Reads from the master side of a terminal.

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::unix::pipe;

/// The output of a terminal. It ends when the last process has closed the terminal.
#[derive(Debug)]
pub struct TerminalOutput(pipe::Receiver);

impl TerminalOutput {
    /// Takes ownership of the master side.
    pub fn new(master: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&master, true)?;
        // Not a pipe, but it is read and polled like one.
        Ok(Self(pipe::Receiver::from_owned_fd_unchecked(master)?))
    }
}

impl AsyncRead for TerminalOutput {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.0).poll_read(context, buffer);
        match read {
            // The kernel returns EIO when no process has the slave side open.
            Poll::Ready(Err(error)) if is_hung_up(&error) => Poll::Ready(Ok(())),
            read => read,
        }
    }
}

fn is_hung_up(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error())
}
