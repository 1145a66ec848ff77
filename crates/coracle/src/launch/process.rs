//! Follows the process of a sandbox on this machine.

use std::io;
use std::os::fd::OwnedFd;
use std::process::ExitStatus;
use std::time::Duration;

use kubelet::{SandboxControl, SandboxEnd, SandboxHandle, SandboxState};
use pod_protocol::SandboxId;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::process::Child;

use crate::roles::sandbox::sandbox_id;

/// Retry interval of waiting for an exit.
const EXIT_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// A sandbox's process, held by a pidfd so that a reused process id does no harm.
pub struct SandboxProcess {
    pidfd: OwnedFd,
    pid: i32,
}

/// The pod's uid in an id of this node.
pub fn pod_uid(id: &SandboxId) -> Option<&str> {
    Some(id.as_str().split_once('/')?.0)
}

impl SandboxProcess {
    /// The process with this id. The caller must know that it is running.
    pub fn open(pid: i32) -> io::Result<Self> {
        let process = Pid::from_raw(pid).ok_or(io::ErrorKind::NotFound)?;
        Ok(Self {
            pidfd: pidfd_open(process, PidfdFlags::empty())?,
            pid,
        })
    }

    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// A handle of this process, which is not a child of the agent.
    pub fn follow(self, uid: &str) -> SandboxHandle {
        let id = sandbox_id(uid, self.pid);
        let (handle, control) = SandboxHandle::new(Some(id), SandboxState::Running);
        tokio::spawn(async move { self.follow_until_exit(&control).await });
        handle
    }

    async fn exited(&self) {
        loop {
            if let Ok(pidfd) = self.pidfd.try_clone()
                && linux::async_fd::process_exited(pidfd).await.is_ok()
            {
                return;
            }
            // No descriptor is free.
            tokio::time::sleep(EXIT_RETRY_INTERVAL).await;
        }
    }

    /// Kills the process on request, and publishes its exit.
    pub async fn follow_until_exit(self, control: &SandboxControl) {
        let mut exited = std::pin::pin!(self.exited());
        loop {
            tokio::select! {
                () = &mut exited => break,
                () = control.kill_requested() => {
                    let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
                }
            }
        }
        // Only its parent can get the exit status.
        set_ended(control, "exit status unknown".to_owned());
    }
}

/// Kills a child of the agent on request, and publishes its exit.
pub async fn follow_child(mut child: Child, control: &SandboxControl) {
    let status = loop {
        tokio::select! {
            status = child.wait() => break status,
            () = control.kill_requested() => {
                let _ = child.start_kill();
            }
        }
    };
    let describe = |status: io::Result<ExitStatus>| match status {
        Ok(status) => status.to_string(),
        Err(error) => error.to_string(),
    };
    set_ended(control, describe(status));
}

fn set_ended(control: &SandboxControl, exit: String) {
    control.set_state(SandboxState::Ended(SandboxEnd::Exited(exit)));
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[tokio::test]
    async fn exit_of_the_process_is_noticed() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let mut handle = SandboxProcess::open(pid).unwrap().follow("u");
        assert_eq!(handle.id().unwrap().as_str(), format!("u/{pid}"));
        assert_eq!(pod_uid(&handle.id().unwrap()), Some("u"));
        assert_eq!(handle.state(), SandboxState::Running);
        handle.kill();
        assert!(matches!(handle.ended().await, SandboxEnd::Exited(_)));
        assert!(!child.wait().unwrap().success());
    }
}
