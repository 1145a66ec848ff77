//! A process from which those are forked that pull images for the pod.
//!
//! They are not executed, because a program that is begun in the node's user namespace is the namespace's for the kernel:
//! however it hides, containers with `hostPID` and `SYS_PTRACE` could look into it, and through it at the host's files. A fork
//! of a process that was begun outside and hides is hidden too. Only a process with one thread may fork, so that this one is made
//! before the sandbox has more.

use std::fs::File;
use std::io::{self, BufReader};
use std::os::fd::{AsFd, OwnedFd};

use linux::fresh::{Forked, Fresh};
use linux::packet;
use linux::signal::ChildEnds;
use rustix::event::{PollFd, PollFlags};
use rustix::process::{Signal, WaitOptions};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::net::unix::pipe::{Receiver, Sender};
use tokio::sync::{mpsc, oneshot};

use crate::image::pull_process;

/// The sandbox's side of it.
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

/// Forks it; the calling process must have a single thread. It ends with that one.
pub fn fork() -> io::Result<OwnedFd> {
    let (ours, theirs) = packet::pair()?;
    let parent = rustix::process::getpid();
    match linux::fresh::fork_into(Fresh::default())? {
        Forked::Parent(..) => Ok(ours),
        Forked::Child => {
            drop(ours);
            let served = linux::process::die_with_parent(Some(parent), Signal::KILL)
                .and_then(|()| serve(&theirs));
            std::process::exit(i32::from(served.is_err()))
        }
    }
}

/// Forks a process for each request, with the standard streams that come with it.
fn serve(socket: &OwnedFd) -> io::Result<()> {
    let ends = ChildEnds::listen()?;
    loop {
        let mut watched = [
            PollFd::new(socket, PollFlags::IN),
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
        let Some(message) = packet::receive(socket)? else {
            return Ok(());
        };
        let Ok([input, output]) = <[OwnedFd; 2]>::try_from(message.descriptors) else {
            // The sandbox waits for an answer.
            packet::send(socket, 0, &[], &[])?;
            continue;
        };
        match linux::fresh::fork_into(Fresh::default()) {
            Ok(Forked::Child) => pull(input, output),
            Ok(Forked::Parent(_, process)) => packet::send(socket, 0, &[], &[process.as_fd()])?,
            Err(_) => packet::send(socket, 0, &[], &[])?,
        }
    }
}

/// Pulls one image, and ends.
fn pull(input: OwnedFd, output: OwnedFd) -> ! {
    let parent = rustix::process::getppid();
    let pull = || -> anyhow::Result<()> {
        linux::process::die_with_parent(parent, Signal::KILL)?;
        linux::signal::hear_all()?;
        let input = BufReader::new(File::from(input));
        crate::block_on(pull_process::serve(input, File::from(output)))
    };
    if let Err(error) = pull() {
        tracing::warn!(error = format!("{error:#}"), "cannot pull an image");
    }
    std::process::exit(0)
}

impl Puller {
    /// Speaks to the process at the other end of `socket`. Must be called within a `LocalSet`.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        // A stream by name only: packets keep their boundaries, and we never read it as a stream.
        let socket = UnixStream::from_std(socket.into())?;
        let (requests, inbox) = mpsc::unbounded_channel();
        tokio::task::spawn_local(start_on_request(socket, inbox));
        Ok(Self(requests))
    }

    /// Starts a process that pulls an image. `BrokenPipe` means that nobody is there to fork one.
    ///
    /// If the caller drops this before it is done, the process is killed.
    pub async fn start(&self) -> io::Result<Pull> {
        // Another task asks, to its end: the response to a request that was dropped would be taken for that to the next.
        let (reply, pull) = oneshot::channel();
        let gone = || io::Error::from(io::ErrorKind::BrokenPipe);
        self.0.send(reply).map_err(|_| gone())?;
        pull.await.map_err(|_| gone())?
    }
}

/// Starts a process for each request, one after the other, until the [`Puller`] is dropped.
async fn start_on_request(socket: UnixStream, mut requests: mpsc::UnboundedReceiver<Reply>) {
    while let Some(reply) = requests.recv().await {
        // If the caller no longer waits, the pull is dropped and thereby killed.
        let _ = reply.send(start(&socket).await);
    }
}

async fn start(socket: &UnixStream) -> io::Result<Pull> {
    let (input, theirs_in) = pipe_to()?;
    let (output, theirs_out) = pipe_from()?;
    let ask = || packet::send(socket, 0, &[], &[theirs_in.as_fd(), theirs_out.as_fd()]);
    socket.async_io(Interest::WRITABLE, ask).await?;
    let response = socket.async_io(Interest::READABLE, || packet::receive(socket));
    let response = response.await?.ok_or(io::ErrorKind::BrokenPipe)?;
    let process = response.descriptors.into_iter().next();
    let process = process.ok_or_else(|| io::Error::other("it could not be forked"))?;
    Ok(Pull {
        input,
        output,
        process,
    })
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
    use std::time::Duration;

    use rustix::process::{Pid, PidfdFlags};
    use tokio::process::{Child, Command};

    use super::*;

    /// The puller's end of the socket, which the test serves itself.
    struct Fake(UnixStream);

    impl Fake {
        async fn asked(&self) {
            let receive = || packet::receive(&self.0);
            let message = self.0.async_io(Interest::READABLE, receive).await;
            assert_eq!(message.unwrap().unwrap().descriptors.len(), 2);
        }

        /// Answers with a descriptor of `process`.
        fn answer(&self, process: &Child) {
            let pid = Pid::from_raw(process.id().unwrap().cast_signed()).unwrap();
            let descriptor = rustix::process::pidfd_open(pid, PidfdFlags::empty()).unwrap();
            packet::send(&self.0, 0, &[], &[descriptor.as_fd()]).unwrap();
        }
    }

    fn idle_process() -> Child {
        let mut command = Command::new("sleep");
        command.arg("1000").kill_on_drop(true).spawn().unwrap()
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
            let (ours, theirs) = packet::pair().unwrap();
            rustix::io::ioctl_fionbio(&theirs, true).unwrap();
            let server = Fake(UnixStream::from_std(theirs.into()).unwrap());
            let puller = Puller::new(ours).unwrap();
            let impatient = Duration::from_millis(20);
            let dropped = tokio::time::timeout(impatient, puller.start()).await;
            assert!(dropped.is_err());
            let (mut unwanted, mut wanted) = (idle_process(), idle_process());
            let answers = async {
                server.asked().await;
                server.answer(&unwanted);
                server.asked().await;
                server.answer(&wanted);
            };
            let (pull, ()) = tokio::join!(puller.start(), answers);
            unwanted.wait().await.unwrap();
            assert!(wanted.try_wait().unwrap().is_none());
            drop(pull.unwrap());
            wanted.wait().await.unwrap();
        })
        .await;
    }
}
