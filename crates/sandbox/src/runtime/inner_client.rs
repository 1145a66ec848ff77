//! The sandbox's end of the socket to the inner process.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::Rc;

use linux::packet::Packet;
use linux::packet_connection::PacketConnection;
use tokio::sync::{oneshot, watch};

use super::inner::message::{ContainerIdentity, InnerError, InnerEvent, InnerRequest, ProcessExit};

/// The descriptors of a reply, and the identity if the request started a container.
type Reply = Result<(Vec<OwnedFd>, Option<ContainerIdentity>), InnerError>;

/// Sends requests to the inner process and receives its events.
pub struct InnerClient {
    connection: PacketConnection,
    last_serial: Cell<u64>,
    replies: RefCell<HashMap<u64, oneshot::Sender<Reply>>>,
    exits: RefCell<HashMap<u64, oneshot::Sender<ProcessExit>>>,
    /// The inner process has exited: no more events will arrive.
    is_closed: watch::Sender<bool>,
}

/// A process that the inner process has started.
pub struct InnerProcess {
    /// Serial of the request.
    pub serial: u64,
    /// As for [`InnerEvent::Done`] or [`InnerEvent::ContainerStarted`].
    pub descriptors: Vec<OwnedFd>,
    /// Receives its exit.
    pub exit: oneshot::Receiver<ProcessExit>,
    /// Its user, if it is a container.
    pub identity: Option<ContainerIdentity>,
}

impl InnerClient {
    /// Serves the sandbox's end of `socket`.
    pub fn new(socket: OwnedFd) -> io::Result<Rc<Self>> {
        let client = Rc::new(Self {
            connection: PacketConnection::new(socket)?,
            last_serial: Cell::new(0),
            replies: RefCell::default(),
            exits: RefCell::default(),
            is_closed: watch::Sender::new(false),
        });
        tokio::task::spawn_local(receive_events(client.clone()));
        Ok(client)
    }

    /// Sends a request and waits for the descriptors of its reply.
    pub async fn request(&self, request: InnerRequest) -> Result<Vec<OwnedFd>, InnerError> {
        let serial = self.next_serial();
        let reply = self.send(serial, request, &[]).await;
        reply.map(|(descriptors, _)| descriptors)
    }

    /// Starts a process and waits until it runs. If the future is dropped before, the process is killed.
    pub async fn start_process(
        &self,
        request: InnerRequest,
        stdio: &[BorrowedFd<'_>],
    ) -> Result<InnerProcess, InnerError> {
        let serial = self.next_serial();
        let (sender, exit) = oneshot::channel();
        self.exits.borrow_mut().insert(serial, sender);
        let kill_on_drop = KillOnDrop {
            client: self,
            serial,
        };
        let (descriptors, identity) = self.send(serial, request, stdio).await?;
        std::mem::forget(kill_on_drop);
        Ok(InnerProcess {
            serial,
            descriptors,
            exit,
            identity,
        })
    }

    /// Closes the sending side: the inner process exits and kills everything it has started.
    pub fn disconnect(&self) {
        // Ignore the error: the inner process may have exited already.
        let _ = self.connection.shut_down();
    }

    /// Waits until the inner process has exited.
    pub async fn closed(&self) {
        let _ = self.is_closed.subscribe().wait_for(|closed| *closed).await;
    }

    fn next_serial(&self) -> u64 {
        self.last_serial.set(self.last_serial.get() + 1);
        self.last_serial.get()
    }

    async fn send(&self, serial: u64, request: InnerRequest, stdio: &[BorrowedFd<'_>]) -> Reply {
        let exited = || InnerError::runtime("the pod's inner process has exited");
        if *self.is_closed.borrow() {
            return Err(exited());
        }
        let text = serde_json::to_vec(&request).map_err(InnerError::runtime)?;
        let (sender, reply) = oneshot::channel();
        self.replies.borrow_mut().insert(serial, sender);
        if let Err(error) = self.connection.send(serial, &text, stdio).await {
            self.replies.borrow_mut().remove(&serial);
            return Err(match *self.is_closed.borrow() {
                true => exited(),
                false => InnerError::runtime(format_args!(
                    "cannot send a request to the pod's inner process: {error}"
                )),
            });
        }
        reply.await.unwrap_or_else(|_| Err(exited()))
    }

    fn handle_event(&self, message: Packet) {
        let (serial, descriptors) = (message.number, message.descriptors);
        let event = serde_json::from_slice(&message.text);
        match event {
            Ok(InnerEvent::Done | InnerEvent::ContainerStarted(_)) | Err(_)
                if !message.is_complete =>
            {
                let error = InnerError::runtime("the pod's sandbox has too many open files");
                self.reply(serial, Err(error));
            }
            Err(error) => {
                tracing::error!(%error, "cannot parse a message of the inner process");
            }
            Ok(InnerEvent::Done) => self.reply(serial, Ok((descriptors, None))),
            Ok(InnerEvent::ContainerStarted(identity)) => {
                self.reply(serial, Ok((descriptors, Some(identity))))
            }
            Ok(InnerEvent::Failed(error)) => self.reply(serial, Err(error)),
            Ok(InnerEvent::Exited(exit)) => {
                if let Some(sender) = self.exits.borrow_mut().remove(&serial) {
                    let _ = sender.send(exit);
                }
            }
        }
    }

    fn reply(&self, serial: u64, reply: Reply) {
        if let Some(sender) = self.replies.borrow_mut().remove(&serial) {
            let _ = sender.send(reply);
        }
    }
}

/// Kills a process that was requested but that its client no longer waits for.
struct KillOnDrop<'a> {
    client: &'a InnerClient,
    serial: u64,
}

impl Drop for KillOnDrop<'_> {
    fn drop(&mut self) {
        let Self { client, serial } = self;
        client.exits.borrow_mut().remove(serial);
        let request = InnerRequest::Kill { process: *serial };
        if let Ok(text) = serde_json::to_vec(&request) {
            // If the inner process has exited, so has the process.
            let _ = client.connection.try_send(client.next_serial(), &text);
        }
    }
}

