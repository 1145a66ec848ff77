//! What the inner process does all its life.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use linux::packet;
use linux::route::{Prefixed, Route};
use linux::signal::ChildEnds;
use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use rustix::thread::UnshareFlags;

use super::failure::{Failure, failed};
use super::message::{NetworkSetUp, News, PodSetUp, Processes, Request};
use super::own_program::OwnProgram;
use super::start::{self, Report, Starting, Target};

/// Serves `socket` until its other side ends. The caller must have a single thread.
pub fn run(socket: OwnedFd) -> io::Result<()> {
    let mut inner = Inner {
        socket,
        own_program: OwnProgram::find()?,
        ends: ChildEnds::listen()?,
        starting: Vec::new(),
        running: HashMap::new(),
        started: HashMap::new(),
        unclaimed: HashMap::new(),
    };
    while inner.step()? {}
    Ok(())
}

struct Inner {
    socket: OwnedFd,
    own_program: OwnProgram,
    ends: ChildEnds,
    starting: Vec<Starting>,
    /// Processes that have become their program, by id, with the serial of their request.
    running: HashMap<Pid, u64>,
    /// The same, by serial.
    started: HashMap<u64, Started>,
    /// Ends of processes that nobody has asked about, kept while some are starting.
    unclaimed: HashMap<Pid, WaitStatus>,
}

/// A process that has become its program.
struct Started {
    process: OwnedFd,
    shares_processes: bool,
}

impl Inner {
    /// Waits for one of: a request, a child's end, a report of one that starts. `false` at the sandbox's end.
    fn step(&mut self) -> io::Result<bool> {
        let (asked, ended, reports) = self.wait()?;
        if ended {
            self.ends.take_note();
            self.reap();
        }
        // From the back, so that removing one doesn't move those that are still to come.
        for index in reports.into_iter().rev() {
            self.hear(index);
        }
        if asked {
            return self.serve();
        }
        Ok(true)
    }

    fn wait(&self) -> io::Result<(bool, bool, Vec<usize>)> {
        let mut watched = vec![
            PollFd::new(&self.socket, PollFlags::IN),
            PollFd::new(&self.ends, PollFlags::IN),
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
        let reports = (0..self.starting.len())
            .filter(|at| ready[at + 2])
            .collect();
        Ok((ready[0], ready[1], reports))
    }

    fn serve(&mut self) -> io::Result<bool> {
        let Some(message) = packet::receive(&self.socket)? else {
            return Ok(false);
        };
        let serial = message.number;
        let done =
            read(&message).and_then(|asked| self.perform(serial, asked, message.descriptors));
        match done {
            Ok(None) => {}
            Ok(Some(descriptors)) => {
                let beside: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
                self.tell(serial, News::Done, &beside);
            }
            Err(failure) => self.tell_failure(serial, failure),
        }
        Ok(true)
    }

    /// Does what is asked; `None` if the answer comes later, or never.
    fn perform(
        &mut self,
        serial: u64,
        request: Request,
        stdio: Vec<OwnedFd>,
    ) -> Result<Option<Vec<OwnedFd>>, Failure> {
        match request {
            Request::SetUp(plan) => set_up(&plan).map(|network| Some(vec![network])),
            Request::Network(plan) => set_up_network(&plan).map(|()| Some(Vec::new())),
            Request::Socket { v6, datagrams } => {
                socket(v6, datagrams).map(|socket| Some(vec![socket]))
            }
            Request::Start(plan) => {
                // Containers may see us, and what we fork, in a process namespace that they share; and our root is the host's.
                linux::credentials::hide().map_err(failed("hiding from containers"))?;
                let target = match plan.processes {
                    Processes::Of(container) => Some(self.container(container)?),
                    Processes::Own | Processes::Inner => None,
                };
                let starting = start::container(serial, &plan, &stdio, target, self.own_program)?;
                self.starting.push(starting);
                Ok(None)
            }
            Request::Exec { container, process } => {
                let target = self.container(container)?;
                let starting = start::exec(serial, &process, &stdio, target, self.own_program)?;
                self.starting.push(starting);
                Ok(None)
            }
            Request::Kill { process } => {
                self.kill(process);
                Ok(None)
            }
        }
    }

    fn container(&self, serial: u64) -> Result<Target<'_>, Failure> {
        let found = self.started.get(&serial).map(|started| Target {
            process: started.process.as_fd(),
            shares_processes: started.shares_processes,
        });
        found.ok_or_else(|| Failure::program("the container is not running".to_owned()))
    }

    /// Kills what was started by this request.
    fn kill(&mut self, serial: u64) {
        if let Some(started) = self.started.get(&serial) {
            end(&started.process);
        }
        for starting in &mut self.starting {
            if starting.serial == serial {
                starting.is_unwanted = true;
                starting
                    .process
                    .iter()
                    .for_each(|(_, process)| end(process));
            }
        }
    }

