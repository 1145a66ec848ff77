//! Helpers for tests that need a single-threaded process.

use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{CWD, RenameFlags};
use rustix::mount::MountFlags;
use rustix::process::{DumpableBehavior, Pid, WaitOptions};
use rustix::thread::{CapabilitySet, UnshareFlags};

use crate::process::ForkResult;

/// An unprivileged user id, which need not exist in the passwd database.
const UNPRIVILEGED_USER: u32 = 54_322;

/// Runs `work` in a forked child and returns its result.
pub fn in_a_child(work: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child has one thread. It calls the kernel and the allocator, which is prepared for a fork, and exits without
    // unwinding into frames of its parent.
    match unsafe { libc::fork() } {
        -1 => panic!("{}", io::Error::last_os_error()),
        0 => {
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            // SAFETY: this only ends the process.
            unsafe { libc::_exit(i32::from(!done.unwrap_or(false))) }
        }
        pid => {
            let status = rustix::process::waitpid(Pid::from_raw(pid), WaitOptions::empty());
            status.unwrap().unwrap().1.exit_status() == Some(0)
        }
    }
}

/// Like [`in_a_child`], but the child is root and pid 1 in new namespaces, and its `/proc` does not show non-dumpable processes.
pub fn in_a_child_with_hidepid(work: impl FnOnce() -> bool) -> bool {
    in_a_child(|| {
        if rustix::process::getuid().is_root() {
            // Members of group 0 see all processes despite hidepid.
            crate::credentials::become_user(UNPRIVILEGED_USER, UNPRIVILEGED_USER, &[]).unwrap();
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

/// Swaps two paths again and again, as a container may do, until `done` is set.
pub fn swap_until(done: &AtomicBool, one: &Path, other: &Path) {
    while !done.load(Ordering::Relaxed) {
        let _ = rustix::fs::renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE);
    }
}

/// Forks a non-dumpable child that runs `work` and then waits to be killed. Returns its pid after `work` is done. The caller must
/// have a single thread.
pub fn hidden_child(work: impl FnOnce()) -> i32 {
    let (mut ready_rx, mut ready_tx) = io::pipe().unwrap();
    match crate::process::fork().unwrap() {
        ForkResult::Parent(child) => {
            drop(ready_tx);
            ready_rx.read_exact(&mut [0]).unwrap();
            child.as_raw_nonzero().get()
        }
        ForkResult::Child => {
            crate::credentials::set_non_dumpable().unwrap();
            work();
            ready_tx.write_all(b".").unwrap();
            loop {
                std::thread::park();
            }
        }
    }
}
