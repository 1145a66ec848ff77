//! The main loop of the inner process.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use linux::packet;
use linux::route::{InterfaceAddress, RouteSocket};
use linux::signal::ChildExitFd;
use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use rustix::thread::UnshareFlags;

use super::error::{InnerError, cannot};
use super::message::{
    InnerEvent, InnerRequest, InterfaceConfig, NamespacePlan, PidNamespace, ProcessExit,
};
use super::self_exe::SelfExe;
use super::start::{self, StartReport, StartingProcess, TargetContainer};

/// Serves `socket` until the sandbox closes its end. The caller must have a single thread.
pub fn run(socket: OwnedFd) -> io::Result<()> {
    let mut inner = Inner {
        socket,
        self_exe: SelfExe::find()?,
        child_exits: ChildExitFd::open()?,
        starting: Vec::new(),
        serials: HashMap::new(),
        started: HashMap::new(),
        unclaimed_exits: HashMap::new(),
    };
    while inner.step()? {}
    Ok(())
}

struct Inner {
    socket: OwnedFd,
    self_exe: SelfExe,
    child_exits: ChildExitFd,
    starting: Vec<StartingProcess>,
    /// Serials of the processes in `started` that have not exited yet, by pid.
    serials: HashMap<Pid, u64>,
    /// Processes that have executed their program, by serial.
    started: HashMap<u64, StartedProcess>,
    /// Exits of unknown processes, kept while a process is starting: it may exit before its last report is read.
    unclaimed_exits: HashMap<Pid, WaitStatus>,
}

/// A process that has executed its program.
struct StartedProcess {
    process: OwnedFd,
    shares_pid_namespace: bool,
}

/// File descriptors that are ready.
struct Ready {
    request: bool,
    child_exit: bool,
    /// Indices into `Inner::starting`.
    reports: Vec<usize>,
}

impl Inner {
    /// Handles requests, exits of children and reports of starting processes; false when the sandbox has closed the socket.
    fn step(&mut self) -> io::Result<bool> {
        let ready = self.poll()?;
        if ready.child_exit {
            self.child_exits.clear();
            self.reap();
        }
        // From the back, so that removing an entry does not move those still to be handled.
        for index in ready.reports.into_iter().rev() {
            self.receive_report(index);
        }
        if ready.request {
            return self.receive_request();
        }
        Ok(true)
    }

    fn poll(&self) -> io::Result<Ready> {
        let mut watched = vec![
            PollFd::new(&self.socket, PollFlags::IN),
            PollFd::new(&self.child_exits, PollFlags::IN),
        ];
        watched.extend(
            self.starting
                .iter()
                .map(|starting| PollFd::new(&starting.report, PollFlags::IN)),
        );
        match rustix::event::poll(&mut watched, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready: Vec<bool> = watched.iter().map(|fd| !fd.revents().is_empty()).collect();
        Ok(Ready {
            request: ready[0],
            child_exit: ready[1],
            reports: (0..self.starting.len())
                .filter(|at| ready[at + 2])
                .collect(),
        })
    }

    fn receive_request(&mut self) -> io::Result<bool> {
        let Some(message) = packet::receive(&self.socket)? else {
            return Ok(false);
        };
        let serial = message.number;
        let done =
            parse(&message).and_then(|request| self.serve(serial, request, message.descriptors));
        match done {
            Ok(None) => {}
            Ok(Some(descriptors)) => {
                let descriptors: Vec<BorrowedFd<'_>> =
                    descriptors.iter().map(AsFd::as_fd).collect();
                self.send(serial, InnerEvent::Done, &descriptors);
            }
            Err(error) => self.send(serial, InnerEvent::Failed(error), &[]),
        }
        Ok(true)
    }

    /// Serves a request and returns the descriptors of the reply; `None` if the reply is sent later, or never.
    fn serve(
        &mut self,
        serial: u64,
        request: InnerRequest,
        stdio: Vec<OwnedFd>,
    ) -> Result<Option<Vec<OwnedFd>>, InnerError> {
        match request {
            InnerRequest::CreateNamespaces(plan) => {
                create_namespaces(&plan).map(|network| Some(vec![network]))
            }
            InnerRequest::ConfigureInterface(config) => {
                configure_interface(&config).map(|()| Some(Vec::new()))
            }
            InnerRequest::CreateSocket { ipv6, udp } => {
                create_socket(ipv6, udp).map(|socket| Some(vec![socket]))
            }
            InnerRequest::StartContainer(plan) => {
                // Containers that share our pid namespace see this process and its children, whose root is the host's.
                linux::credentials::set_non_dumpable().map_err(cannot("hide from containers"))?;
                let target = match plan.pid_namespace {
                    PidNamespace::Target(container) => Some(self.container(container)?),
                    PidNamespace::Own | PidNamespace::Inner => None,
                };
                let starting = start::container(serial, &plan, &stdio, target, self.self_exe)?;
                self.starting.push(starting);
                Ok(None)
            }
            InnerRequest::Exec { container, process } => {
                let target = self.container(container)?;
                let starting = start::exec(serial, &process, &stdio, target, self.self_exe)?;
                self.starting.push(starting);
                Ok(None)
            }
            InnerRequest::Kill { process } => {
                self.kill(process);
                Ok(None)
            }
        }
    }

    fn container(&self, serial: u64) -> Result<TargetContainer<'_>, InnerError> {
        let found = self.started.get(&serial).map(|started| TargetContainer {
            process: started.process.as_fd(),
            shares_pid_namespace: started.shares_pid_namespace,
        });
        found.ok_or_else(|| InnerError::program("the container is not running"))
    }

