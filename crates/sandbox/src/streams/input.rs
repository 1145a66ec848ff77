//! Standard input: of a process, for one client, or of a container, shared by all clients attached to it.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;

use tokio::io::AsyncWriteExt;
use tokio::net::unix::pipe;
use tokio::sync::{Notify, oneshot};

/// Destination of a session's input. Dropping it closes the input, or detaches from it if it is shared and stays open.
#[derive(Debug)]
pub enum Input {
    /// A pipe without other writers.
    Own(pipe::Sender),
    /// The input of a container.
    Shared(SharedInput),
}

impl Input {
    /// Writes all bytes. An error means that the reader is gone.
    pub async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Own(pipe) => pipe.write_all(bytes).await,
            Self::Shared(shared) => shared.stdin.write(bytes).await,
        }
    }
}

/// A container's standard input, open while the container runs or until it is closed.
#[derive(Debug)]
pub struct Stdin {
    pipe: RefCell<Option<Rc<pipe::Sender>>>,
    closed: Notify,
}

impl Stdin {
    /// Takes ownership of the pipe.
    pub fn new(pipe: pipe::Sender) -> Rc<Self> {
        Rc::new(Self {
            pipe: RefCell::new(Some(Rc::new(pipe))),
            closed: Notify::new(),
        })
    }

    /// Closes the pipe: the container reads end-of-file.
    pub fn close(&self) {
        self.pipe.replace(None);
        self.closed.notify_waiters();
    }

    async fn write(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let pipe = self.pipe.borrow().clone();
            let pipe = pipe.ok_or(io::ErrorKind::BrokenPipe)?;
            tokio::select! {
                ready = pipe.writable() => ready?,
                // A waiting writer must not keep the pipe open.
                () = self.closed.notified() => continue,
            }
            match pipe.try_write(bytes) {
                Ok(written) => bytes = &bytes[written..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// One client's handle to a container's input.
#[derive(Debug)]
pub struct SharedInput {
    stdin: Rc<Stdin>,
    /// `stdinOnce`: the end of this client's input closes the container's.
    once: bool,
    /// Without `stdinOnce`: ends this client's session.
    detach: Option<oneshot::Sender<()>>,
}

impl SharedInput {
    /// Adds a client. The receiver is notified when this client's input has ended and the container's stays open.
    /// `once` is the container's `stdinOnce`.
    pub fn new(stdin: Rc<Stdin>, once: bool) -> (Self, oneshot::Receiver<()>) {
        let (detach, detached) = oneshot::channel();
        let shared = Self {
            stdin,
            once,
            detach: Some(detach),
        };
        (shared, detached)
    }
}

impl Drop for SharedInput {
    fn drop(&mut self) {
        if self.once {
            // The session goes on: the client still waits for the container's output.
            self.stdin.close();
        } else if let Some(detach) = self.detach.take() {
            let _ = detach.send(());
        }
    }
}
