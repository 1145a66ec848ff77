//! Joining existing namespaces (`setns`).

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::thread::ThreadNameSpaceType;

/// Enters an open namespace. For a user namespace the caller must have a single thread, and becomes its root.
pub fn join_namespace(namespace: impl AsFd) -> io::Result<()> {
    rustix::thread::move_into_link_name_space(namespace.as_fd(), None)?;
    Ok(())
}

/// Runs `work` in a network namespace on a new thread; the calling thread stays in its namespace.
pub fn run_in_network_namespace<T: Send + 'static>(
    namespace: OwnedFd,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let thread = std::thread::Builder::new().spawn(move || {
        join_namespace(namespace)?;
        work()
    })?;
    let panicked = |_| io::Error::other("the thread in the network namespace panicked");
    thread.join().map_err(panicked).flatten()
}

/// Enters the mount and cgroup namespaces of a container and, if it differs from ours, its user namespace. With `pid_namespace`,
/// the next child starts in the container's pid namespace.
///
/// Leave `pid_namespace` false for a container in our own pid namespace: joining a pid namespace needs CAP_SYS_ADMIN in its owning
/// user namespace, which we lack for the host's.
pub fn join_container_namespaces(process: impl AsFd, pid_namespace: bool) -> io::Result<()> {
    let mut types = ThreadNameSpaceType::MOUNT | ThreadNameSpaceType::CONTROL_GROUP;
    types.set(ThreadNameSpaceType::PROCESS_ID, pid_namespace);
    let with_user = types | ThreadNameSpaceType::USER;
    // The kernel refuses to join the user namespace of the caller.
    rustix::thread::move_into_thread_name_spaces(process.as_fd(), with_user)
        .or_else(|_| rustix::thread::move_into_thread_name_spaces(process.as_fd(), types))?;
    Ok(())
}

/// Makes the next child start in the pid namespace of another process.
pub fn join_pid_namespace(process: impl AsFd) -> io::Result<()> {
    rustix::thread::move_into_thread_name_spaces(process.as_fd(), ThreadNameSpaceType::PROCESS_ID)?;
    Ok(())
}
