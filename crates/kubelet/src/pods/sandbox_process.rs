//! The process of a sandbox that is not a child of this kubelet.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::net::UnixStream;

use super::SandboxHandle;

/// Interval between liveness checks. The worker only waits for the exit after the sandbox has disconnected.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A sandbox's process, held by a pidfd so that a reused process id does no harm.
pub struct SandboxProcess {
    process: OwnedFd,
    id: i32,
}

impl SandboxProcess {
    /// The process at the other end of a Unix socket. An error if it has exited, or is in another PID namespace.
    pub(super) fn peer_of(stream: &UnixStream) -> io::Result<Self> {
        let pid = stream.peer_cred()?.pid().and_then(Pid::from_raw);
        Self::open(pid)
    }

    /// The process with this id. The caller must know that it is running.
    pub fn with_id(id: i32) -> io::Result<Self> {
        Self::open(Pid::from_raw(id))
    }

    fn open(pid: Option<Pid>) -> io::Result<Self> {
        let pid = pid.ok_or(io::ErrorKind::NotFound)?;
        Ok(Self {
            process: pidfd_open(pid, PidfdFlags::empty())?,
            id: pid.as_raw_nonzero().get(),
        })
    }

    fn has_exited(&self) -> bool {
        let mut watched = [PollFd::new(&self.process, PollFlags::IN)];
        poll(&mut watched, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }
}

impl SandboxHandle for SandboxProcess {
    fn exited(&mut self) -> BoxFuture<'_, String> {
        async {
            while !self.has_exited() {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
            // Only its parent can get the exit status.
            "exit status unknown".to_owned()
        }
        .boxed()
    }

    fn id(&self) -> Option<i32> {
        Some(self.id)
    }

    fn exit_is_polled(&self) -> bool {
        true
    }

    fn kill(&mut self) {
        let _ = pidfd_send_signal(&self.process, Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[tokio::test]
    async fn exit_of_the_process_is_noticed() {
        let (here, _there) = UnixStream::pair().unwrap();
        // The peer of a socket pair is this process.
        assert!(!SandboxProcess::peer_of(&here).unwrap().has_exited());

        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let mut process = SandboxProcess::open(Some(Pid::from_child(&child))).unwrap();
        assert!(process.exited().now_or_never().is_none());
        process.kill();
        process.exited().await;
        assert!(!child.wait().unwrap().success());
    }
}
