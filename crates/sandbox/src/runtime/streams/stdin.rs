//! Standard input: that of a command has one client; that of a container is shared by all attached clients.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;

use linux::async_fd::InputWriter;
use tokio::sync::{Notify, oneshot};

/// The standard input that a session writes to. Dropping it closes the input, or detaches from it if it is shared and
/// stays open.
#[derive(Debug)]
pub enum SessionInput {
    /// That of a command, which has no other writers.
    Process(InputWriter),
    /// That of a container.
    Container(SharedStdin),
}

impl SessionInput {
    /// Writes all bytes. Fails if the process has closed its end.
    pub async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Process(input) => input.write_all(bytes).await,
            Self::Container(shared) => shared.stdin.write(bytes).await,
        }
    }
}

/// A container's standard input. Open while the container runs, or until it is closed.
#[derive(Debug)]
pub struct ContainerStdin {
    writer: RefCell<Option<Rc<InputWriter>>>,
    closed: Notify,
}

impl ContainerStdin {
    /// Takes ownership of the pipe or terminal.
    pub fn new(writer: InputWriter) -> Rc<Self> {
        Rc::new(Self {
            writer: RefCell::new(Some(Rc::new(writer))),
            closed: Notify::new(),
        })
    }

    /// Closes the pipe: the container reads end-of-file.
    pub fn close(&self) {
        self.writer.replace(None);
        self.closed.notify_waiters();
    }

    async fn write(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let writer = self.writer.borrow().clone();
            let writer = writer.ok_or(io::ErrorKind::BrokenPipe)?;
            tokio::select! {
                written = writer.write(bytes) => bytes = &bytes[written?..],
                // A waiting write must not keep the pipe open.
                () = self.closed.notified() => {}
            }
        }
        Ok(())
    }
}

/// One client's handle to a container's standard input.
#[derive(Debug)]
pub struct SharedStdin {
    stdin: Rc<ContainerStdin>,
    /// `stdinOnce`: the end of this client's input closes the container's.
    stdin_once: bool,
    /// Without `stdinOnce`: ends this client's session.
    detach: Option<oneshot::Sender<()>>,
}

impl SharedStdin {
    /// Adds a client. The receiver is notified when this client's input has ended and the container's stays open.
    pub fn new(stdin: Rc<ContainerStdin>, stdin_once: bool) -> (Self, oneshot::Receiver<()>) {
        let (detach, detached) = oneshot::channel();
        let shared = Self {
            stdin,
            stdin_once,
            detach: Some(detach),
        };
        (shared, detached)
    }
}

impl Drop for SharedStdin {
    fn drop(&mut self) {
        if self.stdin_once {
            // The session goes on: the client still waits for the container's output.
            self.stdin.close();
        } else if let Some(detach) = self.detach.take() {
            let _ = detach.send(());
        }
    }
}
