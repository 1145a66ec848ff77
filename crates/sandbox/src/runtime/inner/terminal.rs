//! The terminal of a process with `tty: true`.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags};
use rustix::pty::OpenptFlags;

/// Opens a terminal in the container's devpts, makes it the controlling terminal and the standard streams of this process, and
/// returns the master side. This process must lead a session.
pub fn open() -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let master = rustix::fs::open("/dev/pts/ptmx", flags, Mode::empty())?;
    rustix::pty::unlockpt(&master)?;
    let slave = rustix::pty::ioctl_tiocgptpeer(
        &master,
        OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC,
    )?;
    rustix::process::ioctl_tiocsctty(&slave)?;
    rustix::stdio::dup2_stdin(&slave)?;
    rustix::stdio::dup2_stdout(&slave)?;
    rustix::stdio::dup2_stderr(&slave)?;
    Ok(master)
}