    /// Takes one report of a process that starts.
    fn hear(&mut self, index: usize) {
        let starting = &mut self.starting[index];
        let heard = packet::receive(&starting.report).ok().flatten();
        let Some(message) = heard else {
            return self.has_started(index);
        };
        if !message.is_whole {
            let starting = self.starting.remove(index);
            starting
                .process
                .iter()
                .for_each(|(_, process)| end(process));
            return self.tell_failure(starting.serial, no_descriptors());
        }
        let mut descriptors = message.descriptors;
        match serde_json::from_slice(&message.text) {
            Ok(Report::Terminal) => starting.terminal = descriptors.pop(),
            Ok(Report::Identity(identity)) => starting.identity = Some(identity),
            Ok(Report::Mounts) => starting.mounts = descriptors.pop(),
            Ok(Report::Instead(pid)) => {
                starting.process = Pid::from_raw(pid).zip(descriptors.pop());
                if let Some((_, process)) =
                    starting.process.as_ref().filter(|_| starting.is_unwanted)
                {
                    end(process);
                }
            }
            Ok(Report::Failed(failure)) => {
                let starting = self.starting.remove(index);
                self.tell_failure(starting.serial, failure);
            }
            Err(_) => {}
        }
    }

    /// The report's end without a complaint: it is its program now.
    fn has_started(&mut self, index: usize) {
        let starting = self.starting.remove(index);
        let serial = starting.serial;
        let Some((pid, process)) = starting.process else {
            let failure = Failure::program("it ended while it was starting".to_owned());
            return self.tell_failure(serial, failure);
        };
        let mut beside = vec![process.as_fd()];
        let news = match (starting.identity, &starting.mounts) {
            (Some(identity), Some(mounts)) => {
                beside.push(mounts.as_fd());
                News::Runs(identity)
            }
            _ => News::Done,
        };
        beside.extend(starting.terminal.as_ref().map(AsFd::as_fd));
        self.tell(serial, news, &beside);
        let started = Started {
            process,
            shares_processes: starting.shares_processes,
        };
        self.started.insert(serial, started);
        match self.unclaimed.remove(&pid) {
            Some(status) => self.tell_end(serial, status),
            None => drop(self.running.insert(pid, serial)),
        }
    }

    /// Collects all that have ended: ours, and what containers left behind in a shared process namespace.
    fn reap(&mut self) {
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            if let Some(serial) = self.running.remove(&pid) {
                self.tell_end(serial, status);
            } else {
                // Perhaps one that is starting: it may end before we hear that it is the one that counts.
                self.unclaimed.insert(pid, status);
            }
        }
        if self.starting.is_empty() {
            self.unclaimed.clear();
        }
    }

    fn tell_end(&mut self, serial: u64, status: WaitStatus) {
        self.started.remove(&serial);
        let code = linux::process::shell_code(status);
        let signal = status.terminating_signal();
        self.tell(serial, News::Exited { code, signal }, &[]);
    }

    fn tell_failure(&self, serial: u64, failure: Failure) {
        let Failure { message, program } = failure;
        self.tell(serial, News::Failed { message, program }, &[]);
    }

    fn tell(&self, serial: u64, news: News, descriptors: &[BorrowedFd<'_>]) {
        if let Ok(text) = serde_json::to_vec(&news) {
            // Nobody to hear it means that the sandbox is gone, and so are we in a moment.
            let _ = packet::send(&self.socket, serial, &text, descriptors);
        }
    }
}

fn read(message: &packet::Message) -> Result<Request, Failure> {
    if !message.is_whole {
        return Err(no_descriptors());
    }
    serde_json::from_slice(&message.text).map_err(failed("what the sandbox asks for"))
}

fn no_descriptors() -> Failure {
    failed("the pod's inner process")("it has too many open files")
}

/// Kills a process. One that is gone already is as good.
fn end(process: &OwnedFd) {
    let _ = rustix::process::pidfd_send_signal(process, Signal::KILL);
}

/// Returns a file that stands for the pod's network: nobody else can open that of a process that hides.
fn set_up(plan: &PodSetUp) -> Result<OwnedFd, Failure> {
    let mut flags = UnshareFlags::empty();
    flags.set(UnshareFlags::NEWNET, plan.network);
    flags.set(UnshareFlags::NEWIPC, plan.ipc);
    flags.set(UnshareFlags::NEWUTS, plan.hostname.is_some());
    linux::namespace::unshare(flags).map_err(failed("making the pod's namespaces"))?;
    if let Some(hostname) = &plan.hostname {
        rustix::system::sethostname(hostname.as_bytes())
            .map_err(failed("setting the host name"))?;
    }
    if plan.network {
        let route = Route::open().map_err(failed("opening the pod's network"))?;
        route.set_up("lo").map_err(failed("bringing lo up"))?;
    }
    for (name, value) in &plan.sysctls {
        let path = format!("/proc/sys/{}", name.replace('.', "/"));
        std::fs::write(path, value).map_err(failed(format!("setting sysctl {name}")))?;
    }
    linux::namespace::own_network().map_err(failed("the pod's network"))
}

fn set_up_network(plan: &NetworkSetUp) -> Result<(), Failure> {
    let address = Prefixed {
        address: plan.address,
        length: plan.prefix,
    };
    let done = || -> io::Result<()> {
        let route = Route::open()?;
        once(route.add_address(&plan.interface, address))?;
        route.set_up(&plan.interface)?;
        once(route.add_default_route(plan.gateway))
    };
    done().map_err(failed("setting up the pod's interface"))
}

/// It may have been done before, by an attempt that failed later.
fn once(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        done => done,
    }
}

fn socket(v6: bool, datagrams: bool) -> Result<OwnedFd, Failure> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    let family = if v6 {
        AddressFamily::INET6
    } else {
        AddressFamily::INET
    };
    let kind = if datagrams {
        SocketType::DGRAM
    } else {
        SocketType::STREAM
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(family, kind, flags, None).map_err(failed("a socket"))
}
