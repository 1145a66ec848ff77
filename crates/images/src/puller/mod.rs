//! Pulls images for a sandbox, each in a process of its own, which a *fork server* forks.
//!
//! A process that pulls images is forked but does not exec: after an exec in the node's user namespace, the kernel would consider the
//! process's memory owned by that namespace. Then, although non-dumpable, it could be inspected by containers with `hostPID` and
//! `SYS_PTRACE`, which could reach the host's files through it. A fork of a non-dumpable process that was executed outside of the
//! namespace remains protected. Only a process with a single thread may fork, so the sandbox forks two *fork servers* before it starts
//! threads.
//!
//! ```text
//!   sandbox ──┬─ fork server ── pull     while it pulls
//!             └─ fork server
//! ```
//!
//! Both can fork a pull or another fork server. So if one is killed, the other replaces it. If both are killed at once, no process is
//! left that could fork a protected process outside of the pod's namespaces: the sandbox has threads, and the inner process cannot
//! leave the pod's network namespace. Then a new sandbox is needed, but only when the pod needs an image that it does not have.

mod fork_server;
mod held_images;
mod protocol;
mod pull_process;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use linux::clone::{CloneResult, NewNamespaces};
use linux::packet;
use linux::packet_connection::PacketConnection;
use rustix::process::{Signal, WaitId, WaitIdOptions};
use tokio::net::unix::pipe::{self, Receiver, Sender};
use tokio::sync::{mpsc, oneshot};

pub use held_images::{HeldImageError, HeldImages};
pub use protocol::PullFailure;

const FORK_SERVERS: usize = 2;
/// Retry interval of replacing a fork server: the user's process limit may be reached for a while.
const REPLACE_INTERVAL: Duration = Duration::from_secs(5);

/// Requests a pull. Descriptors: standard input and output. The response is a pidfd or an error text.
const REQUEST_PULL: &[u8] = b"pull";
/// Requests another fork server. Descriptor: the socket that it serves. The response is as for [`REQUEST_PULL`].
const REQUEST_SERVER: &[u8] = b"serve";

/// A fork server that the sandbox has forked.
#[derive(Debug)]
pub struct ForkServer {
    socket: OwnedFd,
    process: OwnedFd,
}

/// The sandbox's side of its fork servers.
#[derive(Debug)]
pub struct ImagePuller(mpsc::UnboundedSender<PullReply>);

/// Sends the pull to the task that requested it.
type PullReply = oneshot::Sender<io::Result<PullProcess>>;

/// A process that pulls one image. Dropping this kills it.
#[derive(Debug)]
pub(crate) struct PullProcess {
    /// The pipe for the request.
    pub input: Sender,
    /// The pipe with progress and the result.
    pub output: Receiver,
    process: OwnedFd,
}

/// Forks the fork servers. The calling process, the sandbox, must have a single thread. They exit with it.
pub fn fork() -> io::Result<Vec<ForkServer>> {
    let sandbox = rustix::process::getpid();
    let mut servers = Vec::new();
    for _ in 0..FORK_SERVERS {
        let (sandbox_socket, server_socket) = packet::pair()?;
        match linux::clone::fork_into(NewNamespaces::default())? {
            CloneResult::Parent(_, process) => servers.push(ForkServer {
                socket: sandbox_socket,
                process,
            }),
            CloneResult::Child => {
                drop((sandbox_socket, servers));
                fork_server::run(sandbox, server_socket)
            }
        }
    }
    Ok(servers)
}

impl ImagePuller {
    /// Pulls images through `servers`. Must be called within a `LocalSet`.
    pub fn new(servers: Vec<ForkServer>) -> io::Result<Self> {
        let servers: io::Result<_> = servers.into_iter().map(ForkServerConnection::new).collect();
        let (requests, receiver) = mpsc::unbounded_channel();
        tokio::task::spawn_local(run_servers(ForkServers(servers?), receiver));
        Ok(Self(requests))
    }

    /// Starts a process that pulls an image. `BrokenPipe` means that no fork server is left.
    ///
    /// If the caller drops this future, the process is killed.
    pub(crate) async fn start(&self) -> io::Result<PullProcess> {
        // A separate task sends the request and always receives the response: if a request were dropped, its response would be taken for
        // that of the next request.
        let (reply, pull) = oneshot::channel();
        self.0.send(reply).map_err(|_| no_server())?;
        pull.await.map_err(|_| no_server())?
    }
}

