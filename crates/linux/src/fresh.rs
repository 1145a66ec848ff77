//! Forking processes into new namespaces, and joining existing namespaces, from single-threaded processes.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::process::Pid;
use rustix::thread::{LinkNameSpaceType, ThreadNameSpaceType};

use crate::cgroup::Group;

/// From linux/sched.h; too large for the type that libc uses.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// From linux/nsfs.h.
const NS_GET_PARENT: libc::c_ulong = 0xb702;

/// Which new namespaces a forked process gets; it shares the others with its parent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fresh {
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

impl Fresh {
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

/// Which side of a fork this is.
#[derive(Debug)]
pub enum Forked {
    /// The caller, with the child's pid and a pidfd.
    Parent(Pid, OwnedFd),
    /// The new process.
    Child,
}

/// Forks the calling process, which must have a single thread, into the new namespaces of `fresh`.
pub fn fork_into(fresh: Fresh) -> io::Result<Forked> {
    one_thread()?;
    fork_raw(fresh.flags())
}

/// Like [`fork_into`], but the child starts in a cgroup.
///
/// Moving a running process to a cgroup takes a machine-wide lock in the kernel; starting the child there costs nothing.
pub fn fork_into_group(fresh: Fresh, group: &Group) -> io::Result<Forked> {
    one_thread()?;
    let dir = group.open()?;
    let mut pidfd: libc::c_int = -1;
    // SAFETY: every field of this structure is an integer, for which zero is valid and means that the option is unused.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = fresh.flags() as u64 | libc::CLONE_PIDFD as u64 | CLONE_INTO_CGROUP;
    args.pidfd = (&raw mut pidfd) as u64;
    args.exit_signal = libc::SIGCHLD as u64;
    args.cgroup = dir.as_raw_fd() as u64;
    // SAFETY: without CLONE_VM and without a stack this is a fork of a process with one thread (checked above). The kernel reads
    // `args`, whose size it is given, and writes one descriptor into `pidfd`; both outlive the call.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of_val(&args)) };
    match forked(pid, &pidfd) {
        Err(error) if is_not_known(&error) => fork_from_group(fresh, group),
        forked => forked,
    }
}

/// Fallback for kernels before 5.7, and for seccomp filters that reject clone3: the parent enters the cgroup, forks, and returns.
fn fork_from_group(fresh: Fresh, group: &Group) -> io::Result<Forked> {
    let home = Group::own().ok_or_else(|| io::Error::other("no control group is ours"))?;
    group.enter()?;
    let forked = fork_raw(fresh.flags());
    if !matches!(forked, Ok(Forked::Child)) {
        home.enter()?;
    }
    forked
}

fn is_not_known(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOSYS | libc::EINVAL | libc::E2BIG)
    )
}

/// Forks a child whose parent is *our* parent, so that our parent reaps it. For a process that has joined namespaces of another
/// process on behalf of its parent.
pub fn fork_for_parent() -> io::Result<Forked> {
    one_thread()?;
    fork_raw(libc::CLONE_PARENT)
}

fn one_thread() -> io::Result<()> {
    let threads = std::fs::read_dir("/proc/self/task").map(Iterator::count);
    match threads {
        // A process in a new pid namespace is not in the host's /proc; it was forked with a single thread.
        Ok(1) | Err(_) => Ok(()),
        Ok(threads) => Err(io::Error::other(format!(
            "refusing to fork a process that has {threads} threads"
        ))),
    }
}

fn fork_raw(flags: libc::c_int) -> io::Result<Forked> {
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
    forked(pid, &pidfd)
}

/// Interprets the return value of clone or clone3; the kernel has written the child's pidfd to `pidfd`.
fn forked(pid: libc::c_long, pidfd: &libc::c_int) -> io::Result<Forked> {
    match i32::try_from(pid) {
        Ok(0) => Ok(Forked::Child),
        Ok(pid) if pid > 0 => {
            // SAFETY: the kernel has just created this descriptor for us.
            let pidfd = unsafe { OwnedFd::from_raw_fd(*pidfd) };
            let pid = Pid::from_raw(pid).ok_or_else(|| io::Error::other("clone gave no id"))?;
            Ok(Forked::Parent(pid, pidfd))
        }
        _ => Err(io::Error::last_os_error()),
    }
}

/// Enters a user namespace as its root.
pub fn join_user(namespace: impl AsFd) -> io::Result<()> {
    let kind = Some(LinkNameSpaceType::User);
    rustix::thread::move_into_link_name_space(namespace.as_fd(), kind)?;
    Ok(())
}

/// Opens a namespace of a process by its name in `/proc/PID/ns`. The descriptor keeps the namespace alive.
pub fn namespace_of(process: i32, name: &str) -> io::Result<OwnedFd> {
    Ok(File::open(format!("/proc/{process}/ns/{name}"))?.into())
}

/// The parent of a user or pid namespace. The kernel does not permit the query from within the namespace.
pub fn parent_namespace(namespace: impl AsFd) -> io::Result<OwnedFd> {
    let namespace = namespace.as_fd().as_raw_fd();
    // SAFETY: the request takes no argument, and the descriptor is open during the call.
    match unsafe { libc::ioctl(namespace, NS_GET_PARENT) } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: the kernel has just created this descriptor for us.
        parent => Ok(unsafe { OwnedFd::from_raw_fd(parent) }),
    }
}

/// Enters an open namespace. For a user namespace the caller must have a single thread, and becomes its root.
pub fn join_namespace(namespace: impl AsFd) -> io::Result<()> {
    rustix::thread::move_into_link_name_space(namespace.as_fd(), None)?;
    Ok(())
}

/// Runs `work` in a network namespace on a new thread; the calling thread stays in its namespace.
pub fn in_network<T: Send + 'static>(
    network: OwnedFd,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let thread = std::thread::Builder::new().spawn(move || {
        join_namespace(network)?;
        work()
    })?;
    let died = |_| io::Error::other("the thread in the network namespace panicked");
    thread.join().map_err(died).flatten()
}

/// Enters the mount and cgroup namespaces of a container and, if it differs from ours, its user namespace. With `processes`, the
/// next child starts in the container's pid namespace.
///
/// Leave `processes` false for a container in our own pid namespace: joining a pid namespace needs CAP_SYS_ADMIN in its owning
/// user namespace, which we lack for the host's.
pub fn join_container(process: impl AsFd, processes: bool) -> io::Result<()> {
    let mut types = ThreadNameSpaceType::MOUNT | ThreadNameSpaceType::CONTROL_GROUP;
    types.set(ThreadNameSpaceType::PROCESS_ID, processes);
    let own_user = types | ThreadNameSpaceType::USER;
    // The kernel refuses to join the user namespace of the caller.
    rustix::thread::move_into_thread_name_spaces(process.as_fd(), own_user)
        .or_else(|_| rustix::thread::move_into_thread_name_spaces(process.as_fd(), types))?;
    Ok(())
}

/// Makes the next child start in the pid namespace of another process.
pub fn join_processes(process: impl AsFd) -> io::Result<()> {
    rustix::thread::move_into_thread_name_spaces(process.as_fd(), ThreadNameSpaceType::PROCESS_ID)?;
    Ok(())
}
