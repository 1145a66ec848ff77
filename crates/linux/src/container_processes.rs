//! The processes of a container: those in its mount namespace, and their descendants.
//!
//! A process can leave its parent, its session and its process group. It can leave its mount namespace only for a new one; it is
//! then still a descendant of a process in the old namespace, until that process has exited too.

use std::io;
use std::os::fd::OwnedFd;

use crate::file_id::FileId;
use crate::process::kill_if;
use crate::usage::{ProcessSample, ProcessTable};

/// The processes in one mount namespace, and their descendants.
#[derive(Debug)]
pub struct ContainerProcesses {
    /// While the descriptor is open, the kernel does not reuse the inode number of the namespace.
    _namespace: OwnedFd,
    id: FileId,
}

impl ContainerProcesses {
    /// The processes in the given mount namespace, and their descendants.
    pub fn in_mount_namespace(namespace: OwnedFd) -> io::Result<Self> {
        Ok(Self {
            id: FileId::of(&namespace)?,
            _namespace: namespace,
        })
    }

    /// Kills all current processes and returns how many there were. Repeat the call to catch processes that were being forked.
    pub fn kill(&self) -> io::Result<usize> {
        let table = ProcessTable::read()?;
        let members = table.pids().filter(|pid| self.is_in_namespace(*pid));
        let all = table.subtree(members.collect::<Vec<_>>());
        let started = |pid: i32| table.get(pid).map(|sample| sample.started);
        // The pid may have been reused.
        let is_same =
            |pid: i32| ProcessSample::of(pid).map(|sample| sample.started) == started(pid);
        let killed = all
            .into_iter()
            .filter(|pid| kill_if(*pid, || is_same(*pid)));
        Ok(killed.count())
    }

    fn is_in_namespace(&self, pid: i32) -> bool {
        // The link is unreadable for processes that have exited and for those of other users.
        rustix::fs::stat(format!("/proc/{pid}/ns/mnt"))
            .is_ok_and(|stat| FileId::from(&stat) == self.id)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;
    use crate::namespace::own_mount_namespace;
    use crate::testing::{hidden_child, in_a_child_with_hidepid};

    /// A shell in its own namespace starts three processes that outlive it: one in its session, one in a new session, and one that
    /// has moved to another mount namespace.
    #[test]
    fn kill_ends_detached_processes_of_the_container() {
        let script = "sleep 61.1 & setsid sleep 61.2 & unshare --mount sleep 61.3 & echo; read x";
        let mut shell = Command::new("unshare")
            .args(["--user", "--map-root-user", "--mount", "sh", "-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut begun = [0];
        let read = shell.stdout.as_mut().unwrap().read_exact(&mut begun);
        read.unwrap();
        let namespace = std::fs::File::open(format!("/proc/{}/ns/mnt", shell.id())).unwrap();
        let processes = ContainerProcesses::in_mount_namespace(namespace.into()).unwrap();
        let child_count = |pid: u32| {
            let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
            text.unwrap_or_default().split_whitespace().count()
        };
        let end = Instant::now() + Duration::from_secs(5);
        while child_count(shell.id()) < 3 && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(processes.kill().unwrap() >= 4);
        shell.wait().unwrap();
        while processes.kill().unwrap() > 0 {
            assert!(Instant::now() < end, "a process is left");
            std::thread::sleep(Duration::from_millis(2));
        }
        let survivors = Command::new("pgrep")
            .args(["-f", "sleep 61[.][123]"])
            .status();
        assert!(!survivors.unwrap().success());
    }

    #[test]
    fn kill_ends_container_of_invisible_process() {
        assert!(in_a_child_with_hidepid(|| {
            let hidden = hidden_child(|| {
                let mut container = Command::new("unshare");
                drop(container.args(["--mount", "sleep", "60"]).spawn().unwrap());
            });
            let own =
                ContainerProcesses::in_mount_namespace(own_mount_namespace().unwrap()).unwrap();
            let container_pid = || {
                let below = ProcessTable::read().unwrap().subtree([hidden]);
                below.into_iter().find(|pid| !own.is_in_namespace(*pid))
            };
            let end = Instant::now() + Duration::from_secs(5);
            while container_pid().is_none() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(2));
            }
            let container =
                crate::namespace::open_namespace(container_pid().unwrap(), "mnt").unwrap();
            ContainerProcesses::in_mount_namespace(container)
                .unwrap()
                .kill()
                .unwrap()
                == 1
        }));
    }

    #[test]
    fn kill_spares_processes_of_other_namespaces() {
        let mut outsider = Command::new("sleep").arg("60").spawn().unwrap();
        let mut other = Command::new("unshare")
            .args(["--user", "--map-root-user", "--mount", "sleep", "60"])
            .spawn()
            .unwrap();
        let mnt = format!("/proc/{}/ns/mnt", other.id());
        let own = std::fs::metadata("/proc/self/ns/mnt").unwrap();
        let end = Instant::now() + Duration::from_secs(5);
        let same = |path: &str| {
            use std::os::unix::fs::MetadataExt;
            std::fs::metadata(path).is_ok_and(|found| found.ino() == own.ino())
        };
        while same(&mnt) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(2));
        }
        let processes =
            ContainerProcesses::in_mount_namespace(std::fs::File::open(&mnt).unwrap().into())
                .unwrap();
        assert_eq!(processes.kill().unwrap(), 1);
        other.wait().unwrap();
        assert_eq!(outsider.try_wait().unwrap(), None);
        outsider.kill().unwrap();
        outsider.wait().unwrap();
    }
}
