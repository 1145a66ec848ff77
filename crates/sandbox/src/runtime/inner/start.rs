//! Starts processes: the fork, the steps in the child, and its reports.

use std::convert::Infallible;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use linux::cgroup::Cgroup;
use linux::clone::{CloneResult, NewNamespaces};
use linux::packet;
use rustix::process::{Pid, Signal};
use rustix::thread::UnshareFlags;
use serde::{Deserialize, Serialize};

use super::error::{InnerError, cannot};
use super::message::{ContainerIdentity, ContainerPlan, PidNamespace, ProcessPlan};
use super::self_exe::SelfExe;
use super::user::look_up;
use super::{container, program};

/// A process that was forked and has not executed its program yet.
pub struct StartingProcess {
    /// Serial of the request.
    pub serial: u64,
    /// Carries [`StartReport`]s; closed by the exec of the program.
    pub report: OwnedFd,
    /// The process that will execute the program.
    pub process: Option<(Pid, OwnedFd)>,
    /// The master side of its terminal.
    pub terminal: Option<OwnedFd>,
    /// Its user, if it is a container.
    pub identity: Option<ContainerIdentity>,
    /// Its mount namespace, if it is a container.
    pub mount_namespace: Option<OwnedFd>,
    /// It is in the pid namespace of the inner process.
    pub shares_pid_namespace: bool,
    /// The sandbox has sent a `Kill` for it.
    pub is_cancelled: bool,
}

impl StartingProcess {
    fn new(
        serial: u64,
        report: OwnedFd,
        process: (Pid, OwnedFd),
        shares_pid_namespace: bool,
    ) -> Self {
        Self {
            serial,
            report,
            process: Some(process),
            terminal: None,
            identity: None,
            mount_namespace: None,
            shares_pid_namespace,
            is_cancelled: false,
        }
    }
}

/// A running container that another process joins.
#[derive(Clone, Copy)]
pub struct TargetContainer<'a> {
    /// Its first process.
    pub process: BorrowedFd<'a>,
    /// It is in the pid namespace of the inner process, which is the host's with `hostPID`.
    pub shares_pid_namespace: bool,
}

/// A message of a child before it executes its program.
#[derive(Debug, Serialize, Deserialize)]
pub enum StartReport {
    /// Descriptor: the master side of its terminal.
    Terminal,
    /// Its user.
    Identity(ContainerIdentity),
    /// Descriptor: its mount namespace.
    MountNamespace,
    /// The reporting process has forked: its child with this pid will execute the program. Descriptor: the child's pidfd.
    ForkedAgain(i32),
    /// The child cannot execute its program.
    Failed(InnerError),
}

/// Forks the first process of a container. For [`PidNamespace::Target`], `target` is the container whose pid namespace it joins.
pub fn container(
    serial: u64,
    plan: &ContainerPlan,
    stdio: &[OwnedFd],
    target: Option<TargetContainer<'_>>,
    self_exe: SelfExe,
) -> Result<StartingProcess, InnerError> {
    let shares_pid_namespace = match target {
        Some(target) => target.shares_pid_namespace,
        None => plan.pid_namespace == PidNamespace::Inner,
    };
    let namespaces = NewNamespaces {
        mount: true,
        pid: plan.pid_namespace == PidNamespace::Own,
        ..Default::default()
    };
    start(
        serial,
        namespaces,
        &plan.process,
        shares_pid_namespace,
        |reporter| {
            // Open it in the child: the inner process could not open it any more once the child has exited.
            let mount_namespace = linux::namespace::own_mount_namespace()
                .map_err(cannot("open the mount namespace"))?;
            // After the fork into the cgroup: a cgroup namespace's root is the cgroup of the process at this time.
            linux::namespace::unshare(UnshareFlags::NEWCGROUP)
                .map_err(cannot("create a cgroup namespace"))?;
            if let Some(target) = target.filter(|target| !target.shares_pid_namespace) {
                join_pid_namespace(target.process, reporter)?;
            }
            set_up_session(stdio)?;
            let terminal = container::enter_rootfs(plan)?;
            // Not before `enter_rootfs`: until then the namespace contains the host's root, and all processes that the inner
            // process forks later inherit the descriptor.
            send_report(
                reporter,
                &StartReport::MountNamespace,
                &[mount_namespace.as_fd()],
            );
            drop(mount_namespace);
            if let Some(master) = terminal {
                send_report(reporter, &StartReport::Terminal, &[master.as_fd()]);
            }
            // `exec_program` reports an unknown user.
            if let Ok(user) = look_up(&plan.process.user) {
                let identity = ContainerIdentity {
                    uid: user.uid,
                    gid: user.gid,
                    groups: user.groups,
                };
                send_report(reporter, &StartReport::Identity(identity), &[]);
            }
            program::exec_program(&plan.process, self_exe)
        },
    )
}

