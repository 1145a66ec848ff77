//! For tests of what only a process with a single thread may do.

use std::io;

use rustix::process::{Pid, WaitOptions};

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
