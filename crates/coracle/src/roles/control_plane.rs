//! `coracle internal control-plane`: the process that upstream's components are children of.
//!
//! It moves into namespaces of its own while it has a single thread, becomes their first process, and
//! then supervises. Commands come on standard input and events go to standard output; see
//! `control_plane::protocol`.

use std::fs::File;
use std::io::{self, BufRead, Write};
use std::os::fd::OwnedFd;
use std::process::ExitCode;

use anyhow::Context;
use control_plane::{ClusterConfig, ControlPlaneCommand, ControlPlaneDir, ControlPlaneEvent};
use linux::process::Fork;
use rustix::process::{Signal, WaitOptions};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::unix::pipe::Receiver;
use tokio::sync::mpsc;

/// The role's entry: stays outside as the parent of the new namespaces' first process.
pub fn main() -> anyhow::Result<ExitCode> {
    if let Err(error) = linux::namespace::enter_private() {
        return broken(&format!(
            "this host does not let you make namespaces ({error}); `coracle doctor` says more"
        ));
    }
    let outside = rustix::process::getpid();
    // Slurm may signal every process of a job at once. This one has nothing to end in order, and its
    // death would be the death of all inside, so it is deaf: the leader's word counts.
    let held = crate::guard::deaf()?;
    match linux::process::fork()? {
        Fork::Parent(first) => {
            let waited = rustix::process::waitpid(Some(first), WaitOptions::empty())?;
            let code = waited.map_or(1, |(_, status)| linux::process::shell_code(status));
            Ok(crate::exit::code(code))
        }
        Fork::Child => {
            held.release()?;
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // Inside, the parent's id reads as 0; whether it is still there shows outside.
            if !std::path::Path::new(&format!("/proc/{outside}")).exists() {
                return Ok(ExitCode::FAILURE);
            }
            first_process()
        }
    }
}

fn first_process() -> anyhow::Result<ExitCode> {
    let config = match read_start() {
        Ok(config) => config,
        Err(error) => return broken(&format!("{error:#}")),
    };
    let home = match ControlPlaneDir::mount(&config) {
        Ok(home) => home,
        Err(error) => {
            return broken(&format!(
                "cannot set up the control plane's place in memory: {error}"
            ));
        }
    };
    tell(&ControlPlaneEvent::Up { pid: id_outside()? })?;
    crate::block_on(supervise(config, home))
}

async fn supervise(config: ClusterConfig, home: ControlPlaneDir) -> anyhow::Result<ExitCode> {
    // The leader's standard input is not for us, and a first process ignores signals it has no
    // handler for: only the end of the input, or our own end, stops the control plane.
    match network::egress::EgressProxy::bind(&home.egress_socket()) {
        Ok(proxy) => drop(tokio::spawn(proxy.serve())),
        Err(error) => return broken(&format!("cannot listen on the egress socket: {error}")),
    }
    let (commands, received) = mpsc::channel(1);
    let (events, mut happened) = mpsc::unbounded_channel();
    tokio::spawn(read_commands(commands));
    let telling = tokio::spawn(async move {
        while let Some(event) = happened.recv().await {
            if tell(&event).is_err() {
                break;
            }
        }
    });
    let ended = control_plane::supervisor::run(config, home, received, events).await;
    let _ = telling.await;
    match ended {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => broken(&format!("{:#}", anyhow::Error::from(error))),
    }
}

/// The first line of the input, read without touching what comes after it.
fn read_start() -> anyhow::Result<ClusterConfig> {
    let mut line = String::new();
    // No buffer: what follows the first line is left for later.
    io::BufReader::with_capacity(1, File::from(input()?)).read_line(&mut line)?;
    match serde_json::from_str(&line).context("the first command is not understood")? {
        ControlPlaneCommand::Start(config) => Ok(*config),
        ControlPlaneCommand::StopComponents => anyhow::bail!("the first command must be to start"),
    }
}

/// Standard input as a file of its own.
fn input() -> io::Result<OwnedFd> {
    rustix::stdio::stdin().try_clone_to_owned()
}

async fn read_commands(commands: mpsc::Sender<ControlPlaneCommand>) {
    // Not `tokio::io::stdin`: its thread would keep the process alive until the next line.
    let Ok(pipe) = input().and_then(Receiver::from_owned_fd) else {
        tracing::error!("standard input is no pipe");
        return;
    };
    let mut lines = BufReader::new(pipe).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        match serde_json::from_str(&line) {
            Ok(command) => drop(commands.send(command).await),
            Err(error) => tracing::error!(%error, "a command is not understood"),
        }
    }
    // Dropping the sender stops the control plane.
}

fn tell(event: &ControlPlaneEvent) -> io::Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, event)?;
    out.write_all(b"\n")?;
    out.flush()
}

fn broken(reason: &str) -> anyhow::Result<ExitCode> {
    tell(&ControlPlaneEvent::SetupFailed {
        reason: reason.to_owned(),
    })?;
    Ok(ExitCode::FAILURE)
}

/// Our process id as everybody else knows it: `/proc` still is the outside's.
fn id_outside() -> anyhow::Result<u32> {
    let link = std::fs::read_link("/proc/self").context("cannot read /proc/self")?;
    let id = link.to_str().and_then(|id| id.parse().ok());
    id.context("/proc/self is no process id")
}
