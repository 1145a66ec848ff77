//! The processes of which those are forked that pull images for the pod.
//!
//! A process that pulls is not executed, because a program that is begun in the node's user namespace is the namespace's for the
//! kernel: however it hides, containers with `hostPID` and `SYS_PTRACE` could look into it, and through it at the host's files. A fork
//! of a process that was begun outside and hides is hidden too. Only a process with one thread may fork, so the sandbox forks two
//! *fork servers* before it starts threads.
//!
//! ```text
//!   sandbox ──┬─ fork server ── pull     for a moment
//!             └─ fork server
//! ```
//!
//! Each of them can do the same: fork a pull, or another fork server beside itself. So when one is killed, the other replaces it. If
//! both are killed at the same moment nothing is left of which a hidden process outside of the pod's namespaces could be forked: the
//! sandbox has threads, and the inner process can't leave the pod's network. Then a new sandbox is needed, but not before the pod needs
//! an image that it does not have.

use std::fs::File;
use std::io::{self, BufReader};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use linux::fresh::{Forked, Fresh};
use linux::packet;
use linux::signal::ChildEnds;
use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitOptions};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::net::unix::pipe::{Receiver, Sender};
use tokio::sync::{mpsc, oneshot};

use crate::roles::pull;

/// How many fork servers a sandbox has.
const SERVERS: usize = 2;
/// The pause before another attempt to replace a fork server: the user may have as many processes as are allowed, for a while.
const REPLACE_PAUSE: Duration = Duration::from_secs(5);

/// Asks a fork server for a pull. Descriptors: standard input and output. Answered by a descriptor of the process, or by an error text.
const PULL: &[u8] = b"pull";
/// Asks a fork server for another one. Descriptor: the socket that it serves. Answered like [`PULL`].
const SERVE: &[u8] = b"serve";

/// A fork server, as the sandbox forked it.
pub struct ForkServer {
    socket: OwnedFd,
    process: OwnedFd,
}

/// The sandbox's side of its fork servers.
pub struct Puller(mpsc::UnboundedSender<Reply>);

/// Where a task waits for its pull.
type Reply = oneshot::Sender<io::Result<Pull>>;

/// A process that pulls one image. It is killed when this is dropped.
pub struct Pull {
    /// Where it reads its request.
    pub input: Sender,
    /// Where it writes what happens.
    pub output: Receiver,
    process: OwnedFd,
}

/// Forks the fork servers; the calling process must have a single thread. They end with that one.
pub fn fork() -> io::Result<Vec<ForkServer>> {
    let sandbox = rustix::process::getpid();
    let mut servers = Vec::new();
    for _ in 0..SERVERS {
        let (ours, theirs) = packet::pair()?;
        match linux::fresh::fork_into(Fresh::default())? {
            Forked::Parent(_, process) => servers.push(ForkServer {
                socket: ours,
                process,
            }),
            Forked::Child => {
                drop((ours, servers));
                run(sandbox, theirs)
            }
        }
    }
    Ok(servers)
}

/// The whole life of a fork server.
fn run(sandbox: Pid, socket: OwnedFd) -> ! {
    let served = linux::process::die_with_parent(Some(sandbox), Signal::KILL)
        .and_then(|()| serve(sandbox, socket));
    std::process::exit(i32::from(served.is_err()))
}

