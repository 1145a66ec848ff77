//! Signal handling for a process without threads or an event loop.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use rustix::process::Signal;

/// A received signal and its origin.
#[derive(Debug, Clone, Copy)]
pub struct ReceivedSignal {
    /// Which signal.
    pub signal: Signal,
    /// The kernel sent it (a key on the terminal, a child's exit), so our whole process group has received it.
    pub from_kernel: bool,
}

/// A set of blocked signals, which [`BlockedSignals::wait`] receives.
#[derive(Debug)]
pub struct BlockedSignals {
    set: libc::sigset_t,
    previous_mask: libc::sigset_t,
}

impl BlockedSignals {
    /// Blocks `signals` in the calling thread; forked processes inherit that.
    pub fn new(signals: &[Signal]) -> io::Result<Self> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        let mut previous_mask = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: `sigemptyset` initialises the set before it is used, `sigaddset` gets valid signal
        // numbers, and `pthread_sigmask` fills `previous_mask` when it succeeds.
        unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in signals {
                libc::sigaddset(set.as_mut_ptr(), signal.as_raw());
            }
            let error =
                libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), previous_mask.as_mut_ptr());
            if error != 0 {
                return Err(io::Error::from_raw_os_error(error));
            }
            Ok(Self {
                set: set.assume_init(),
                previous_mask: previous_mask.assume_init(),
            })
        }
    }

    /// Waits for the next of the signals, without a time-out.
    pub fn wait(&self) -> io::Result<ReceivedSignal> {
        loop {
            if let Some(received) = self.wait_timeout(Duration::from_secs(3600))? {
                return Ok(received);
            }
        }
    }

    /// Like [`BlockedSignals::wait`], with a time-out; `None` if it expires.
    pub fn wait_timeout(&self, timeout: Duration) -> io::Result<Option<ReceivedSignal>> {
        let timeout = libc::timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        loop {
            let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
            // SAFETY: all pointers are valid for the call; `info` is filled on success.
            let raw =
                unsafe { libc::sigtimedwait(&self.set, info.as_mut_ptr(), &raw const timeout) };
            if raw == -1 {
                let error = io::Error::last_os_error();
                match error.kind() {
                    io::ErrorKind::Interrupted => continue,
                    io::ErrorKind::WouldBlock => return Ok(None),
                    _ => return Err(error),
                }
            }
            // SAFETY: zeroed above and filled by the kernel.
            let code = unsafe { info.assume_init() }.si_code;
            let Some(signal) = Signal::from_named_raw(raw) else {
                continue;
            };
            return Ok(Some(ReceivedSignal {
                signal,
                from_kernel: code > 0,
            }));
        }
    }

    /// Restores the previous signal mask.
    pub fn restore_mask(self) -> io::Result<()> {
        // SAFETY: `previous_mask` was filled by `pthread_sigmask` in `new`.
        let error = unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.previous_mask, std::ptr::null_mut())
        };
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        Ok(())
    }
}

/// A descriptor that becomes readable when a child exits, for a process that polls other descriptors too. SIGCHLD stays blocked.
#[derive(Debug)]
pub struct ChildExitFd(OwnedFd);