/// Receives events until the inner process has exited. By then the kernel has killed all processes that it started.
async fn receive_events(client: Rc<InnerClient>) {
    while let Ok(Some(message)) = client.connection.receive().await {
        client.handle_event(message);
    }
    client.is_closed.send_replace(true);
    client.replies.borrow_mut().clear();
    for (_, sender) in client.exits.borrow_mut().drain() {
        let _ = sender.send(ProcessExit::SIGKILL);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::time::Duration;

    use linux::packet;
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::super::testing::{next_request, run_local, send_event};
    use super::*;
    use crate::runtime::inner::message::ProcessPlan;

    fn exec_request() -> InnerRequest {
        InnerRequest::Exec {
            container: 1,
            process: Box::new(ProcessPlan::default()),
        }
    }

    /// Runs a test that holds the inner process's end of the socket.
    async fn with_client<F: Future>(test: impl FnOnce(Rc<InnerClient>, OwnedFd) -> F) {
        let (ours, theirs) = packet::pair().unwrap();
        run_local(async { _ = test(InnerClient::new(ours).unwrap(), theirs).await }).await;
    }

    #[tokio::test]
    async fn dropping_a_start_kills_the_process() {
        with_client(|client, inner| async move {
            let timeout = Duration::from_millis(20);
            let start = client.start_process(exec_request(), &[]);
            assert!(tokio::time::timeout(timeout, start).await.is_err());
            let (serial, _) = next_request(&inner).await;
            let (_, then) = next_request(&inner).await;
            assert!(
                matches!(then, InnerRequest::Kill { process } if process == serial),
                "{then:?}"
            );
            assert!(client.exits.borrow().is_empty());
        })
        .await;
    }

    #[tokio::test]
    async fn oversized_request_fails_alone() {
        with_client(|client, inner| async move {
            let plan = ProcessPlan {
                args: vec!["x".repeat(packet::MAX_TEXT)],
                ..ProcessPlan::default()
            };
            let oversized = InnerRequest::Exec {
                container: 1,
                process: Box::new(plan),
            };
            let started = client.start_process(oversized, &[]).await;
            let error = started.map(drop).unwrap_err();
            assert!(error.message.contains("too long"), "{error:?}");
            assert!(matches!(
                next_request(&inner).await.1,
                InnerRequest::Kill { .. }
            ));
            let reply = async {
                let (serial, _) = next_request(&inner).await;
                send_event(&inner, serial, &InnerEvent::Done, &[]);
            };
            let socket = InnerRequest::CreateSocket {
                ipv6: false,
                udp: false,
            };
            let (done, ()) = tokio::join!(client.request(socket), reply);
            assert!(done.unwrap().is_empty());
        })
        .await;
    }

    /// Changes a limit of the whole process; nextest runs each test in its own process.
    #[tokio::test]
    async fn descriptor_exhaustion_fails_one_request() {
        with_client(|client, inner| async move {
            let start = client.start_process(exec_request(), &[]);
            let reply = async {
                let (serial, _) = next_request(&inner).await;
                let usual = getrlimit(Resource::Nofile);
                let exhausted = Rlimit {
                    current: Some(3),
                    ..usual
                };
                setrlimit(Resource::Nofile, exhausted).unwrap();
                send_event(&inner, serial, &InnerEvent::Done, &[inner.as_fd()]);
                serial
            };
            let (started, serial) = tokio::join!(start, reply);
            let error = started.map(drop).unwrap_err();
            assert!(error.message.contains("open files"), "{error:?}");
            let (_, then) = next_request(&inner).await;
            assert!(
                matches!(then, InnerRequest::Kill { process } if process == serial),
                "{then:?}"
            );
            assert!(!*client.is_closed.borrow());
            drop(inner);
            client.closed().await;
        })
        .await;
    }
}
