//! Results of system calls that `libc` declares.

use std::io;

/// The result of a call that returns 0, or sets `errno`.
pub(crate) fn check(returned: impl Into<libc::c_long>) -> io::Result<()> {
    match returned.into() {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
