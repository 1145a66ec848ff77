//! `coracle internal control-plane`: the parent process of the upstream control plane components.
//!
//! It moves into its own namespaces while it has a single thread, forks pid 1 of the new pid namespace, and supervises the
//! components there. It reads commands from standard input and writes events to standard output; see `control_plane::protocol`.

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

/// Entry point of the role. This process stays outside of the new pid namespace, as the parent of its pid 1.
pub fn main() -> anyhow::Result<ExitCode> {
    if let Err(error) = linux::namespace::enter_private() {
        return broken(&format!(
            "this host does not let you make namespaces ({error}); `coracle doctor` says more"
        ));
    }
    let outside = rustix::process::getpid();
    // Slurm may signal every process of a job at once. If this process died, everything in the pid namespace would be killed, so
    // block these signals: the leader stops the control plane.
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
            // getppid() is 0 in the new pid namespace, but /proc is still the outer one: check there that the parent has not died.
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
    // As pid 1 this process ignores signals without a handler. The control plane stops at the end of standard input, or with this
    // process.
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

/// Reads the first line of the input and leaves the rest unread.
fn read_start() -> anyhow::Result<ClusterConfig> {
    let mut line = String::new();
    // A buffer of one byte, so that later commands stay in the pipe.
    io::BufReader::with_capacity(1, File::from(input()?)).read_line(&mut line)?;
    match serde_json::from_str(&line).context("the first command is not understood")? {
        ControlPlaneCommand::Start(config) => Ok(*config),
        ControlPlaneCommand::StopComponents => anyhow::bail!("the first command must be to start"),
    }
}

fn input() -> io::Result<OwnedFd> {
    rustix::stdio::stdin().try_clone_to_owned()
}

async fn read_commands(commands: mpsc::Sender<ControlPlaneCommand>) {
    // `tokio::io::stdin` uses a blocking thread, which would keep the process alive until the next line.
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

/// This process's pid outside of its pid namespace: `/proc` is still the outer one.
fn id_outside() -> anyhow::Result<u32> {
    let link = std::fs::read_link("/proc/self").context("cannot read /proc/self")?;
    let id = link.to_str().and_then(|id| id.parse().ok());
    id.context("/proc/self is no process id")
}