fn serve(sandbox: Pid, socket: OwnedFd) -> io::Result<()> {
    let ends = ChildEnds::listen()?;
    let this = rustix::process::getpid();
    loop {
        let mut watched = [
            PollFd::new(&socket, PollFlags::IN),
            PollFd::new(&ends, PollFlags::IN),
        ];
        match rustix::event::poll(&mut watched, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let [asked, ended] = watched.map(|fd| !fd.revents().is_empty());
        if ended {
            ends.take_note();
            while let Ok(Some(_)) = rustix::process::wait(WaitOptions::NOHANG) {}
        }
        if !asked {
            continue;
        }
        let Some(message) = packet::receive(&socket)? else {
            return Ok(());
        };
        let forked = match (&message.text[..], message.descriptors) {
            (PULL, mut streams) if streams.len() == 2 => {
                match linux::fresh::fork_into(Fresh::default()) {
                    Ok(Forked::Parent(_, process)) => Ok(process),
                    Ok(Forked::Child) => {
                        // The sandbox sees that this process has died when nobody holds the socket any more.
                        drop((socket, ends));
                        let output = streams.remove(1);
                        pull(this, streams.remove(0), output)
                    }
                    Err(error) => Err(error),
                }
            }
            // It becomes a child of the sandbox, not of this process, whose death it is to survive.
            (SERVE, mut sockets) if sockets.len() == 1 => match linux::fresh::fork_for_parent() {
                Ok(Forked::Parent(_, process)) => Ok(process),
                Ok(Forked::Child) => {
                    drop((socket, ends));
                    run(sandbox, sockets.remove(0))
                }
                Err(error) => Err(error),
            },
            _ => Err(io::Error::other("a request without its descriptors")),
        };
        match forked {
            Ok(process) => packet::send(&socket, 0, &[], &[process.as_fd()])?,
            Err(error) => packet::send(&socket, 0, error.to_string().as_bytes(), &[])?,
        }
    }
}

/// Pulls one image, and ends.
fn pull(server: Pid, input: OwnedFd, output: OwnedFd) -> ! {
    let pull = || -> anyhow::Result<()> {
        linux::process::die_with_parent(Some(server), Signal::KILL)?;
        linux::signal::hear_all()?;
        let input = BufReader::new(File::from(input));
        crate::block_on(pull::serve(input, File::from(output)))
    };
    if let Err(error) = pull() {
        tracing::warn!(error = format!("{error:#}"), "cannot pull an image");
    }
    std::process::exit(0)
}

impl Puller {
    /// Has images pulled by way of `servers`. Must be called within a `LocalSet`.
    pub fn new(servers: Vec<ForkServer>) -> io::Result<Self> {
        let servers: io::Result<_> = servers.into_iter().map(Server::new).collect();
        let (requests, inbox) = mpsc::unbounded_channel();
        tokio::task::spawn_local(look_after(Servers(servers?), inbox));
        Ok(Self(requests))
    }

    /// Starts a process that pulls an image. `BrokenPipe` means that no process is left that could fork one.
    ///
    /// If the caller drops this before it is done, the process is killed.
    pub async fn start(&self) -> io::Result<Pull> {
        // Another task asks, to its end: the response to a request that was dropped would be taken for that to the next.
        let (reply, pull) = oneshot::channel();
        self.0.send(reply).map_err(|_| no_server())?;
        pull.await.map_err(|_| no_server())?
    }
}

fn no_server() -> io::Error {
    io::ErrorKind::BrokenPipe.into()
}

/// Forks pulls on request, and replaces fork servers that die, until none is left or the [`Puller`] is dropped.
async fn look_after(mut servers: Servers, mut requests: mpsc::UnboundedReceiver<Reply>) {
    while !servers.0.is_empty() {
        if let Err(error) = servers.replace_dead().await {
            tracing::warn!(%error, "cannot replace the fork server for image pulls");
        }
        let is_complete = servers.0.len() == SERVERS;
        tokio::select! {
            request = requests.recv() => {
                let Some(reply) = request else { return };
                // If nobody waits for it any more, it is dropped, and thereby killed.
                let _ = reply.send(servers.start_pull().await);
            }
            dead = servers.dead() => servers.remove(dead),
            () = tokio::time::sleep(REPLACE_PAUSE), if !is_complete => {}
        }
    }
}

/// The fork servers that live.
struct Servers(Vec<Server>);

impl Servers {
    async fn start_pull(&mut self) -> io::Result<Pull> {
        let (input, theirs_in) = pipe_to()?;
        let (output, theirs_out) = pipe_from()?;
        let streams = [theirs_in.as_fd(), theirs_out.as_fd()];
        let process = self.ask(PULL, &streams).await?;
        Ok(Pull {
            input,
            output,
            process,
        })
    }

    async fn replace_dead(&mut self) -> io::Result<()> {
        while (1..SERVERS).contains(&self.0.len()) {
            let (socket, theirs) = packet::pair()?;
            let process = self.ask(SERVE, &[theirs.as_fd()]).await?;
            self.0.push(Server::new(ForkServer { socket, process })?);
        }
        Ok(())
    }

    /// Asks the first server that lives for a new process.
    async fn ask(&mut self, request: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<OwnedFd> {
        while let Some(server) = self.0.first() {
            match server.ask(request, descriptors).await? {
                Some(process) => return Ok(process),
                None => self.remove(0),
            }
        }
        Err(no_server())
    }

    /// Waits until one of them is dead.
    async fn dead(&self) -> usize {
        let deaths = self.0.iter().map(|server| Box::pin(server.died()));
        futures::future::select_all(deaths).await.1
    }

    /// Forgets a server that is dead, and reaps it.
    fn remove(&mut self, index: usize) {
        tracing::warn!("the fork server for image pulls has died");
        let Server { process, .. } = self.0.remove(index);
        tokio::task::spawn_local(async move {
            let ended = process.try_clone();
            if let Ok(ended) = ended.map(crate::ended) {
                let _ = ended.await;
            }
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            let _ = rustix::process::waitid(WaitId::PidFd(process.as_fd()), options);
        });
    }
}

/// The connection to a fork server.
struct Server {
    socket: UnixStream,
    process: OwnedFd,
}

impl Server {
    fn new(server: ForkServer) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&server.socket, true)?;
        Ok(Self {
            // A stream by name only: packets keep their boundaries, and we never read it as a stream.
            socket: UnixStream::from_std(server.socket.into())?,
            process: server.process,
        })
    }

    /// Asks for a new process; `None` if the server has died.
    async fn ask(
        &self,
        request: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<Option<OwnedFd>> {
        let send = || packet::send(&self.socket, 0, request, descriptors);
        let sent = self.socket.async_io(Interest::WRITABLE, send).await;
        let response = match sent {
            Ok(()) => self.receive().await,
            Err(error) => Err(error),
        };
        let response = match response {
            Ok(Some(response)) => response,
            Ok(None) => return Ok(None),
            Err(error) if is_hang_up(&error) => return Ok(None),
            Err(error) => return Err(error),
        };
        match response.descriptors.into_iter().next() {
            Some(process) => Ok(Some(process)),
            None if !response.is_whole => Err(io::Error::other("too many open files")),
            None => Err(io::Error::other(
                String::from_utf8_lossy(&response.text).into_owned(),
            )),
        }
    }

    async fn receive(&self) -> io::Result<Option<packet::Message>> {
        let receive = || packet::receive(&self.socket);
        self.socket.async_io(Interest::READABLE, receive).await
    }

    /// Returns when it has died: it says nothing unasked.
    async fn died(&self) {
        while let Ok(Some(_)) = self.receive().await {}
    }
}

fn is_hang_up(error: &io::Error) -> bool {
    let kinds = [
        io::ErrorKind::BrokenPipe,
        io::ErrorKind::ConnectionReset,
        io::ErrorKind::NotConnected,
    ];
    kinds.contains(&error.kind())
}

impl Drop for Pull {
    fn drop(&mut self) {
        // It may have ended.
        let _ = rustix::process::pidfd_send_signal(&self.process, Signal::KILL);
    }
}

fn pipe_to() -> io::Result<(Sender, OwnedFd)> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&write, true)?;
    Ok((Sender::from_owned_fd(write)?, read))
}

