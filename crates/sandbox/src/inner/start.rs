//! Starting processes: the fork, what happens in the child, and what it reports.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use linux::cgroup::Group;
use linux::fresh::{Forked, Fresh};
use linux::packet;
use rustix::process::{Pid, Signal};
use rustix::thread::UnshareFlags;
use serde::{Deserialize, Serialize};

use super::failure::{Failure, failed};
use super::message::{ContainerPlan, Identity, ProcessPlan, Processes};
use super::own_program::OwnProgram;
use super::user::look_up;
use super::{container, program};

/// A process that was forked and is on its way to its program.
pub struct Starting {
    /// The request.
    pub serial: u64,
    /// Where it reports; ends when it has become its program.
    pub report: OwnedFd,
    /// The process that will be the program.
    pub process: Option<(Pid, OwnedFd)>,
    /// The master side of its terminal.
    pub terminal: Option<OwnedFd>,
    /// Who it will be, if it is a container.
    pub identity: Option<Identity>,
    /// A file that stands for its mount namespace, if it is a container.
    pub mounts: Option<OwnedFd>,
    /// It is in the process namespace of the inner process.
    pub shares_processes: bool,
    /// Nobody waits for it any more.
    pub is_unwanted: bool,
}

/// A running container that another process joins.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    /// Its first process.
    pub process: BorrowedFd<'a>,
    /// It is in the process namespace of the inner process, which is the host's with `hostPID`.
    pub shares_processes: bool,
}

/// What a child says before it is another program.
#[derive(Debug, Serialize, Deserialize)]
pub enum Report {
    /// Its terminal's master side is beside this.
    Terminal,
    /// Who it will be.
    Identity(Identity),
    /// A file that stands for its mount namespace is beside this.
    Mounts,
    /// The process has forked on: this is the one that counts, its descriptor is beside this.
    Instead(i32),
    /// It can't go on.
    Failed(Failure),
}

/// Forks a container. `target` is the one whose process namespace it joins for [`Processes::Of`].
pub fn container(
    serial: u64,
    plan: &ContainerPlan,
    stdio: &[OwnedFd],
    target: Option<Target<'_>>,
    own: OwnProgram,
) -> Result<Starting, Failure> {
    let shares_processes = match target {
        Some(target) => target.shares_processes,
        None => plan.processes == Processes::Inner,
    };
    let fresh = Fresh {
        mount: true,
        pid: plan.processes == Processes::Own,
        ..Default::default()
    };
    let (report, reporting) = packet::pair().map_err(failed("a socket pair"))?;
    match fork(fresh, &plan.process)? {
        Forked::Parent(pid, process) => Ok(Starting {
            serial,
            report,
            process: Some((pid, process)),
            terminal: None,
            identity: None,
            mounts: None,
            shares_processes,
            is_unwanted: false,
        }),
        Forked::Child => {
            drop(report);
            let become_container = || {
                // Here, because nobody can ask a process that has ended already.
                let mounts = linux::kin::own_namespace().map_err(failed("its namespace"))?;
                // After the birth: what is the root of its control groups is decided by where it is then.
                linux::namespace::unshare(UnshareFlags::NEWCGROUP)
                    .map_err(failed("a view of control groups"))?;
                if let Some(target) = target.filter(|target| !target.shares_processes) {
                    join_processes(target.process, &reporting)?;
                }
                prepare(stdio)?;
                let terminal = container::move_in(plan)?;
                // Not before: until now it led to the host's root, and what is told here others inherit who start after us.
                say(&reporting, &Report::Mounts, &[mounts.as_fd()]);
                drop(mounts);
                if let Some(master) = terminal {
                    say(&reporting, &Report::Terminal, &[master.as_fd()]);
                }
                // If there is no such user, becoming it says so.
                if let Ok(user) = look_up(&plan.process.user) {
                    let identity = Identity {
                        uid: user.uid,
                        gid: user.gid,
                        groups: user.groups,
                    };
                    say(&reporting, &Report::Identity(identity), &[]);
                }
                program::become_program(&plan.process, own)
            };
            let Err(failure) = become_container();
            give_up(&reporting, failure)
        }
    }
}

/// Forks a process that joins a running container.
pub fn exec(
    serial: u64,
    plan: &ProcessPlan,
    stdio: &[OwnedFd],
    target: Target<'_>,
    own: OwnProgram,
) -> Result<Starting, Failure> {
    let shares_processes = target.shares_processes;
    let (report, reporting) = packet::pair().map_err(failed("a socket pair"))?;
    match fork(Fresh::default(), plan)? {
        Forked::Parent(pid, process) => Ok(Starting {
            serial,
            report,
            process: Some((pid, process)),
            terminal: None,
            identity: None,
            mounts: None,
            shares_processes,
            is_unwanted: false,
        }),
        Forked::Child => {
            drop(report);
            let become_process = || {
                linux::fresh::join_container(target.process, !shares_processes)
                    .map_err(failed("entering the container"))?;
                if !shares_processes {
                    step_inside(&reporting)?;
                }
                prepare(stdio)?;
                if plan.terminal {
                    let master = super::terminal::open().map_err(failed("opening a terminal"))?;
                    say(&reporting, &Report::Terminal, &[master.as_fd()]);
                }
                program::become_program(plan, own)
            };
            let Err(failure) = become_process();
            give_up(&reporting, failure)
        }
    }
}

/// Forks, into the control group of the container if it has one.
fn fork(fresh: Fresh, plan: &ProcessPlan) -> Result<Forked, Failure> {
    let forked = match &plan.group {
        Some(group) => linux::fresh::fork_into_group(fresh, &Group::at(group)),
        None => linux::fresh::fork_into(fresh),
    };
    forked.map_err(failed("fork"))
}

/// Only children are born into a process namespace that was joined, so one more is made, and this process ends.
fn step_inside(reporting: &OwnedFd) -> Result<(), Failure> {
    match linux::fresh::fork_for_parent().map_err(failed("fork"))? {
        Forked::Parent(pid, process) => {
            let instead = Report::Instead(pid.as_raw_nonzero().get());
            say(reporting, &instead, &[process.as_fd()]);
            std::process::exit(0)
        }
        Forked::Child => Ok(()),
    }
}

fn join_processes(target: BorrowedFd<'_>, reporting: &OwnedFd) -> Result<(), Failure> {
    linux::fresh::join_processes(target)
        .map_err(failed("entering the other container's processes"))?;
    step_inside(reporting)
}

/// A session of its own, standard streams, and no signal held back.
fn prepare(stdio: &[OwnedFd]) -> Result<(), Failure> {
    // Where the process namespace is the host's, nothing else ends it with us.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(failed("parent death signal"))?;
    // Fails if it leads one already, which is as good.
    let _ = rustix::process::setsid();
    if let [input, output, errors] = stdio {
        let streams = rustix::stdio::dup2_stdin(input)
            .and_then(|()| rustix::stdio::dup2_stdout(output))
            .and_then(|()| rustix::stdio::dup2_stderr(errors));
        streams.map_err(failed("standard streams"))?;
    }
    linux::signal::hear_all().map_err(failed("signals"))?;
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    Ok(())
}

fn give_up(reporting: &OwnedFd, failure: Failure) -> ! {
    say(reporting, &Report::Failed(failure), &[]);
    std::process::exit(127)
}

fn say(reporting: &OwnedFd, report: &Report, descriptors: &[BorrowedFd<'_>]) {
    // Plain data, which always has a JSON form; and if nobody listens, there is nobody to tell.
    if let Ok(text) = serde_json::to_vec(report) {
        let _ = packet::send(reporting, 0, &text, descriptors);
    }
}
