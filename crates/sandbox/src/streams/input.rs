//! Standard input: of a process that has it for itself, and of a container to which several may be attached.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;

use tokio::io::AsyncWriteExt;
use tokio::net::unix::pipe;
use tokio::sync::{Notify, oneshot};

/// Where a session's input goes. Dropping it ends the input, as far as it can end.
#[derive(Debug)]
pub enum Input {
    /// Nobody else writes there.
    Own(pipe::Sender),
    /// A container's.
    Shared(SharedInput),
}

impl Input {
    /// Writes all of it; an error means that nobody will read any more.
    pub async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Own(pipe) => pipe.write_all(bytes).await,
            Self::Shared(shared) => shared.stdin.write(bytes).await,
        }
    }
}

/// A container's standard input, for as long as the container runs or until it is closed.
#[derive(Debug)]
pub struct Stdin {
    pipe: RefCell<Option<Rc<pipe::Sender>>>,
    closed: Notify,
}

impl Stdin {
    /// Takes it over.
    pub fn new(pipe: pipe::Sender) -> Rc<Self> {
        Rc::new(Self {
            pipe: RefCell::new(Some(Rc::new(pipe))),
            closed: Notify::new(),
        })
    }

    /// The container reads its end.
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
                // Whoever waits must not hold it open.
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

/// One client's share of a container's input.
#[derive(Debug)]
pub struct SharedInput {
    stdin: Rc<Stdin>,
    /// The container's input ends with this client's.
    once: bool,
    /// Otherwise this client's session does.
    detach: Option<oneshot::Sender<()>>,
}

impl SharedInput {
    /// One more client; the other end hears when its input has ended without ending the container's. `once` is the
    /// container's `stdinOnce`.
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
            // Without a word: the client waits for what the container makes of its input.
            self.stdin.close();
        } else if let Some(detach) = self.detach.take() {
            let _ = detach.send(());
        }
    }
}
