//! The limit on the number of a user's processes (RLIMIT_NPROC), which counts threads.
//!
//! The kernel compares RLIMIT_NPROC with the number of threads that the user has on the whole machine. Since Linux 5.14 a user
//! namespace also keeps the limit of the process that created it: a fork inside fails if the user's threads, inside and outside,
//! exceed that limit, whatever limit the forking process has. So a lower limit for the namespace reserves threads for processes
//! outside of it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::file_id::FileId;

/// The limit for the programs of containers. Forked processes inherit this value.
static PROGRAM_LIMIT: OnceLock<u64> = OnceLock::new();

/// The limit of this process; `None` if unlimited.
pub fn current() -> Option<u64> {
    getrlimit(Resource::Nproc).current
}

/// Lowers the soft and hard limits of this process to at most `limit`.
pub fn lower(limit: u64) -> io::Result<()> {
    let now = getrlimit(Resource::Nproc);
    let least = |old: Option<u64>| Some(old.map_or(limit, |old| old.min(limit)));
    let lowered = Rlimit {
        current: least(now.current),
        maximum: least(now.maximum),
    };
    setrlimit(Resource::Nproc, lowered)?;
    Ok(())
}

/// Sets the limit that [`lower_for_program`] applies, in this process and in processes that it forks.
pub fn set_for_programs(limit: u64) {
    let _ = PROGRAM_LIMIT.set(limit);
}

/// Applies the limit of [`set_for_programs`]. Call it before exec.
pub fn lower_for_program() -> io::Result<()> {
    PROGRAM_LIMIT.get().map_or(Ok(()), |limit| lower(*limit))
}

/// How many threads of this user are in neither the user namespace `inside` nor its descendants.
/// [Non-dumpable](crate::credentials::set_non_dumpable) processes count as outside. They do not count at all if `/proc` does
/// not show them (`hidepid`).
pub fn threads_outside(inside: impl AsFd) -> io::Result<u64> {
    let inside = FileId::of(&inside)?;
    let user = rustix::process::getuid().as_raw();
    let threads = |process: i32| {
        let status = std::fs::read(format!("/proc/{process}/status")).ok()?;
        let threads = threads_of(&String::from_utf8_lossy(&status), user)?;
        (!is_within(process, inside)).then_some(threads)
    };
    Ok(crate::process::visible_pids()?.filter_map(threads).sum())
}

/// The number of threads in the text of `/proc/PID/status`, if the process belongs to this user.
fn threads_of(status: &str, user: u32) -> Option<u64> {
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    (field("Uid:")? == u64::from(user)).then_some(())?;
    field("Threads:")
}

/// Whether the user namespace of a process is `ancestor` or a descendant of it; false if it is not accessible.
fn is_within(process: i32, ancestor: FileId) -> bool {
    let mut namespace = File::open(format!("/proc/{process}/ns/user"))
        .ok()
        .map(OwnedFd::from);
    while let Some(current) = namespace {
        if FileId::of(&current).is_ok_and(|found| found == ancestor) {
            return true;
        }
        namespace = crate::namespace::parent_namespace(&current).ok();
    }
    false
}

#[cfg(test)]
mod tests {
    use rustix::thread::UnshareFlags;

    use super::*;
    use crate::testing::in_a_child;

    #[test]
    fn threads_of_other_users_are_not_counted() {
        let status = "Name:\tx\nUid:\t7\t8\t9\t9\nThreads:\t12\n";
        assert_eq!(threads_of(status, 7), Some(12));
        assert_eq!(threads_of(status, 8), None);
        assert_eq!(threads_of("", 7), None);
    }

    #[test]
    fn nested_namespaces_count_as_inside() {
        assert!(in_a_child(|| {
            let (parent_socket, child_socket) = crate::packet::pair().unwrap();
            let wait = |socket: &OwnedFd| crate::packet::receive(socket).unwrap().is_some();
            let notify = |socket: &OwnedFd| crate::packet::send(socket, 0, b".", &[]).unwrap();
            let child = match crate::process::fork().unwrap() {
                crate::process::ForkResult::Parent(child) => child.as_raw_nonzero().get(),
                crate::process::ForkResult::Child => {
                    drop(parent_socket);
                    crate::namespace::enter_as_root(UnshareFlags::empty()).unwrap();
                    notify(&child_socket);
                    wait(&child_socket);
                    crate::namespace::enter_as_user(5, 5).unwrap();
                    notify(&child_socket);
                    wait(&child_socket);
                    std::process::exit(0)
                }
            };
            drop(child_socket);
            wait(&parent_socket);
            let middle = crate::namespace::open_namespace(child, "user").unwrap();
            notify(&parent_socket);
            wait(&parent_socket);
            let within = |namespace: &OwnedFd| is_within(child, FileId::of(namespace).unwrap());
            let own = |name: &str| crate::namespace::open_namespace(child, name).unwrap();
            let ours: OwnedFd = File::open("/proc/self/ns/user").unwrap().into();
            let as_expected = FileId::of(&middle).unwrap() != FileId::of(own("user")).unwrap()
                && [&middle, &own("user"), &ours].into_iter().all(within)
                && !within(&own("net"));
            drop(parent_socket);
            rustix::process::wait(rustix::process::WaitOptions::empty()).unwrap();
            as_expected
        }));
    }

    /// The limit does not apply to root, so the test becomes another user first.
    #[test]
    fn namespace_keeps_the_limit_of_its_creator() {
        const USER: u32 = 54_321;
        assert!(in_a_child(|| {
            if rustix::process::getuid().is_root() {
                crate::credentials::become_user(USER, USER, &[]).unwrap();
                crate::credentials::limit_capabilities(
                    rustix::thread::CapabilitySet::empty(),
                    false,
                )
                .unwrap();
            }
            let user = rustix::process::getuid();
            let used = crate::process::visible_pids()
                .unwrap()
                .filter_map(|process| {
                    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
                    threads_of(&status, user.as_raw())
                });
            let used: u64 = used.sum();
            let before = getrlimit(Resource::Nproc);
            let lowered = Rlimit {
                current: Some(used),
                ..before
            };
            setrlimit(Resource::Nproc, lowered).unwrap();
            crate::namespace::unshare(UnshareFlags::NEWUSER).unwrap();
            // Raise the limit of the process again; the namespace keeps the lower one.
            setrlimit(Resource::Nproc, before).unwrap();
            match crate::process::fork() {
                Ok(crate::process::ForkResult::Child) => std::process::exit(0),
                Ok(crate::process::ForkResult::Parent(_)) => false,
                Err(error) => error.raw_os_error() == Some(libc::EAGAIN),
            }
        }));
    }
}