    fn kill(&mut self, serial: u64) {
        if let Some(started) = self.started.get(&serial) {
            send_sigkill(&started.process);
        }
        for starting in &mut self.starting {
            if starting.serial == serial {
                starting.is_cancelled = true;
                starting
                    .process
                    .iter()
                    .for_each(|(_, process)| send_sigkill(process));
            }
        }
    }

    /// Receives one report of a starting process.
    fn receive_report(&mut self, index: usize) {
        let starting = &mut self.starting[index];
        let received = packet::receive(&starting.report).ok().flatten();
        let Some(message) = received else {
            return self.finish_start(index);
        };
        if !message.is_complete {
            let starting = self.starting.remove(index);
            starting
                .process
                .iter()
                .for_each(|(_, process)| send_sigkill(process));
            let error = InnerEvent::Failed(too_many_open_files());
            return self.send(starting.serial, error, &[]);
        }
        let mut descriptors = message.descriptors;
        match serde_json::from_slice(&message.text) {
            Ok(StartReport::Terminal) => starting.terminal = descriptors.pop(),
            Ok(StartReport::Identity(identity)) => starting.identity = Some(identity),
            Ok(StartReport::MountNamespace) => starting.mount_namespace = descriptors.pop(),
            Ok(StartReport::ForkedAgain(pid)) => {
                starting.process = Pid::from_raw(pid).zip(descriptors.pop());
                if let Some((_, process)) =
                    starting.process.as_ref().filter(|_| starting.is_cancelled)
                {
                    send_sigkill(process);
                }
            }
            Ok(StartReport::Failed(error)) => {
                let starting = self.starting.remove(index);
                self.send(starting.serial, InnerEvent::Failed(error), &[]);
            }
            Err(_) => {}
        }
    }

    /// The process closed its report socket without an error: it has executed its program.
    fn finish_start(&mut self, index: usize) {
        let starting = self.starting.remove(index);
        let serial = starting.serial;
        let Some((pid, process)) = starting.process else {
            let error = InnerError::program("the process exited while it was starting");
            return self.send(serial, InnerEvent::Failed(error), &[]);
        };
        let mut descriptors = vec![process.as_fd()];
        let event = match (starting.identity, &starting.mount_namespace) {
            (Some(identity), Some(mount_namespace)) => {
                descriptors.push(mount_namespace.as_fd());
                InnerEvent::ContainerStarted(identity)
            }
            _ => InnerEvent::Done,
        };
        descriptors.extend(starting.terminal.as_ref().map(AsFd::as_fd));
        self.send(serial, event, &descriptors);
        let started = StartedProcess {
            process,
            shares_pid_namespace: starting.shares_pid_namespace,
        };
        self.started.insert(serial, started);
        match self.unclaimed_exits.remove(&pid) {
            Some(status) => self.send_exit(serial, status),
            None => drop(self.serials.insert(pid, serial)),
        }
    }

