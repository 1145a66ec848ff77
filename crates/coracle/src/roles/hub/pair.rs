//! The hub's two processes: a worker, and a guard that replaces it.
//!
//! The guard does nothing but wait. The worker watches the guard through a descriptor and not by a parent death signal: a
//! signal that is blocked stays pending, and a worker that becomes the guard must not take it for an order to end. The
//! guard gives up on no worker, because with both processes gone pods lose their network.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use linux::process::Fork;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, WaitOptions, WaitStatus};

use crate::back_off::BackOff;

/// The waits before a worker is replaced.
const RESTARTS: BackOff = BackOff::new(Duration::from_millis(50), Duration::from_secs(5));

/// Which of the two this process now is.
pub enum Side {
    /// The worker.
    Worker {
        /// Its guard, which is readable when that has ended.
        guard: OwnedFd,
    },
    /// The guard, and a worker has ended by itself with success.
    Guard,
}

/// Forks this process, which must have a single thread, into a guard and a worker.
///
/// Returns in each worker at once, in the guard when a worker has ended with success.
pub fn split() -> io::Result<Side> {
    let mut restarts = RESTARTS;
    loop {
        let began = Instant::now();
        match run_worker() {
            Ok(Run::Worker(guard)) => return Ok(Side::Worker { guard }),
            Ok(Run::Ended(status)) if status.exit_status() == Some(0) => return Ok(Side::Guard),
            Ok(Run::Ended(status)) => {
                tracing::warn!(?status, "the hub's worker has died and is replaced");
            }
            // The user may have as many processes as are allowed, for a while.
            Err(error) => tracing::warn!(%error, "cannot start the hub's worker"),
        }
        std::thread::sleep(restarts.wait_after(began.elapsed()));
    }
}

enum Run {
    /// This is the worker; its guard.
    Worker(OwnedFd),
    /// This is the guard; how the worker ended.
    Ended(WaitStatus),
}

fn run_worker() -> io::Result<Run> {
    // Opened before the fork, so that it is our guard that the worker watches, and not whoever adopted it.
    let guard = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::NONBLOCK)?;
    match linux::process::fork()? {
        Fork::Child => Ok(Run::Worker(guard)),
        Fork::Parent(worker) => wait(worker).map(Run::Ended),
    }
}

fn wait(worker: Pid) -> io::Result<WaitStatus> {
    loop {
        match rustix::process::waitpid(Some(worker), WaitOptions::empty()) {
            Ok(Some((_, status))) => return Ok(status),
            Ok(None) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