fn pipe_from() -> io::Result<(Receiver, OwnedFd)> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&read, true)?;
    Ok((Receiver::from_owned_fd(read)?, write))
}

#[cfg(test)]
mod tests {
    use rustix::process::PidfdFlags;
    use tokio::process::{Child, Command};

    use super::*;

    /// The other end of a fork server's socket, which the test serves itself.
    struct Fake(UnixStream);

    impl Fake {
        fn new(socket: OwnedFd) -> Self {
            rustix::io::ioctl_fionbio(&socket, true).unwrap();
            Self(UnixStream::from_std(socket.into()).unwrap())
        }

        async fn asked(&self, request: &[u8]) -> Vec<OwnedFd> {
            let receive = || packet::receive(&self.0);
            let message = self.0.async_io(Interest::READABLE, receive).await;
            let message = message.unwrap().unwrap();
            assert_eq!(
                message.text.escape_ascii().to_string(),
                request.escape_ascii().to_string()
            );
            message.descriptors
        }

        /// Answers with a descriptor of `process`.
        fn answer(&self, process: &Child) {
            packet::send(&self.0, 0, &[], &[descriptor(process).as_fd()]).unwrap();
        }
    }

    fn idle_process() -> Child {
        let mut command = Command::new("sleep");
        command.arg("1000").kill_on_drop(true).spawn().unwrap()
    }

