//! How many processes a user may have, threads counted.
//!
//! The kernel compares RLIMIT_NPROC with the number of threads that a user has on the whole machine. Since Linux 5.14 a user
//! namespace also keeps the limit of the process that made it: a fork inside fails if all of that user's threads, inside and
//! outside, are more than that, whatever limit the forking process has. So a lower limit for the namespace reserves processes for
//! the outside.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::file_id::FileId;

/// What programs of others get. A process that is forked knows it too.
static OF_PROGRAMS: OnceLock<u64> = OnceLock::new();

/// The limit of this process; `None` if it has none.
pub fn current() -> Option<u64> {
    getrlimit(Resource::Nproc).current
}

/// Lowers the limit of this process for good. One that is lower already stays.
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

/// Chooses what [`lower_for_program`] sets, in this process and in those that it forks.
pub fn choose_for_programs(limit: u64) {
    let _ = OF_PROGRAMS.set(limit);
}

/// Lowers the limit as was chosen, for a process that is about to become another program.
pub fn lower_for_program() -> io::Result<()> {
    OF_PROGRAMS.get().map_or(Ok(()), |limit| lower(*limit))
}

/// How many threads of this user are neither in the user namespace `inside` nor in one below it.
pub fn threads_outside(inside: impl AsFd) -> io::Result<u64> {
    let inside = FileId::of(&inside)?;
    let user = rustix::process::getuid().as_raw();
    let threads = |process: i32| {
        let status = std::fs::read(format!("/proc/{process}/status")).ok()?;
        let threads = threads_of(&String::from_utf8_lossy(&status), user)?;
        (!is_within(process, inside)).then_some(threads)
    };
    Ok(crate::process::all()?.filter_map(threads).sum())
}

/// The number of threads in the text of `/proc/PID/status`, if it is a process of this user.
fn threads_of(status: &str, user: u32) -> Option<u64> {
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    (field("Uid:")? == u64::from(user)).then_some(())?;
    field("Threads:")
}

/// Whether the user namespace of a process is this one or below it; not if it can't be seen.
fn is_within(process: i32, ancestor: FileId) -> bool {
    let mut namespace = File::open(format!("/proc/{process}/ns/user"))
        .ok()
        .map(OwnedFd::from);
    while let Some(current) = namespace {
        if FileId::of(&current).is_ok_and(|found| found == ancestor) {
            return true;
        }
        namespace = crate::fresh::parent_namespace(&current).ok();
    }
    false
}

#[cfg(test)]
mod tests {
    use rustix::thread::UnshareFlags;

    use super::*;
    use crate::testing::in_a_child;

    #[test]
    fn threads_are_counted_for_their_user() {
        let status = "Name:\tx\nUid:\t7\t8\t9\t9\nThreads:\t12\n";
        assert_eq!(threads_of(status, 7), Some(12));
        assert_eq!(threads_of(status, 8), None);
        assert_eq!(threads_of("", 7), None);
    }

    #[test]
    fn namespaces_below_count_as_inside() {
        assert!(in_a_child(|| {
            let (here, there) = crate::packet::pair().unwrap();
            let said = |socket: &OwnedFd| crate::packet::receive(socket).unwrap().is_some();
            let say = |socket: &OwnedFd| crate::packet::send(socket, 0, b".", &[]).unwrap();
            let child = match crate::process::fork().unwrap() {
                crate::process::Fork::Parent(child) => child.as_raw_nonzero().get(),
                crate::process::Fork::Child => {
                    drop(here);
                    crate::namespace::enter_as_root(UnshareFlags::empty()).unwrap();
                    say(&there);
                    said(&there);
                    crate::namespace::rename_only_id(5, 5).unwrap();
                    say(&there);
                    said(&there);
                    std::process::exit(0)
                }
            };
            drop(there);
            said(&here);
            let middle = crate::fresh::namespace_of(child, "user").unwrap();
            say(&here);
            said(&here);
            let within = |namespace: &OwnedFd| is_within(child, FileId::of(namespace).unwrap());
            let own = |name: &str| crate::fresh::namespace_of(child, name).unwrap();
            let ours: OwnedFd = File::open("/proc/self/ns/user").unwrap().into();
            let right = FileId::of(&middle).unwrap() != FileId::of(own("user")).unwrap()
                && [&middle, &own("user"), &ours].into_iter().all(within)
                && !within(&own("net"));
            drop(here);
            rustix::process::wait(rustix::process::WaitOptions::empty()).unwrap();
            right
        }));
    }

    /// Root is never refused, so this becomes another user first.
    #[test]
    fn the_limit_of_a_namespaces_maker_bounds_all_in_it() {
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
            let used = crate::process::all().unwrap().filter_map(|process| {
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
            // Its own limit is what it was, that of the namespace is not.
            setrlimit(Resource::Nproc, before).unwrap();
            match crate::process::fork() {
                Ok(crate::process::Fork::Child) => std::process::exit(0),
                Ok(crate::process::Fork::Parent(_)) => false,
                Err(error) => error.raw_os_error() == Some(libc::EAGAIN),
            }
        }));
    }
}