    /// Reaps our children, and orphans of containers that share our pid namespace.
    fn reap(&mut self) {
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            if let Some(serial) = self.serials.remove(&pid) {
                self.send_exit(serial, status);
            } else {
                self.unclaimed_exits.insert(pid, status);
            }
        }
        if self.starting.is_empty() {
            self.unclaimed_exits.clear();
        }
    }

    fn send_exit(&mut self, serial: u64, status: WaitStatus) {
        self.started.remove(&serial);
        let exit = ProcessExit {
            code: linux::process::shell_exit_code(status),
            signal: status.terminating_signal(),
        };
        self.send(serial, InnerEvent::Exited(exit), &[]);
    }

    fn send(&self, serial: u64, event: InnerEvent, descriptors: &[BorrowedFd<'_>]) {
        if let Ok(text) = serde_json::to_vec(&event) {
            // Fails only if the sandbox has exited; then this process is killed too.
            let _ = packet::send(&self.socket, serial, &text, descriptors);
        }
    }
}

fn parse(message: &packet::Packet) -> Result<InnerRequest, InnerError> {
    if !message.is_complete {
        return Err(too_many_open_files());
    }
    serde_json::from_slice(&message.text).map_err(cannot("parse the sandbox's request"))
}

/// The kernel drops descriptors of a message if the process has too many open files.
fn too_many_open_files() -> InnerError {
    InnerError::runtime("the pod's inner process has too many open files")
}

/// Kills a process. Already exited: ignore.
fn send_sigkill(process: &OwnedFd) {
    let _ = rustix::process::pidfd_send_signal(process, Signal::KILL);
}

/// Returns the pod's network namespace. The sandbox cannot open it itself, because the inner process is not dumpable.
fn create_namespaces(plan: &NamespacePlan) -> Result<OwnedFd, InnerError> {
    let mut flags = UnshareFlags::empty();
    flags.set(UnshareFlags::NEWNET, plan.network);
    flags.set(UnshareFlags::NEWIPC, plan.ipc);
    flags.set(UnshareFlags::NEWUTS, plan.hostname.is_some());
    linux::namespace::unshare(flags).map_err(cannot("create the pod's namespaces"))?;
    if let Some(hostname) = &plan.hostname {
        rustix::system::sethostname(hostname.as_bytes()).map_err(cannot("set the host name"))?;
    }
    if plan.network {
        let route = RouteSocket::open().map_err(cannot("open a netlink socket"))?;
        route.set_up("lo").map_err(cannot("bring up lo"))?;
    }
    for (name, value) in &plan.sysctls {
        let path = format!("/proc/sys/{}", name.replace('.', "/"));
        std::fs::write(path, value).map_err(cannot(format!("set sysctl {name}")))?;
    }
    linux::namespace::own_network_namespace().map_err(cannot("open the pod's network namespace"))
}

fn configure_interface(config: &InterfaceConfig) -> Result<(), InnerError> {
    let address = InterfaceAddress {
        address: config.address,
        prefix_length: match config.address {
            IpAddr::V4(_) => 32,
            IpAddr::V6(_) => 128,
        },
    };
    let configure = || -> io::Result<()> {
        let route = RouteSocket::open()?;
        ignore_existing(route.add_address(&config.interface, address))?;
        route.set_up(&config.interface)?;
        ignore_existing(route.add_default_route(&config.interface, config.gateway))
    };
    configure().map_err(cannot("configure the pod's interface"))
}

/// An earlier attempt may have got so far and failed later.
fn ignore_existing(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        result => result,
    }
}

fn create_socket(ipv6: bool, udp: bool) -> Result<OwnedFd, InnerError> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    let family = if ipv6 {
        AddressFamily::INET6
    } else {
        AddressFamily::INET
    };
    let kind = if udp {
        SocketType::DGRAM
    } else {
        SocketType::STREAM
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(family, kind, flags, None).map_err(cannot("create a socket"))
}