fn no_server() -> io::Error {
    io::ErrorKind::BrokenPipe.into()
}

/// Forks pulls on request, and replaces fork servers that die, until none is left or the [`ImagePuller`] is dropped.
async fn run_servers(mut servers: ForkServers, mut requests: mpsc::UnboundedReceiver<PullReply>) {
    while !servers.0.is_empty() {
        if let Err(error) = servers.replace_dead().await {
            tracing::warn!(%error, "cannot start a fork server for image pulls");
        }
        // All of them died at once.
        if servers.0.is_empty() {
            return;
        }
        let is_complete = servers.0.len() == FORK_SERVERS;
        tokio::select! {
            request = requests.recv() => {
                let Some(reply) = request else { return };
                // If the requesting task has gone, the pull is dropped and thereby killed.
                let _ = reply.send(servers.start_pull().await);
            }
            dead = servers.next_dead() => servers.remove(dead),
            () = tokio::time::sleep(REPLACE_INTERVAL), if !is_complete => {}
        }
    }
}

/// The running fork servers.
struct ForkServers(Vec<ForkServerConnection>);

impl ForkServers {
    async fn start_pull(&mut self) -> io::Result<PullProcess> {
        let (input, pull_input) = pipe_to()?;
        let (output, pull_output) = pipe_from()?;
        let streams = [pull_input.as_fd(), pull_output.as_fd()];
        let process = self.request(REQUEST_PULL, &streams).await?;
        Ok(PullProcess {
            input,
            output,
            process,
        })
    }

    async fn replace_dead(&mut self) -> io::Result<()> {
        while (1..FORK_SERVERS).contains(&self.0.len()) {
            let (socket, server_socket) = packet::pair()?;
            let process = self
                .request(REQUEST_SERVER, &[server_socket.as_fd()])
                .await?;
            self.0
                .push(ForkServerConnection::new(ForkServer { socket, process })?);
        }
        Ok(())
    }

    /// Requests a new process from the first server that still runs.
    async fn request(
        &mut self,
        request: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<OwnedFd> {
        while let Some(server) = self.0.first() {
            match server.request(request, descriptors).await? {
                Some(process) => return Ok(process),
                None => self.remove(0),
            }
        }
        Err(no_server())
    }

    /// Waits until a server has died, and returns its index.
    async fn next_dead(&self) -> usize {
        let deaths = self
            .0
            .iter()
            .map(|server| Box::pin(server.connection.wait_for_close()));
        futures::future::select_all(deaths).await.1
    }

    /// Removes a dead server from the list, and reaps it.
    fn remove(&mut self, index: usize) {
        tracing::warn!("a fork server for image pulls died");
        let ForkServerConnection { process, .. } = self.0.remove(index);
        tokio::task::spawn_local(async move {
            let exited = process.try_clone().map(linux::async_fd::process_exited);
            if let Ok(exited) = exited {
                let _ = exited.await;
            }
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            let _ = rustix::process::waitid(WaitId::PidFd(process.as_fd()), options);
        });
    }
}

/// The connection to a fork server.
struct ForkServerConnection {
    connection: PacketConnection,
    process: OwnedFd,
}

impl ForkServerConnection {
    fn new(server: ForkServer) -> io::Result<Self> {
        Ok(Self {
            connection: PacketConnection::new(server.socket)?,
            process: server.process,
        })
    }

