//! The sandbox's end of its line to the inner process.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::Rc;

use linux::packet::{self, Message};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::{oneshot, watch};

use crate::inner::message::{Identity, News, Request};

/// Why the inner process could not do something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// For people.
    pub message: String,
    /// The program to run is to blame, or the pod.
    pub program: bool,
}

impl Refusal {
    fn ours(message: impl std::fmt::Display) -> Self {
        Self {
            message: message.to_string(),
            program: false,
        }
    }
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

    /// Starts a process and waits until it runs. Whoever waits no longer has it killed.
    pub async fn start(
        &self,
        request: Request,
        stdio: &[BorrowedFd<'_>],
    ) -> Result<Process, Refusal> {
        let serial = self.next();
        let (tell, end) = oneshot::channel();
        self.ends.borrow_mut().insert(serial, tell);
        let unclaimed = Unclaimed {
            inside: self,
            serial,
        };
        let (descriptors, identity) = self.send(serial, request, stdio).await?;
        std::mem::forget(unclaimed);
        Ok(Process {
            serial,
            descriptors,
            end,
            identity,
        })
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
        let lost = || Refusal::ours("the pod's inner process is gone");
        if *self.gone.borrow() {
            return Err(lost());
        }
        let text = serde_json::to_vec(&request).map_err(Refusal::ours)?;
        let (tell, answer) = oneshot::channel();
        self.answers.borrow_mut().insert(serial, tell);
        let sent = self
            .socket
            .async_io(Interest::WRITABLE, || {
                packet::send(&self.socket, serial, &text, stdio)
            })
            .await;
        if let Err(error) = sent {
            self.answers.borrow_mut().remove(&serial);
            return Err(match *self.gone.borrow() {
                true => lost(),
                false => Refusal::ours(format_args!("asking the pod's inner process: {error}")),
            });
        }
        answer.await.unwrap_or_else(|_| Err(lost()))
    }

    fn hear(&self, message: Message) {
        let (serial, descriptors) = (message.number, message.descriptors);
        let news = serde_json::from_slice(&message.text);
        match news {
            Ok(News::Done | News::Runs(_)) | Err(_) if !message.is_whole => {
                let refusal = Refusal::ours("the pod's sandbox has too many open files");
                self.answer(serial, Err(refusal));
            }
            Err(error) => {
                tracing::error!(%error, "the inner process said something that is not understood");
            }
            Ok(News::Done) => self.answer(serial, Ok((descriptors, None))),
            Ok(News::Runs(identity)) => self.answer(serial, Ok((descriptors, Some(identity)))),
            Ok(News::Failed { message, program }) => {
                self.answer(serial, Err(Refusal { message, program }))
            }
            Ok(News::Exited { code, signal }) => {
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

/// A process that was asked for, until whoever asked has it. If they never do, it is not to run.
struct Unclaimed<'a> {
    inside: &'a Inside,
    serial: u64,
}

impl Drop for Unclaimed<'_> {
    fn drop(&mut self) {
        let Self { inside, serial } = self;
        inside.ends.borrow_mut().remove(serial);
        let request = Request::Kill { process: *serial };
        if let Ok(text) = serde_json::to_vec(&request) {
            // If the inner process is gone, so is what it started.
            let _ = packet::send(&inside.socket, inside.next(), &text, &[]);
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
            Ok(Some(message)) => inside.hear(message),
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

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::time::Duration;

    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::super::testing::{asked, say, within_patience};
    use super::*;
    use crate::inner::message::ProcessPlan;

    fn command() -> Request {
        Request::Exec {
            container: 1,
            process: Box::new(ProcessPlan::default()),
        }
    }

    /// Tries it with a line whose other end the test itself holds.
    async fn with_line<F: Future>(test: impl FnOnce(Rc<Inside>, OwnedFd) -> F) {
        let (ours, theirs) = packet::pair().unwrap();
        within_patience(async { _ = test(Inside::new(ours).unwrap(), theirs).await }).await;
    }

    #[tokio::test]
    async fn what_nobody_waits_for_is_killed() {
        with_line(|inside, inner| async move {
            let impatient = Duration::from_millis(20);
            let started = tokio::time::timeout(impatient, inside.start(command(), &[])).await;
            assert!(started.is_err());
            let (serial, _) = asked(&inner).await;
            let (_, then) = asked(&inner).await;
            assert!(
                matches!(then, Request::Kill { process } if process == serial),
                "{then:?}"
            );
            assert!(inside.ends.borrow().is_empty());
        })
        .await;
    }

    #[tokio::test]
    async fn a_request_that_is_too_long_is_refused_alone() {
        with_line(|inside, inner| async move {
            let plan = ProcessPlan {
                args: vec!["x".repeat(packet::MAX_TEXT)],
                ..ProcessPlan::default()
            };
            let long = Request::Exec {
                container: 1,
                process: Box::new(plan),
            };
            let refusal = inside.start(long, &[]).await.map(drop).unwrap_err();
            assert!(refusal.message.contains("too long"), "{refusal:?}");
            assert!(matches!(asked(&inner).await.1, Request::Kill { .. }));
            let answer = async {
                let (serial, _) = asked(&inner).await;
                say(&inner, serial, &News::Done, &[]);
            };
            let socket = Request::Socket {
                v6: false,
                datagrams: false,
            };
            let (done, ()) = tokio::join!(inside.ask(socket), answer);
            assert!(done.unwrap().is_empty());
        })
        .await;
    }

    /// The limit is the whole process's; each test is a process of its own.
    #[tokio::test]
    async fn want_of_descriptors_costs_one_answer() {
        with_line(|inside, inner| async move {
            let first = inside.start(command(), &[]);
            let answers = async {
                let (serial, _) = asked(&inner).await;
                let usual = getrlimit(Resource::Nofile);
                let none = Rlimit {
                    current: Some(3),
                    ..usual
                };
                setrlimit(Resource::Nofile, none).unwrap();
                say(&inner, serial, &News::Done, &[inner.as_fd()]);
                serial
            };
            let (refused, serial) = tokio::join!(first, answers);
            let refusal = refused.map(drop).unwrap_err();
            assert!(refusal.message.contains("open files"), "{refusal:?}");
            let (_, then) = asked(&inner).await;
            assert!(
                matches!(then, Request::Kill { process } if process == serial),
                "{then:?}"
            );
            assert!(!*inside.gone.borrow());
            drop(inner);
            inside.gone().await;
        })
        .await;
    }
}
