//! The limit on open file descriptors, and which of them survive an exec.
//!
//! Jobs often start with a low soft limit, because `select` supports only descriptors below 1024. Our processes serve many streams
//! and connections, so they raise it to the hard limit. Programs in containers get the original limit back ([`restore_limit`]).

use std::io;
use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The soft limit before it was raised. Forked processes inherit this value.
static ORIGINAL_SOFT_LIMIT: OnceLock<u64> = OnceLock::new();

/// Raises the soft limit to the hard limit. `original` is the limit for [`restore_limit`]; `None` means the current one. Returns
/// that limit: pass it to child processes, which inherit the raised limit and cannot read the original one.
pub fn raise_limit(original: Option<u64>) -> io::Result<u64> {
    let now = getrlimit(Resource::Nofile);
    let original =
        *ORIGINAL_SOFT_LIMIT.get_or_init(|| original.or(now.current).unwrap_or(u64::MAX));
    let raised = Rlimit {
        current: now.maximum,
        ..now
    };
    setrlimit(Resource::Nofile, raised)?;
    Ok(original)
}

/// Restores the limit. Call it before exec.
pub fn restore_limit() -> io::Result<()> {
    let Some(&original) = ORIGINAL_SOFT_LIMIT.get() else {
        return Ok(());
    };
    let now = getrlimit(Resource::Nofile);
    let original = Rlimit {
        current: Some(now.maximum.map_or(original, |most| original.min(most))),
        ..now
    };
    setrlimit(Resource::Nofile, original)?;
    Ok(())
}

/// Marks all descriptors except the standard streams close-on-exec. Our code opens descriptors with that flag; this call covers
/// omissions, and descriptors inherited from the parent process. Fails on kernels before 5.11.
pub fn close_all_on_exec() -> io::Result<()> {
    // SAFETY: the call takes three integers, and only sets a flag on descriptors, which stay open.
    let done = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            3 as libc::c_uint,
            libc::c_uint::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
    crate::syscall::check(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inherited_descriptors_are_closed_on_exec() {
        use std::os::fd::AsRawFd;
        use std::os::unix::process::CommandExt;
        let is_inherited = |number: i32, close: bool| {
            let mut command = std::process::Command::new("test");
            command.args(["-e", &format!("/proc/self/fd/{number}")]);
            let mark = move || if close { close_all_on_exec() } else { Ok(()) };
            // SAFETY: between fork and exec the closure makes one system call.
            unsafe { command.pre_exec(mark) };
            command.status().unwrap().success()
        };
        let file = std::fs::File::open("/").unwrap();
        rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty()).unwrap();
        assert!(is_inherited(file.as_raw_fd(), false));
        assert!(!is_inherited(file.as_raw_fd(), true));
    }

    /// The limit applies to the whole process, but nextest runs each test in its own process.
    #[test]
    fn raised_limit_is_restored() {
        let soft = || getrlimit(Resource::Nofile).current;
        let hard = getrlimit(Resource::Nofile).maximum;
        restore_limit().unwrap();
        let low = Rlimit {
            current: Some(100),
            maximum: hard,
        };
        setrlimit(Resource::Nofile, low).unwrap();
        assert_eq!(raise_limit(None).unwrap(), 100);
        assert_eq!(soft(), hard);
        assert_eq!(raise_limit(None).unwrap(), 100);
        restore_limit().unwrap();
        assert_eq!(soft(), Some(100));
    }

    #[test]
    fn given_limit_is_restored() {
        assert_eq!(raise_limit(Some(200)).unwrap(), 200);
        restore_limit().unwrap();
        assert_eq!(getrlimit(Resource::Nofile).current, Some(200));
    }
}