    fn descriptor(process: &Child) -> OwnedFd {
        let pid = Pid::from_raw(process.id().unwrap().cast_signed()).unwrap();
        rustix::process::pidfd_open(pid, PidfdFlags::empty()).unwrap()
    }

    /// A puller with fork servers that the test serves.
    fn puller() -> (Puller, Vec<Fake>) {
        let server = || {
            let (socket, theirs) = packet::pair().unwrap();
            let process = descriptor(&idle_process());
            (ForkServer { socket, process }, Fake::new(theirs))
        };
        let (servers, fakes) = (0..SERVERS).map(|_| server()).unzip();
        (Puller::new(servers).unwrap(), fakes)
    }

    async fn with_local_tasks(test: impl Future<Output = ()>) {
        let local = tokio::task::LocalSet::new();
        let limit = Duration::from_secs(60);
        let ended = tokio::time::timeout(limit, local.run_until(test)).await;
        ended.expect("the test ends in time");
    }

    #[tokio::test]
    async fn dropped_start_leaves_no_response_for_the_next() {
        with_local_tasks(async {
            let (puller, servers) = puller();
            let impatient = Duration::from_millis(20);
            assert!(
                tokio::time::timeout(impatient, puller.start())
                    .await
                    .is_err()
            );
            let (mut unwanted, mut wanted) = (idle_process(), idle_process());
            let answers = async {
                servers[0].asked(PULL).await;
                servers[0].answer(&unwanted);
                servers[0].asked(PULL).await;
                servers[0].answer(&wanted);
            };
            let (pull, ()) = tokio::join!(puller.start(), answers);
            unwanted.wait().await.unwrap();
            assert!(wanted.try_wait().unwrap().is_none());
            drop(pull.unwrap());
            wanted.wait().await.unwrap();
        })
        .await;
    }

    #[tokio::test]
    async fn dead_fork_servers_are_replaced_until_all_die_at_once() {
        with_local_tasks(async {
            let (puller, mut servers) = puller();
            let process = idle_process();
            // As often as one dies, the other forks the next.
            for _ in 0..3 {
                servers.remove(0);
                let mut socket = servers[0].asked(SERVE).await;
                servers[0].answer(&process);
                servers.push(Fake::new(socket.remove(0)));
                let answer = async {
                    assert_eq!(servers[0].asked(PULL).await.len(), 2);
                    servers[0].answer(&idle_process());
                };
                let (pull, ()) = tokio::join!(puller.start(), answer);
                pull.unwrap();
            }
            servers.clear();
            let error = puller.start().await.map(drop).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::BrokenPipe, "{error}");
        })
        .await;
    }

    #[tokio::test]
    async fn fork_server_that_cannot_fork_costs_one_pull() {
        with_local_tasks(async {
            let (puller, servers) = puller();
            let answer = async {
                servers[0].asked(PULL).await;
                packet::send(&servers[0].0, 0, b"no more processes", &[]).unwrap();
            };
            let (pull, ()) = tokio::join!(puller.start(), answer);
            let error = pull.map(drop).unwrap_err();
            assert_eq!(error.to_string(), "no more processes");
            let answer = async {
                servers[0].asked(PULL).await;
                servers[0].answer(&idle_process());
            };
            let (pull, ()) = tokio::join!(puller.start(), answer);
            pull.unwrap();
        })
        .await;
    }
}
