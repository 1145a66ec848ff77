//! Forks a single-threaded process into new namespaces or into a cgroup (`clone`, `clone3`).

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use rustix::process::Pid;

use crate::cgroup::Cgroup;

/// From linux/sched.h; too large for the type that libc uses.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// The new namespaces of a forked process. It shares the others with its parent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NewNamespaces {
    /// Mounts.
    pub mount: bool,
    /// Process ids: the new process is pid 1.
    pub pid: bool,
    /// Network.
    pub net: bool,
    /// System V and POSIX message queues, shared memory.
    pub ipc: bool,
    /// Host name.
    pub uts: bool,
}

impl NewNamespaces {
    fn flags(self) -> libc::c_int {
        [
            (self.mount, libc::CLONE_NEWNS),
            (self.pid, libc::CLONE_NEWPID),
            (self.net, libc::CLONE_NEWNET),
            (self.ipc, libc::CLONE_NEWIPC),
            (self.uts, libc::CLONE_NEWUTS),
        ]
        .into_iter()
        .filter_map(|(wanted, flag)| wanted.then_some(flag))
        .sum()
    }
}

/// The process in which a clone call returned.
#[derive(Debug)]
pub enum CloneResult {
    /// The caller, with the child's pid and a pidfd.
    Parent(Pid, OwnedFd),
    /// The new process.
    Child,
}

/// Forks the calling process, which must have a single thread, into new namespaces.
pub fn fork_into(namespaces: NewNamespaces) -> io::Result<CloneResult> {
    require_single_thread()?;
    clone(namespaces.flags())
}

/// Like [`fork_into`], but the child starts in a cgroup.
///
/// Moving a running process to a cgroup takes a machine-wide lock in the kernel; starting the child there costs nothing.
pub fn fork_into_cgroup(namespaces: NewNamespaces, cgroup: &Cgroup) -> io::Result<CloneResult> {
    require_single_thread()?;
    let dir = cgroup.open()?;
    let mut pidfd: libc::c_int = -1;
    // SAFETY: every field of this structure is an integer, for which zero is valid and means that the option is unused.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = namespaces.flags() as u64 | libc::CLONE_PIDFD as u64 | CLONE_INTO_CGROUP;
    args.pidfd = (&raw mut pidfd) as u64;
    args.exit_signal = libc::SIGCHLD as u64;
    args.cgroup = dir.as_raw_fd() as u64;
    // SAFETY: without CLONE_VM and without a stack this is a fork of a process with one thread (checked above). The kernel reads
    // `args`, whose size it is given, and writes one descriptor into `pidfd`; both outlive the call.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of_val(&args)) };
    match clone_result(pid, &pidfd) {
        Err(error) if is_unsupported(&error) => fork_from_cgroup(namespaces, cgroup),
        result => result,
    }
}

/// Fallback for kernels before 5.7, and for seccomp filters that reject clone3: the parent enters the cgroup, forks, and returns.
fn fork_from_cgroup(namespaces: NewNamespaces, cgroup: &Cgroup) -> io::Result<CloneResult> {
    let own = Cgroup::own()
        .ok_or_else(|| io::Error::other("the cgroup of this process is not visible"))?;
    cgroup.enter()?;
    let result = clone(namespaces.flags());
    if !matches!(result, Ok(CloneResult::Child)) {
        own.enter()?;
    }
    result
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOSYS | libc::EINVAL | libc::E2BIG)
    )
}

/// Forks a child whose parent is *our* parent (CLONE_PARENT), which reaps it. For a process that has joined namespaces of another
/// process on behalf of its parent.
pub fn fork_sibling() -> io::Result<CloneResult> {
    require_single_thread()?;
    clone(libc::CLONE_PARENT)
}

fn require_single_thread() -> io::Result<()> {
    let threads = std::fs::read_dir("/proc/self/task").map(Iterator::count);
    match threads {
        // A process in a new pid namespace is not in the host's /proc; it was forked with a single thread.
        Ok(1) | Err(_) => Ok(()),
        Ok(threads) => Err(io::Error::other(format!(
            "refusing to fork a process that has {threads} threads"
        ))),
    }
}

fn clone(flags: libc::c_int) -> io::Result<CloneResult> {
    let mut pidfd: libc::c_int = -1;
    // With CLONE_PARENT the child has the exit signal of its parent, and the kernel rejects another one.
    let signal = if flags & libc::CLONE_PARENT == 0 {
        libc::SIGCHLD
    } else {
        0
    };
    let flags = (flags | libc::CLONE_PIDFD | signal) as libc::c_ulong;
    // SAFETY: without CLONE_VM and with no stack this is a fork: the child gets a copy of this process, which has one thread
    // (checked by the callers), so that no lock is held by a thread that the child lacks. The kernel writes one descriptor
    // into `pidfd`, which outlives the call.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, &raw mut pidfd, 0, 0) };
    clone_result(pid, &pidfd)
}

/// Interprets the return value of clone or clone3; the kernel has written the child's pidfd to `pidfd`.
fn clone_result(pid: libc::c_long, pidfd: &libc::c_int) -> io::Result<CloneResult> {
    match i32::try_from(pid) {
        Ok(0) => Ok(CloneResult::Child),
        Ok(pid) if pid > 0 => {
            // SAFETY: the kernel has just created this descriptor for us.
            let pidfd = unsafe { OwnedFd::from_raw_fd(*pidfd) };
            let pid = Pid::from_raw(pid)
                .ok_or_else(|| io::Error::other("clone returned an invalid pid"))?;
            Ok(CloneResult::Parent(pid, pidfd))
        }
        _ => Err(io::Error::last_os_error()),
    }
}
