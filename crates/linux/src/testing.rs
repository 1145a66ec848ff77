//! For tests of what only a process with a single thread may do.

use std::io::{self, Read, Write};

use rustix::mount::MountFlags;
use rustix::process::{DumpableBehavior, Pid, WaitOptions};
use rustix::thread::{CapabilitySet, UnshareFlags};

use crate::process::Fork;

/// The id of an ordinary user, which need not exist on the machine.
const ORDINARY: u32 = 54_322;

/// Forks, and says what the child's work came to.
pub fn in_a_child(work: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child has one thread. It calls the kernel and the allocator, which is prepared for a fork, and ends without
    // unwinding into what is its parent's.
    match unsafe { libc::fork() } {
        -1 => panic!("{}", io::Error::last_os_error()),
        0 => {
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            // SAFETY: this ends the process, and nothing else.
            unsafe { libc::_exit(i32::from(!done.unwrap_or(false))) }
        }
        pid => {
            let ended = rustix::process::waitpid(Pid::from_raw(pid), WaitOptions::empty());
            ended.unwrap().unwrap().1.exit_status() == Some(0)
        }
    }
}

/// Like [`in_a_child`], but the child is root and the first process of namespaces of its own, and its `/proc` does not show
/// processes that hide.
pub fn in_a_child_with_hidepid(work: impl FnOnce() -> bool) -> bool {
    in_a_child(|| {
        if rustix::process::getuid().is_root() {
            // Members of root's group are shown everything.
            crate::credentials::become_user(ORDINARY, ORDINARY, &[]).unwrap();
            crate::credentials::limit_capabilities(CapabilitySet::empty(), false).unwrap();
            rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable).unwrap();
        }
        crate::namespace::enter_as_root(UnshareFlags::NEWNS | UnshareFlags::NEWPID).unwrap();
        in_a_child(|| {
            let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
            rustix::mount::mount("proc", "/proc", "proc", flags, Some(c"hidepid=2")).unwrap();
            work()
        })
    })
}

/// Forks a child that hides, does `work`, and waits until it is killed. Returns its number when it has done that. The caller must
/// have a single thread.
pub fn hidden_child(work: impl FnOnce()) -> i32 {
    let (mut told, mut tell) = io::pipe().unwrap();
    match crate::process::fork().unwrap() {
        Fork::Parent(child) => {
            drop(tell);
            told.read_exact(&mut [0]).unwrap();
            child.as_raw_nonzero().get()
        }
        Fork::Child => {
            crate::credentials::hide().unwrap();
            work();
            tell.write_all(b".").unwrap();
            loop {
                std::thread::park();
            }
        }
    }
}
