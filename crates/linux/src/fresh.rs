//! New processes in new namespaces, and entering those of others, without threads.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::process::Pid;
use rustix::thread::ThreadNameSpaceType;

use crate::cgroup::Group;

/// Of linux/sched.h; too large for the type that the C library gives it.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Of linux/nsfs.h.
const NS_GET_PARENT: libc::c_ulong = 0xb702;

/// Which namespaces a new process gets for itself; it shares the others with its parent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fresh {
    /// Mounts.
    pub mount: bool,
    /// Processes: the new one is the first.
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
    /// The caller, with the child's id and a descriptor of it.
    Parent(Pid, OwnedFd),
    /// The new process.
    Child,
}

/// Forks the calling process, which must have a single thread, into namespaces of its own.
pub fn fork_into(fresh: Fresh) -> io::Result<Forked> {
    one_thread()?;
    fork_raw(fresh.flags())
}

/// The same, and the new process is born into a control group.
///
/// Moving a process that runs makes the kernel wait for all others on the machine, being born there costs nothing.
pub fn fork_into_group(fresh: Fresh, group: &Group) -> io::Result<Forked> {
    one_thread()?;
    let dir = group.open()?;
    let mut pidfd: libc::c_int = -1;
    // SAFETY: every field of this structure is a number, for which zero is a value, and means that the thing isn't wanted.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = fresh.flags() as u64 | libc::CLONE_PIDFD as u64 | CLONE_INTO_CGROUP;
    args.pidfd = (&raw mut pidfd) as u64;
    args.exit_signal = libc::SIGCHLD as u64;
    args.cgroup = dir.as_raw_fd() as u64;
    // SAFETY: without CLONE_VM and with no stack this is a fork of a process with one thread (checked above). The kernel reads
    // `args`, whose size is told, and writes one descriptor into `pidfd`; both outlive the call.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of_val(&args)) };
    match forked(pid, &pidfd) {
        Err(error) if is_not_known(&error) => fork_from_group(fresh, group),
        forked => forked,
    }
}

/// On a kernel before 5.7, or under a filter that doesn't know the call: we are in the group ourselves for a moment.
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

/// Forks a child whose parent is *our* parent, so that it is told of the child's end and not we. For a process that entered
/// the namespaces of another on behalf of its parent.
pub fn fork_for_parent() -> io::Result<Forked> {
    one_thread()?;
    fork_raw(libc::CLONE_PARENT)
}

fn one_thread() -> io::Result<()> {
    let threads = std::fs::read_dir("/proc/self/task").map(Iterator::count);
    match threads {
        // A process of a new pid namespace sees itself in the host's /proc no more, and was forked single.
        Ok(1) | Err(_) => Ok(()),
        Ok(threads) => Err(io::Error::other(format!(
            "refusing to fork a process that has {threads} threads"
        ))),
    }
}

fn fork_raw(flags: libc::c_int) -> io::Result<Forked> {
    let mut pidfd: libc::c_int = -1;
    // CLONE_PARENT takes the parent's signal, and the kernel refuses another.
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

/// What a call of the clone family returned; `pidfd` is where it was told to put the child's descriptor.
fn forked(pid: libc::c_long, pidfd: &libc::c_int) -> io::Result<Forked> {
    match i32::try_from(pid) {
        Ok(0) => Ok(Forked::Child),
        Ok(pid) if pid > 0 => {
            // SAFETY: the kernel has just made this descriptor for us.
            let pidfd = unsafe { OwnedFd::from_raw_fd(*pidfd) };
            let pid = Pid::from_raw(pid).ok_or_else(|| io::Error::other("clone gave no id"))?;
            Ok(Forked::Parent(pid, pidfd))
        }
        _ => Err(io::Error::last_os_error()),
    }
}

/// Opens a namespace of a process by its name below `/proc/PID/ns`. The namespace lasts as long as the descriptor.
pub fn namespace_of(process: i32, name: &str) -> io::Result<OwnedFd> {
    Ok(File::open(format!("/proc/{process}/ns/{name}"))?.into())
}

/// The parent of a user or process namespace. It can't be seen from within the namespace.
pub fn parent_namespace(namespace: impl AsFd) -> io::Result<OwnedFd> {
    let namespace = namespace.as_fd().as_raw_fd();
    // SAFETY: the request takes no argument, and the descriptor is open during the call.
    match unsafe { libc::ioctl(namespace, NS_GET_PARENT) } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: the kernel has just made this descriptor for us.
        parent => Ok(unsafe { OwnedFd::from_raw_fd(parent) }),
    }
}

/// Enters a namespace that was opened. For a user namespace the caller must have a single thread, and becomes its root.
pub fn join_namespace(namespace: impl AsFd) -> io::Result<()> {
    rustix::thread::move_into_link_name_space(namespace.as_fd(), None)?;
    Ok(())
}

/// Does `work` in a network namespace, on a thread of its own: the calling thread stays where it is.
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

/// Enters the namespaces of a container: its mounts and, if `processes`, for the next child its processes; its user namespace
/// too if that is another than ours.
///
/// Leave `processes` out for a container in our own process namespace: the kernel lets only those join one who have rights over
/// it, and over the host's nobody of us has.
pub fn join_container(process: impl AsFd, processes: bool) -> io::Result<()> {
    let mut types = ThreadNameSpaceType::MOUNT | ThreadNameSpaceType::CONTROL_GROUP;
    types.set(ThreadNameSpaceType::PROCESS_ID, processes);
    let own_user = types | ThreadNameSpaceType::USER;
    // The kernel refuses to enter the user namespace that one is in.
    rustix::thread::move_into_thread_name_spaces(process.as_fd(), own_user)
        .or_else(|_| rustix::thread::move_into_thread_name_spaces(process.as_fd(), types))?;
    Ok(())
}

/// Has the next child born into the process namespace of another process.
pub fn join_processes(process: impl AsFd) -> io::Result<()> {
    rustix::thread::move_into_thread_name_spaces(process.as_fd(), ThreadNameSpaceType::PROCESS_ID)?;
    Ok(())
}
