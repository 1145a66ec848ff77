//! Probe for seccomp user notification, by which one process answers the system calls of another.

use std::os::fd::{FromRawFd, OwnedFd};

use super::{ProbeReport, failed};

/// Checks that the kernel supports the feature, then installs a filter that allows all calls and returns a listener. A chain of
/// filters may have only one listener, so this correctly fails inside a container that already has one.
pub(super) fn notification(_: Option<&str>) -> ProbeReport {
    let action: u32 = libc::SECCOMP_RET_USER_NOTIF;
    // SAFETY: the kernel reads one u32, which outlives the call.
    let known = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_GET_ACTION_AVAIL,
            0,
            &raw const action,
        )
    };
    if known != 0 {
        return Err(failed("seccomp notification")(
            std::io::Error::last_os_error(),
        ));
    }
    // SAFETY: seccomp_notif_sizes is plain numbers, for which zero is valid.
    let mut sizes: libc::seccomp_notif_sizes = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one seccomp_notif_sizes, which outlives the call.
    let sized = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_GET_NOTIF_SIZES,
            0,
            &raw mut sizes,
        )
    };
    if sized != 0 {
        return Err(failed("SECCOMP_GET_NOTIF_SIZES")(
            std::io::Error::last_os_error(),
        ));
    }
    listen()?;
    Ok("a filter with a listener was installed".to_owned())
}

fn listen() -> Result<OwnedFd, String> {
    // SAFETY: a system call without pointers.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return Err(failed("PR_SET_NO_NEW_PRIVS")(
            std::io::Error::last_os_error(),
        ));
    }
    let mut allow_all = [libc::sock_filter {
        code: (libc::BPF_RET | libc::BPF_K) as u16,
        jt: 0,
        jf: 0,
        k: libc::SECCOMP_RET_ALLOW,
    }];
    let program = libc::sock_fprog {
        len: 1,
        filter: allow_all.as_mut_ptr(),
    };
    // SAFETY: the program points to one instruction; both outlive the call, and the kernel copies them.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const program,
        )
    };
    match i32::try_from(fd) {
        // SAFETY: the kernel has just created the descriptor, and nothing else owns it.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(failed("installing a listener")(
            std::io::Error::last_os_error(),
        )),
    }
}