impl ChildExitFd {
    /// Blocks SIGCHLD and opens a signalfd for it.
    pub fn open() -> io::Result<Self> {
        let blocked = BlockedSignals::new(&[Signal::CHILD])?;
        // SAFETY: the set was filled by `BlockedSignals::new`; the kernel copies it.
        let fd = unsafe {
            libc::signalfd(
                -1,
                &raw const blocked.set,
                libc::SFD_CLOEXEC | libc::SFD_NONBLOCK,
            )
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just created the descriptor, and nothing else owns it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Reads the pending signal, so that the descriptor becomes readable only at the next exit.
    pub fn clear(&self) {
        // Standard signals are not queued: at most one SIGCHLD is pending.
        let _ = rustix::io::read(&self.0, &mut [0u8; 1024]);
    }
}

impl AsFd for ChildExitFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The first and the last real-time signal for programs in containers. C libraries reserve a few lower ones, glibc and musl
/// different numbers of them.
const RTMIN: i32 = 34;
const RTMAX: i32 = 64;

/// The number of a signal by its name, with or without `SIG`, such as `SIGTERM` or `RTMIN+3`. A decimal number is returned as is.
pub fn number_by_name(name: &str) -> Option<i32> {
    if let Ok(number) = name.parse::<i32>() {
        return (1..=RTMAX).contains(&number).then_some(number);
    }
    let name = name.strip_prefix("SIG").unwrap_or(name);
    let real_time = |number: i32| (RTMIN..=RTMAX).contains(&number).then_some(number);
    if let Some(offset) = name.strip_prefix("RTMIN+") {
        return real_time(RTMIN + i32::from(offset.parse::<u8>().ok()?));
    }
    if let Some(offset) = name.strip_prefix("RTMAX-") {
        return real_time(RTMAX - i32::from(offset.parse::<u8>().ok()?));
    }
    let named = match name {
        "RTMIN" => return Some(RTMIN),
        "RTMAX" => return Some(RTMAX),
        "ABRT" | "IOT" => Signal::ABORT,
        "ALRM" => Signal::ALARM,
        "BUS" => Signal::BUS,
        "CHLD" | "CLD" => Signal::CHILD,
        "CONT" => Signal::CONT,
        "FPE" => Signal::FPE,
        "HUP" => Signal::HUP,
        "ILL" => Signal::ILL,
        "INT" => Signal::INT,
        "IO" | "POLL" => Signal::IO,
        "KILL" => Signal::KILL,
        "PIPE" => Signal::PIPE,
        "PROF" => Signal::PROF,
        "PWR" => Signal::POWER,
        "QUIT" => Signal::QUIT,
        "SEGV" => Signal::SEGV,
        "STKFLT" => Signal::STKFLT,
        "STOP" => Signal::STOP,
        "SYS" => Signal::SYS,
        "TERM" => Signal::TERM,
        "TRAP" => Signal::TRAP,
        "TSTP" => Signal::TSTP,
        "TTIN" => Signal::TTIN,
        "TTOU" => Signal::TTOU,
        "URG" => Signal::URG,
        "USR1" => Signal::USR1,
        "USR2" => Signal::USR2,
        "VTALRM" => Signal::VTALARM,
        "WINCH" => Signal::WINCH,
        "XCPU" => Signal::XCPU,
        "XFSZ" => Signal::XFSZ,
        _ => return None,
    };
    Some(named.as_raw())
}

/// Unblocks all signals. Call it before exec, because programs inherit the signal mask.
pub fn unblock_all() -> io::Result<()> {
    let mut none = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` initialises the set; the other pointer may be null.
    let error = unsafe {
        libc::sigemptyset(none.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut())
    };
    if error != 0 {
        return Err(io::Error::from_raw_os_error(error));
    }
    Ok(())
}

/// Sends a signal, which may be a real-time signal, to the process of a pidfd.
pub fn send_to_pidfd(process: impl AsFd, signal: i32) -> io::Result<()> {
    let process = std::os::fd::AsRawFd::as_raw_fd(&process.as_fd());
    let nothing = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: the descriptor is open during the call; without a siginfo the kernel fills in its own.
    let done = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, process, signal, nothing, 0) };
    crate::syscall::check(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_found_by_name() {
        for (name, number) in [
            ("SIGTERM", Some(15)),
            ("TERM", Some(15)),
            ("SIGKILL", Some(9)),
            ("SIGUSR1", Some(10)),
            ("SIGIOT", Some(6)),
            ("SIGWINCH", Some(28)),
            ("SIGRTMIN", Some(34)),
            ("SIGRTMIN+3", Some(37)),
            ("RTMAX-2", Some(62)),
            ("SIGRTMAX", Some(64)),
            ("64", Some(64)),
            ("65", None),
            ("0", None),
            ("SIGRTMIN+31", None),
            ("RTMIN+2147483647", None),
            ("RTMIN+-1", None),
            ("RTMAX-40", None),
            ("SIGRTMIN\u{e9}", None),
            ("SIGWHAT", None),
            ("", None),
        ] {
            assert_eq!(number_by_name(name), number, "{name}");
        }
    }
}