    /// Requests a new process; `None` if the server has died.
    async fn request(
        &self,
        request: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<Option<OwnedFd>> {
        let response = match self.connection.request(request, descriptors).await {
            Ok(response) => response,
            Err(error) if is_hang_up(&error) => return Ok(None),
            Err(error) => return Err(error),
        };
        match response.descriptors.into_iter().next() {
            Some(process) => Ok(Some(process)),
            None if !response.is_complete => Err(io::Error::other("too many open files")),
            None => Err(io::Error::other(
                String::from_utf8_lossy(&response.text).into_owned(),
            )),
        }
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

impl Drop for PullProcess {
    fn drop(&mut self) {
        // The process may have exited already: ignore the error.
        let _ = rustix::process::pidfd_send_signal(&self.process, Signal::KILL);
    }
}

fn pipe_to() -> io::Result<(Sender, OwnedFd)> {
    let (ours, theirs) = pipe::pipe()?;
    Ok((ours, theirs.into_blocking_fd()?))
}

fn pipe_from() -> io::Result<(Receiver, OwnedFd)> {
    let (theirs, ours) = pipe::pipe()?;
    Ok((ours, theirs.into_blocking_fd()?))
}

#[cfg(test)]
mod tests {
    use rustix::process::{Pid, PidfdFlags};
    use tokio::process::{Child, Command};

    use super::*;

    /// The other end of a fork server's socket, served by the test.
    struct FakeForkServer(PacketConnection);

    impl FakeForkServer {
        fn new(socket: OwnedFd) -> Self {
            Self(PacketConnection::new(socket).unwrap())
        }

        async fn expect_request(&self, request: &[u8]) -> Vec<OwnedFd> {
            let message = self.0.receive().await.unwrap().unwrap();
            assert_eq!(
                message.text.escape_ascii().to_string(),
                request.escape_ascii().to_string()
            );
            message.descriptors
        }

        /// Responds with a descriptor of `process`.
        async fn respond(&self, process: &Child) {
            let process = descriptor(process);
            self.0.send(0, &[], &[process.as_fd()]).await.unwrap();
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

    /// Fork servers that are served by the test.
    fn fork_servers() -> (Vec<ForkServer>, Vec<FakeForkServer>) {
        let server = || {
            let (socket, server_socket) = packet::pair().unwrap();
            let process = descriptor(&idle_process());
            (
                ForkServer { socket, process },
                FakeForkServer::new(server_socket),
            )
        };
        (0..FORK_SERVERS).map(|_| server()).unzip()
    }

    /// A puller whose fork servers are served by the test.
    fn puller() -> (ImagePuller, Vec<FakeForkServer>) {
        let (servers, fakes) = fork_servers();
        (ImagePuller::new(servers).unwrap(), fakes)
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
            let timeout = Duration::from_millis(20);
            assert!(tokio::time::timeout(timeout, puller.start()).await.is_err());
            let (mut unwanted, mut wanted) = (idle_process(), idle_process());
            let responses = async {
                servers[0].expect_request(REQUEST_PULL).await;
                servers[0].respond(&unwanted).await;
                servers[0].expect_request(REQUEST_PULL).await;
                servers[0].respond(&wanted).await;
            };
            let (pull, ()) = tokio::join!(puller.start(), responses);
            unwanted.wait().await.unwrap();
            assert!(wanted.try_wait().unwrap().is_none());
            drop(pull.unwrap());
            wanted.wait().await.unwrap();
        })
        .await;
    }

    #[tokio::test]
    async fn fork_servers_are_replaced_unless_all_die() {
        with_local_tasks(async {
            let (puller, mut servers) = puller();
            let process = idle_process();
            // Each time one dies, the other forks a replacement.
            for _ in 0..3 {
                servers.remove(0);
                let mut socket = servers[0].expect_request(REQUEST_SERVER).await;
                servers[0].respond(&process).await;
                servers.push(FakeForkServer::new(socket.remove(0)));
                let response = async {
                    assert_eq!(servers[0].expect_request(REQUEST_PULL).await.len(), 2);
                    servers[0].respond(&idle_process()).await;
                };
                let (pull, ()) = tokio::join!(puller.start(), response);
                pull.unwrap();
            }
            servers.clear();
            let error = puller.start().await.map(drop).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::BrokenPipe, "{error}");
        })
        .await;
    }

    #[tokio::test]
    async fn losing_all_fork_servers_ends_their_task() {
        with_local_tasks(async {
            let (servers, fakes) = fork_servers();
            let servers: io::Result<_> =
                servers.into_iter().map(ForkServerConnection::new).collect();
            let (_requests, receiver) = mpsc::unbounded_channel();
            let serving =
                tokio::task::spawn_local(run_servers(ForkServers(servers.unwrap()), receiver));
            tokio::task::yield_now().await;
            drop(fakes);
            serving.await.expect("the task does not panic");
        })
        .await;
    }

    #[tokio::test]
    async fn failed_fork_fails_only_one_pull() {
        with_local_tasks(async {
            let (puller, servers) = puller();
            let response = async {
                servers[0].expect_request(REQUEST_PULL).await;
                servers[0].0.try_send(0, b"no more processes").unwrap();
            };
            let (pull, ()) = tokio::join!(puller.start(), response);
            let error = pull.map(drop).unwrap_err();
            assert_eq!(error.to_string(), "no more processes");
            let response = async {
                servers[0].expect_request(REQUEST_PULL).await;
                servers[0].respond(&idle_process()).await;
            };
            let (pull, ()) = tokio::join!(puller.start(), response);
            pull.unwrap();
        })
        .await;
    }
}
