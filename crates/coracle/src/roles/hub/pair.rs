//! The hub's two processes: a worker, and a guard that replaces it.
//!
//! The guard only waits. The worker watches the guard through a pidfd rather than a parent death signal: a blocked signal stays
//! pending, so a worker that later becomes the guard would take it for a termination request. The guard restarts the worker
//! without limit, because pods lose their network if both processes are gone.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use linux::process::Fork;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, WaitOptions, WaitStatus};

use crate::back_off::BackOff;

const RESTARTS: BackOff = BackOff::new(Duration::from_millis(50), Duration::from_secs(5));

/// The role of this process after [`split`].
pub enum Side {
    /// The worker.
    Worker {
        /// Pidfd of its guard, readable when the guard has exited.
        guard: OwnedFd,
    },
    /// The guard, after a worker has exited with success.
    Guard,
}

/// Forks this process, which must have a single thread, into a guard and a worker.
///
/// Returns immediately in each worker. Returns in the guard when a worker has exited with success.
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
            // The user's process limit may be reached for a while.
            Err(error) => tracing::warn!(%error, "cannot start the hub's worker"),
        }
        std::thread::sleep(restarts.wait_after(began.elapsed()));
    }
}

enum Run {
    /// In the worker: the pidfd of its guard.
    Worker(OwnedFd),
    /// In the guard: the worker's wait status.
    Ended(WaitStatus),
}

fn run_worker() -> io::Result<Run> {
    // Opened before the fork: afterwards, getppid() in the worker could already be the process that adopted it.
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
