//! The sandbox's end of its line to the inner process.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::Rc;

use linux::packet;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::{oneshot, watch};

use crate::inner::message::{Answer, Asked, Identity, News, Request};

/// Why the inner process could not do something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// For people.
    pub message: String,
    /// The program to run is to blame, or the pod.
    pub program: bool,
}

/// How a process ended: as a shell would say it, and by which signal.
pub type End = (i32, Option<i32>);

/// Descriptors that came with an answer, and of a container who it is; or why there are none.
type Answered = Result<(Vec<OwnedFd>, Option<Identity>), Refusal>;

/// The line.
pub struct Inside {
    socket: UnixStream,
    last: Cell<u64>,
    answers: RefCell<HashMap<u64, oneshot::Sender<Answered>>>,
    ends: RefCell<HashMap<u64, oneshot::Sender<End>>>,
    /// It is gone: nothing more will be answered.
    gone: watch::Sender<bool>,
}

/// A process that was started inside.
pub struct Process {
    /// Its number: the serial of the request.
    pub serial: u64,
    /// The process, and its terminal if it has one.
    pub descriptors: Vec<OwnedFd>,
    /// Tells of its end.
    pub end: oneshot::Receiver<End>,
    /// Who it is, if it is a container.
    pub identity: Option<Identity>,
}

impl Inside {
    /// Speaks to the inner process at the other end of `socket`.
    pub fn new(socket: OwnedFd) -> io::Result<Rc<Self>> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        let inside = Rc::new(Self {
            // A stream by name only: packets keep their boundaries, and we never read it as a stream.
            socket: UnixStream::from_std(socket.into())?,
            last: Cell::new(0),
            answers: RefCell::default(),
            ends: RefCell::default(),
            gone: watch::Sender::new(false),
        });
        tokio::task::spawn_local(listen(inside.clone()));
        Ok(inside)
    }

    /// Asks for something and waits for the answer.
    pub async fn ask(&self, request: Request) -> Result<Vec<OwnedFd>, Refusal> {
        let serial = self.next();
        let answered = self.send(serial, request, &[]).await;
        answered.map(|(descriptors, _)| descriptors)
    }

    /// Starts a process and waits until it runs.
    pub async fn start(
        &self,
        request: Request,
        stdio: &[BorrowedFd<'_>],
    ) -> Result<Process, Refusal> {
        let serial = self.next();
        let (tell, end) = oneshot::channel();
        self.ends.borrow_mut().insert(serial, tell);
        match self.send(serial, request, stdio).await {
            Ok((descriptors, identity)) => Ok(Process {
                serial,
                descriptors,
                end,
                identity,
            }),
            Err(refusal) => {
                self.ends.borrow_mut().remove(&serial);
                Err(refusal)
            }
        }
    }

    /// Says nothing more: the inner process ends, and what it has started with it.
    pub fn hang_up(&self) {
        // It may be gone already.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Write);
    }

    /// Waits until the inner process is gone.
    pub async fn gone(&self) {
        let _ = self.gone.subscribe().wait_for(|gone| *gone).await;
    }

    fn next(&self) -> u64 {
        self.last.set(self.last.get() + 1);
        self.last.get()
    }

    async fn send(&self, serial: u64, request: Request, stdio: &[BorrowedFd<'_>]) -> Answered {
        let lost = || Refusal {
            message: "the pod's inner process is gone".to_owned(),
            program: false,
        };
        if *self.gone.borrow() {
            return Err(lost());
        }
        let (tell, answer) = oneshot::channel();
        self.answers.borrow_mut().insert(serial, tell);
        let text = serde_json::to_vec(&Asked { serial, request }).map_err(|_| lost())?;
        let sent = self
            .socket
            .async_io(Interest::WRITABLE, || {
                packet::send(&self.socket, &text, stdio)
            })
            .await;
        if sent.is_err() {
            self.answers.borrow_mut().remove(&serial);
            return Err(lost());
        }
        answer.await.unwrap_or_else(|_| Err(lost()))
    }

    fn hear(&self, text: &[u8], descriptors: Vec<OwnedFd>) {
        let Ok(Answer { serial, news }) = serde_json::from_slice(text) else {
            tracing::error!("the inner process said something that is not understood");
            return;
        };
        match news {
            News::Done => self.answer(serial, Ok((descriptors, None))),
            News::Runs(identity) => self.answer(serial, Ok((descriptors, Some(identity)))),
            News::Failed { message, program } => {
                self.answer(serial, Err(Refusal { message, program }))
            }
            News::Exited { code, signal } => {
                if let Some(tell) = self.ends.borrow_mut().remove(&serial) {
                    let _ = tell.send((code, signal));
                }
            }
        }
    }

    fn answer(&self, serial: u64, answer: Answered) {
        if let Some(tell) = self.answers.borrow_mut().remove(&serial) {
            let _ = tell.send(answer);
        }
    }
}

/// Hears the inner process until it is gone; then everything it ran is gone too, killed by the kernel.
async fn listen(inside: Rc<Inside>) {
    loop {
        let heard = inside
            .socket
            .async_io(Interest::READABLE, || packet::receive(&inside.socket))
            .await;
        match heard {
            Ok(Some((text, descriptors))) => inside.hear(&text, descriptors),
            Ok(None) | Err(_) => break,
        }
    }
    inside.gone.send_replace(true);
    inside.answers.borrow_mut().clear();
    let killed = (128 + 9, Some(9));
    for (_, tell) in inside.ends.borrow_mut().drain() {
        let _ = tell.send(killed);
    }
}
