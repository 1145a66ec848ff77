//! Descriptors for which tokio has no type of its own: terminals, pidfds, packet sockets.

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rustix::io::Errno;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, Interest, ReadBuf};

/// Registers a descriptor with tokio's reactor, and makes it non-blocking.
pub fn register(descriptor: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    rustix::io::ioctl_fionbio(&descriptor, true)?;
    register_unchanged(descriptor, interest)
}

/// Waits until the process of a pidfd exits: the pidfd is then readable.
pub async fn process_exited(pidfd: OwnedFd) -> io::Result<()> {
    // Leave the pidfd blocking: its duplicates share O_NONBLOCK, and waitid on a duplicate must still block.
    let pidfd = register_unchanged(pidfd, Interest::READABLE)?;
    pidfd.readable().await.map(drop)
}

fn register_unchanged(descriptor: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open, and refers to the same descriptor, until it is dropped, and `AsyncFd` deregisters it first.
    Ok(unsafe { AsyncFd::register_with_interest(descriptor, interest) }?)
}

/// Reads the output of a process from a pipe, or from the master side of a terminal.
#[derive(Debug)]
pub struct OutputReader(AsyncFd<OwnedFd>);

impl OutputReader {
    /// `descriptor` is this process's end of the pipe, or the master side.
    pub fn new(descriptor: OwnedFd) -> io::Result<Self> {
        Ok(Self(register(descriptor, Interest::READABLE)?))
    }
}

impl AsyncRead for OutputReader {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let mut ready = ready!(self.0.poll_read_ready(context))?;
            // SAFETY: `read` only writes to the bytes, and does not de-initialize any.
            let unfilled = unsafe { buffer.unfilled_mut() };
            let read = match rustix::io::read(self.0.get_ref(), unfilled) {
                Ok((filled, _)) => filled.len(),
                Err(Errno::AGAIN) => {
                    ready.clear_ready();
                    continue;
                }
                Err(Errno::INTR) => continue,
                // The kernel returns EIO when no process has the slave side of a terminal open.
                Err(Errno::IO) => 0,
                Err(error) => return Poll::Ready(Err(error.into())),
            };
            // SAFETY: `read` has initialized this many bytes.
            unsafe { buffer.assume_init(read) };
            buffer.advance(read);
            return Poll::Ready(Ok(()));
        }
    }
}

/// Writes the input of a process to a pipe, or to the master side of a terminal.
#[derive(Debug)]
pub struct InputWriter(AsyncFd<OwnedFd>);

impl InputWriter {
    /// `descriptor` is this process's end of the pipe, or the master side. When a pipe's writer is
    /// dropped, the process reads end-of-file.
    pub fn new(descriptor: OwnedFd) -> io::Result<Self> {
        Ok(Self(register(descriptor, Interest::WRITABLE)?))
    }

    /// Writes some bytes, and returns how many. Cancel-safe: a future that is dropped early has written nothing.
    pub async fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        let write = |descriptor: &OwnedFd| Ok(rustix::io::write(descriptor, bytes)?);
        self.0.async_io(Interest::WRITABLE, write).await
    }

    /// Writes all bytes.
    pub async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let written = self.write(bytes).await?;
            bytes = &bytes[written..];
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};
    use std::time::Duration;

    use rustix::fs::{Mode, OFlags};
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
    use tokio::io::AsyncReadExt;

    use super::*;

    const PENDING: Duration = Duration::from_millis(50);

    /// The two sides of a terminal that passes bytes unchanged.
    fn terminal() -> (OwnedFd, File) {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let slave = rustix::fs::open(&name, flags, Mode::empty()).unwrap();
        let mut raw = tcgetattr(&slave).unwrap();
        raw.make_raw();
        tcsetattr(&slave, OptionalActions::Now, &raw).unwrap();
        (master, slave.into())
    }

    #[tokio::test]
    async fn terminal_output_ends_at_hangup() {
        let (master, mut slave) = terminal();
        let mut reader = OutputReader::new(master).unwrap();
        let mut buffer = [0; 16];
        let pending = tokio::time::timeout(PENDING, reader.read(&mut buffer)).await;
        assert!(pending.is_err());
        slave.write_all(b"last line").unwrap();
        drop(slave);
        let mut output = String::new();
        reader.read_to_string(&mut output).await.unwrap();
        assert_eq!(output, "last line");
    }

    /// More than a terminal buffers, so the writer must wait for the reader.
    #[tokio::test]
    async fn terminal_input_arrives_completely() {
        const LENGTH: usize = 100_000;
        let (master, mut slave) = terminal();
        let writer = InputWriter::new(master.try_clone().unwrap()).unwrap();
        let input = vec![b'x'; LENGTH];
        let pending = tokio::time::timeout(PENDING, writer.write_all(&input)).await;
        assert!(pending.is_err());
        let writer = InputWriter::new(master).unwrap();
        let reading = std::thread::spawn(move || {
            let mut read = vec![0; LENGTH];
            slave.read_exact(&mut read).unwrap();
            read
        });
        writer.write_all(&input).await.unwrap();
        assert!(reading.join().unwrap() == input);
    }

    #[tokio::test]
    async fn pipe_carries_bytes_until_closed() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let (mut reader, writer) = (
            OutputReader::new(read).unwrap(),
            InputWriter::new(write).unwrap(),
        );
        let input = vec![b'x'; 1 << 20];
        let write = async {
            writer.write_all(&input).await.unwrap();
            drop(writer);
        };
        let mut output = Vec::new();
        let (read, ()) = tokio::join!(reader.read_to_end(&mut output), write);
        assert_eq!(read.unwrap(), input.len());
        let (read, write) = rustix::pipe::pipe().unwrap();
        drop(read);
        let error = InputWriter::new(write).unwrap().write_all(b"x").await;
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[tokio::test]
    async fn process_exit_is_noticed() {
        let mut child = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        let mut exited = std::pin::pin!(process_exited(pidfd));
        assert!(tokio::time::timeout(PENDING, &mut exited).await.is_err());
        drop(child.stdin.take());
        exited.await.unwrap();
        assert!(child.try_wait().unwrap().is_some());
    }
}
