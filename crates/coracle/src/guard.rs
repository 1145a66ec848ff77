//! Splits a process into a worker and a guard that supervises it.
//!
//! The guard is the worker's parent. It forwards signals, reaps orphans as their subreaper, and kills all remaining
//! descendants when the worker exits, unless it restarts the worker ([`GuardPolicy::Restart`]) or the worker hands them over
//! ([`EXIT_HANDED_OVER`]). If the guard is killed, the worker gets SIGTERM (its parent death signal) and shuts down in order. So
//! `kill -9` of either process leaves no unsupervised processes, even where Slurm does not track reparented processes.
//!
//! ```text
//!   slurmstepd ── guard ── worker ── its children
//! ```

use console::print_stderr;
use std::io;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::back_off::ProcessBackOff;
use linux::process::ForkResult;
use linux::signal::BlockedSignals;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};

/// The guard's reaction when a signal kills the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuardPolicy {
    /// Kill the worker's descendants and exit.
    Exit,
    /// Restart the worker after a back-off, which a long run resets.
    Restart,
}

/// The process in which [`fork_worker`] returns.
#[derive(Debug)]
pub enum GuardedProcess {
    /// The worker: continue with the role's work.
    Worker,
    /// The guard, after the worker has exited.
    Guard(GuardResult),
}

/// The outcome of the last worker.
#[derive(Debug, Clone, Copy)]
pub struct GuardResult {
    /// The exit code for this process.
    pub code: ExitCode,
    /// The worker exited with [`EXIT_HANDED_OVER`], so its descendants were not killed. Only with [`GuardPolicy::Restart`].
    pub handed_over: bool,
}

/// A worker exits with this code if its descendants must survive, for another agent to adopt.
pub const EXIT_HANDED_OVER: u8 = 3;

const SIGNALS: [Signal; 7] = [
    Signal::CHILD,
    Signal::HUP,
    Signal::INT,
    Signal::QUIT,
    Signal::TERM,
    Signal::USR1,
    Signal::USR2,
];
const RESTART_BACK_OFF: ProcessBackOff =
    ProcessBackOff::new(Duration::from_millis(50), Duration::from_secs(10));
const DESCENDANT_KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// Blocks the signals that Slurm may send to every process of a job at once. Used by processes that must outlive the processes that
/// depend on them, and that exit when the agent or the leader requests it.
pub fn block_job_signals() -> io::Result<BlockedSignals> {
    BlockedSignals::new(&[
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
pub fn fork_worker(policy: GuardPolicy) -> io::Result<GuardedProcess> {
    linux::process::become_subreaper()?;
    let mut back_off = RESTART_BACK_OFF;
    let mut terminating = false;
    loop {
        let blocked = BlockedSignals::new(&SIGNALS)?;
        let guard = rustix::process::getpid();
        let worker = match linux::process::fork()? {
            ForkResult::Child => {
                linux::process::set_parent_death_signal(Some(guard), Signal::TERM)?;
                blocked.restore_mask()?;
                return Ok(GuardedProcess::Worker);
            }
            ForkResult::Parent(worker) => worker,
        };
        let began = Instant::now();
        let status = supervise(worker, &blocked, &mut terminating)?;
        let was_killed = status.terminating_signal().is_some();
        // Restarts are unlimited: pods depend on the worker.
        if policy == GuardPolicy::Restart && was_killed && !terminating {
            wait_before_restart(
                &blocked,
                back_off.next_delay_after(began.elapsed()),
                &mut terminating,
            )?;
            if !terminating {
                blocked.restore_mask()?;
                continue;
            }
        }
        let code = linux::process::shell_exit_code(status);
        let handed_over =
            policy == GuardPolicy::Restart && !terminating && code == i32::from(EXIT_HANDED_OVER);
        if !handed_over
            && let Err(error) = linux::process::kill_descendants(DESCENDANT_KILL_TIMEOUT)
        {
            print_stderr(format_args!("coracle: {error}"));
        }
        return Ok(GuardedProcess::Guard(GuardResult {
            code: crate::exit::code(code),
            handed_over,
        }));
    }
}

/// Waits before the worker is restarted. Returns early, with `terminating` set, if a signal requests termination.
fn wait_before_restart(
    blocked: &BlockedSignals,
    delay: Duration,
    terminating: &mut bool,
) -> io::Result<()> {
    let end = Instant::now() + delay;
    while !*terminating {
        let remaining = end.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            break;
        }
        match blocked
            .wait_timeout(remaining)?
            .map(|received| received.signal)
        {
            Some(Signal::CHILD) => {
                while let Ok(Some(_)) = rustix::process::wait(WaitOptions::NOHANG) {}
            }
            Some(signal) => *terminating = requests_termination(signal),
            None => {}
        }
    }
    Ok(())
}

fn requests_termination(signal: Signal) -> bool {
    signal != Signal::USR1 && signal != Signal::USR2
}

/// Forwards signals until the worker exits. Sets `terminating` if one of them requests termination.
fn supervise(
    worker: Pid,
    blocked: &BlockedSignals,
    terminating: &mut bool,
) -> io::Result<WaitStatus> {
    loop {
        let received = blocked.wait()?;
        match received.signal {
            Signal::CHILD => {
                // The guard also reaps orphans, and several exits may be merged into one SIGCHLD.
                while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
                    if pid == worker {
                        return Ok(status);
                    }
                }
            }
            // Sent by the terminal (Ctrl-C) to the process group, so the worker has received it too. The exception is the SIGHUP of
            // a closed terminal: the kernel sends it to the session leader, which may be the guard.
            signal if received.from_kernel && signal != Signal::HUP => {}
            signal => {
                *terminating |= requests_termination(signal);
                let _ = rustix::process::kill_process(worker, signal);
            }
        }
    }
}