/// Forks a process that joins a running container.
pub fn exec(
    serial: u64,
    plan: &ProcessPlan,
    stdio: &[OwnedFd],
    target: TargetContainer<'_>,
    self_exe: SelfExe,
) -> Result<StartingProcess, InnerError> {
    let shares_pid_namespace = target.shares_pid_namespace;
    let namespaces = NewNamespaces::default();
    start(serial, namespaces, plan, shares_pid_namespace, |reporter| {
        linux::setns::join_container_namespaces(target.process, !shares_pid_namespace)
            .map_err(cannot("enter the container"))?;
        if !shares_pid_namespace {
            fork_again(reporter)?;
        }
        set_up_session(stdio)?;
        if plan.terminal {
            let master = super::terminal::open().map_err(cannot("open a terminal"))?;
            send_report(reporter, &StartReport::Terminal, &[master.as_fd()]);
        }
        program::exec_program(plan, self_exe)
    })
}

/// Forks a process and calls `execute` in it, with the socket for its reports. `execute` returns only if it fails.
fn start(
    serial: u64,
    namespaces: NewNamespaces,
    plan: &ProcessPlan,
    shares_pid_namespace: bool,
    execute: impl FnOnce(&OwnedFd) -> Result<Infallible, InnerError>,
) -> Result<StartingProcess, InnerError> {
    let (report, reporter) = packet::pair().map_err(cannot("create a socket pair"))?;
    match fork(namespaces, plan)? {
        CloneResult::Parent(pid, process) => {
            let process = (pid, process);
            Ok(StartingProcess::new(
                serial,
                report,
                process,
                shares_pid_namespace,
            ))
        }
        CloneResult::Child => {
            drop(report);
            let Err(error) = execute(&reporter);
            exit_with(&reporter, error)
        }
    }
}

/// Forks, into the container's cgroup if it has one.
fn fork(namespaces: NewNamespaces, plan: &ProcessPlan) -> Result<CloneResult, InnerError> {
    let forked = match &plan.cgroup {
        Some(cgroup) => linux::clone::fork_into_cgroup(namespaces, &Cgroup::at(cgroup)),
        None => linux::clone::fork_into(namespaces),
    };
    forked.map_err(cannot("fork"))
}

/// Forks and lets the parent exit: only children of a process enter the pid namespace that it has joined.
fn fork_again(reporter: &OwnedFd) -> Result<(), InnerError> {
    match linux::clone::fork_sibling().map_err(cannot("fork"))? {
        CloneResult::Parent(pid, process) => {
            let report = StartReport::ForkedAgain(pid.as_raw_nonzero().get());
            send_report(reporter, &report, &[process.as_fd()]);
            std::process::exit(0)
        }
        CloneResult::Child => Ok(()),
    }
}

fn join_pid_namespace(target: BorrowedFd<'_>, reporter: &OwnedFd) -> Result<(), InnerError> {
    linux::setns::join_pid_namespace(target)
        .map_err(cannot("enter the target container's pid namespace"))?;
    fork_again(reporter)
}

/// Sets up a session, the standard streams, the signal mask and the umask.
fn set_up_session(stdio: &[OwnedFd]) -> Result<(), InnerError> {
    // With `hostPID` the kernel does not kill the process when the inner process exits, because that is not a pid namespace's init.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(cannot("set the parent death signal"))?;
    // Fails if the process leads a session already.
    let _ = rustix::process::setsid();
    if let [stdin, stdout, stderr] = stdio {
        let streams = rustix::stdio::dup2_stdin(stdin)
            .and_then(|()| rustix::stdio::dup2_stdout(stdout))
            .and_then(|()| rustix::stdio::dup2_stderr(stderr));
        streams.map_err(cannot("set standard streams"))?;
    }
    linux::signal::unblock_all().map_err(cannot("unblock signals"))?;
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    Ok(())
}

fn exit_with(reporter: &OwnedFd, error: InnerError) -> ! {
    send_report(reporter, &StartReport::Failed(error), &[]);
    std::process::exit(127)
}

fn send_report(reporter: &OwnedFd, report: &StartReport, descriptors: &[BorrowedFd<'_>]) {
    // A report always has a JSON form. If the inner process has exited, the report is not needed.
    if let Ok(text) = serde_json::to_vec(report) {
        let _ = packet::send(reporter, 0, &text, descriptors);
    }
}
