//! How many descriptors a process may have, and which it takes along into another program.
//!
//! The limit that jobs come with is often a small one, for programs that use `select`. Ours carry the streams and connections of
//! others, and take all that they may have. What they start for others shall not see that: hence [`put_limit_back`].

use std::io;
use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// What the limit was before it was raised. A process that is forked knows it too.
static USUAL: OnceLock<u64> = OnceLock::new();

/// Raises the limit to what is allowed. `usual` is what [`put_limit_back`] brings back; without it, the limit of now. Returns it,
/// for those whom we start and who find the limit raised.
pub fn raise_limit(usual: Option<u64>) -> io::Result<u64> {
    let now = getrlimit(Resource::Nofile);
    let usual = *USUAL.get_or_init(|| usual.or(now.current).unwrap_or(u64::MAX));
    let raised = Rlimit {
        current: now.maximum,
        ..now
    };
    setrlimit(Resource::Nofile, raised)?;
    Ok(usual)
}

/// Brings the limit back, for a process that is about to become another program.
pub fn put_limit_back() -> io::Result<()> {
    let Some(&usual) = USUAL.get() else {
        return Ok(());
    };
    let now = getrlimit(Resource::Nofile);
    let usual = Rlimit {
        current: Some(now.maximum.map_or(usual, |most| usual.min(most))),
        ..now
    };
    setrlimit(Resource::Nofile, usual)?;
    Ok(())
}

/// Has all descriptors but the standard streams closed when this process becomes another program. All of ours are made so; this
/// is for one that was forgotten, or inherited from whoever started us. Kernels before 5.11 can't.
pub fn close_all_on_exec() -> io::Result<()> {
    // SAFETY: the call is given three numbers, and only marks descriptors, which stay open.
    let done = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            3 as libc::c_uint,
            libc::c_uint::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_program_inherits_a_forgotten_descriptor() {
        use std::os::fd::AsRawFd;
        use std::os::unix::process::CommandExt;
        let has = |number: i32, close: bool| {
            let mut command = std::process::Command::new("test");
            command.args(["-e", &format!("/proc/self/fd/{number}")]);
            let mark = move || if close { close_all_on_exec() } else { Ok(()) };
            // SAFETY: between fork and exec the closure makes one system call.
            unsafe { command.pre_exec(mark) };
            command.status().unwrap().success()
        };
        let file = std::fs::File::open("/").unwrap();
        rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty()).unwrap();
        assert!(has(file.as_raw_fd(), false));
        assert!(!has(file.as_raw_fd(), true));
    }

    /// The limit is the whole process's; each test is a process of its own.
    #[test]
    fn what_was_raised_is_put_back() {
        let soft = || getrlimit(Resource::Nofile).current;
        let hard = getrlimit(Resource::Nofile).maximum;
        put_limit_back().unwrap();
        let low = Rlimit {
            current: Some(100),
            maximum: hard,
        };
        setrlimit(Resource::Nofile, low).unwrap();
        assert_eq!(raise_limit(None).unwrap(), 100);
        assert_eq!(soft(), hard);
        assert_eq!(raise_limit(None).unwrap(), 100);
        put_limit_back().unwrap();
        assert_eq!(soft(), Some(100));
    }

    #[test]
    fn whoever_raised_it_before_says_what_it_was() {
        assert_eq!(raise_limit(Some(200)).unwrap(), 200);
        put_limit_back().unwrap();
        assert_eq!(getrlimit(Resource::Nofile).current, Some(200));
    }
}
