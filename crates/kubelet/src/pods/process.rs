//! A sandbox that dialled over a Unix socket is a process of this machine, also when it was not this kubelet that
//! started it.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::net::UnixStream;

use super::launch::Handle;

/// How often it is looked at. That is done only after its connection broke, which is how its end is noticed.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// A sandbox's process that is nobody's child here, whatever becomes of its process id.
pub struct Process {
    process: OwnedFd,
    id: i32,
}

impl Process {
    /// The process that has dialled; an error if it is gone already, or can't be seen from here.
    pub(super) fn behind(stream: &UnixStream) -> io::Result<Self> {
        let pid = stream.peer_cred()?.pid().and_then(Pid::from_raw);
        Self::open(pid)
    }

    /// The process with this id, of which the caller knows that it is there.
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

    fn has_ended(&self) -> bool {
        let mut watched = [PollFd::new(&self.process, PollFlags::IN)];
        poll(&mut watched, Some(&Timespec::default())).is_ok_and(|ended| ended > 0)
    }
}

impl Handle for Process {
    fn exited(&mut self) -> BoxFuture<'_, String> {
        async {
            while !self.has_ended() {
                tokio::time::sleep(LOOK_EVERY).await;
            }
            // How it ended is only for its parent to know.
            "it has ended".to_owned()
        }
        .boxed()
    }

    fn id(&self) -> Option<i32> {
        Some(self.id)
    }

    fn must_be_asked(&self) -> bool {
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
    async fn the_end_of_whoever_dialled_is_noticed() {
        let (here, _there) = UnixStream::pair().unwrap();
        // A pair's other end is this process, which has not ended.
        assert!(!Process::behind(&here).unwrap().has_ended());

        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let mut process = Process::open(Some(Pid::from_child(&child))).unwrap();
        assert!(process.exited().now_or_never().is_none());
        process.kill();
        process.exited().await;
        assert!(!child.wait().unwrap().success());
    }
}
