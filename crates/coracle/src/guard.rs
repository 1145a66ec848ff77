//! Splits a process into a worker and a guard that supervises it.
//!
//! The guard is the worker's parent. It forwards signals, reaps orphans as their subreaper, and kills all remaining
//! descendants when the worker exits for any reason. If the guard is killed, the worker gets SIGTERM (its parent death signal)
//! and shuts down in order. So `kill -9` of either process leaves no processes behind, even where Slurm does not track
//! processes that were reparented.
//!
//! ```text
//!   slurmstepd ── guard ── worker ── its children
//! ```

use console::say;
use std::io;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::back_off::BackOff;
use linux::process::Fork;
use linux::signal::Held;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};

/// The guard's reaction when a signal kills the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Kill the worker's descendants and exit.
    End,
    /// Restart the worker; back off if it was not healthy.
    Restart,
}

/// The role of this process after [`split`].
#[derive(Debug)]
pub enum Side {
    /// The worker: continue with the role's work.
    Worker,
    /// The guard, after the worker has exited.
    Guard(Over),
}

/// The result that the guard returns with.
#[derive(Debug, Clone, Copy)]
pub struct Over {
    /// The exit code for this process.
    pub code: ExitCode,
    /// The worker exited with [`LEFT_TO_OTHERS`], so its descendants were not killed. Only with [`Policy::Restart`].
    pub left_to_others: bool,
}

/// A worker exits with this code if its descendants must survive, for another agent to adopt.
pub const LEFT_TO_OTHERS: u8 = 3;

const SIGNALS: [Signal; 7] = [
    Signal::CHILD,
    Signal::HUP,
    Signal::INT,
    Signal::QUIT,
    Signal::TERM,
    Signal::USR1,
    Signal::USR2,
];
const RESTARTS: BackOff = BackOff::new(Duration::from_millis(50), Duration::from_secs(10));
const KILL_PATIENCE: Duration = Duration::from_secs(5);

/// Blocks the signals that Slurm may send to every process of a job at once. For processes that other processes depend on and
/// that exit on a request from the agent or the leader instead.
pub fn deaf() -> io::Result<Held> {
    Held::new(&[
        Signal::TERM,
        Signal::INT,
        Signal::HUP,
        Signal::USR1,
        Signal::USR2,
    ])
}

/// Forks this process, which must have a single thread, into a guard and a worker.
///
/// Returns immediately in each worker, including restarted ones. Returns in the guard when no worker will be started any more.
pub fn split(policy: Policy) -> io::Result<Side> {
    linux::process::become_subreaper()?;
    let mut restarts = RESTARTS;
    let mut told = false;
    loop {
        let held = Held::new(&SIGNALS)?;
        let guard = rustix::process::getpid();
        let worker = match linux::process::fork()? {
            Fork::Child => {
                linux::process::die_with_parent(Some(guard), Signal::TERM)?;
                held.release()?;
                return Ok(Side::Worker);
            }
            Fork::Parent(worker) => worker,
        };
        let began = Instant::now();
        let status = watch(worker, &held, &mut told)?;
        let died = status.terminating_signal().is_some();
        // Restarts are unlimited: pods depend on the worker.
        if policy == Policy::Restart && died && !told {
            back_off(&held, restarts.wait_after(began.elapsed()), &mut told)?;
            if !told {
                held.release()?;
                continue;
            }
        }
        let code = linux::process::shell_code(status);
        let left_to_others =
            policy == Policy::Restart && !told && code == i32::from(LEFT_TO_OTHERS);
        if !left_to_others && let Err(error) = linux::process::kill_all_below(KILL_PATIENCE) {
            say(format_args!("coracle: {error}"));
        }
        return Ok(Side::Guard(Over {
            code: crate::exit::code(code),
            left_to_others,
        }));
    }
}

/// Waits before the worker is restarted. Returns early, with `told` set, if a signal requests termination.
fn back_off(held: &Held, wait: Duration, told: &mut bool) -> io::Result<()> {
    let end = Instant::now() + wait;
    while !*told {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        match held.wait_for(left)?.map(|taken| taken.signal) {
            Some(Signal::CHILD) => {
                while let Ok(Some(_)) = rustix::process::wait(WaitOptions::NOHANG) {}
            }
            Some(signal) => *told = asks_for_the_end(signal),
            None => {}
        }
    }
    Ok(())
}

fn asks_for_the_end(signal: Signal) -> bool {
    signal != Signal::USR1 && signal != Signal::USR2
}

/// Forwards signals until the worker exits. Sets `told` if one of them requests termination.
fn watch(worker: Pid, held: &Held, told: &mut bool) -> io::Result<WaitStatus> {
    loop {
        let taken = held.wait()?;
        match taken.signal {
            Signal::CHILD => {
                // The guard also reaps orphans, and several exits may be merged into one SIGCHLD.
                while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
                    if pid == worker {
                        return Ok(status);
                    }
                }
            }
            // Sent by the terminal (Ctrl-C): the worker is in the same process group and has received it. The exception is SIGHUP
            // of a closed terminal, which only the session leader receives; that may be the guard.
            signal if taken.from_kernel && signal != Signal::HUP => {}
            signal => {
                *told |= asks_for_the_end(signal);
                let _ = rustix::process::kill_process(worker, signal);
            }
        }
    }
}
