//! A process of ours, and a guard above it.
//!
//! The guard is the parent of the worker and has nothing to do but to watch it. It passes on signals,
//! inherits every orphan below, and when the worker is gone, however that came about, kills what is left.
//! If the guard itself is killed, the worker hears of it by SIGTERM and ends in order. So `kill -9` of
//! either leaves nothing behind, also where Slurm doesn't see processes that left their parents.
//!
//! ```text
//!   slurmstepd ── guard ── worker ── what it starts
//! ```

use console::say;
use std::io;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::back_off::BackOff;
use linux::process::Fork;
use linux::signal::Held;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};

/// What happens when the worker dies by a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Everything ends with it.
    End,
    /// It is started again, after a back-off if it was not healthy.
    Restart,
}

/// On which side of the guard this process now is.
#[derive(Debug)]
pub enum Side {
    /// The worker: go on with the real work.
    Worker,
    /// The guard, and the worker is over.
    Guard(Over),
}

/// How a guard's work ended.
#[derive(Debug, Clone, Copy)]
pub struct Over {
    /// End with this code.
    pub code: ExitCode,
    /// The worker left what is below to others, so it was left alone. Only one that is restarted does that.
    pub left_to_others: bool,
}

/// With this code a worker says that what it started lives on, for another to take over.
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
/// The waits before a worker is replaced.
const RESTARTS: BackOff = BackOff::new(Duration::from_millis(50), Duration::from_secs(10));
const KILL_PATIENCE: Duration = Duration::from_secs(5);

/// Holds back, until it is released, what Slurm may send to every process of a job at once: for a process that ends
/// by another's word, and whose death would be the death of what hangs on it.
pub fn deaf() -> io::Result<Held> {
    Held::new(&[
        Signal::TERM,
        Signal::INT,
        Signal::HUP,
        Signal::USR1,
        Signal::USR2,
    ])
}

/// Splits this process, which must have a single thread, into a guard and a worker.
///
/// Returns in the worker at once (and again in each that replaces it), in the guard at the very end.
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
        // However often: to give up would be the end of what the worker looks after.
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

/// Waits before a worker is started again, unless a signal asks for the end; `told` then.
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

/// Passes signals on until the worker ends; `told` when one of them asked for that.
fn watch(worker: Pid, held: &Held, told: &mut bool) -> io::Result<WaitStatus> {
    loop {
        let taken = held.wait()?;
        match taken.signal {
            Signal::CHILD => {
                // Orphans come to us too, and several children may share one signal.
                while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
                    if pid == worker {
                        return Ok(status);
                    }
                }
            }
            // A key on the terminal: the worker, in the same process group, has it already. (Of a terminal
            // that is closed only the session's leader hears, which may be us.)
            signal if taken.from_kernel && signal != Signal::HUP => {}
            signal => {
                *told |= asks_for_the_end(signal);
                let _ = rustix::process::kill_process(worker, signal);
            }
        }
    }
}
