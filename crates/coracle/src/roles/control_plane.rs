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
use linux::process::ForkResult;
use rustix::process::{Signal, WaitOptions};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::unix::pipe::Receiver;
use tokio::sync::mpsc;

/// Entry point of the role. This process stays outside of the new pid namespace, as the parent of its pid 1.
pub fn main() -> anyhow::Result<ExitCode> {
    if let Err(error) = linux::namespace::enter_private() {
        return report_setup_failure(&format!(
            "this host does not allow user namespaces ({error}); `coracle doctor` shows why"
        ));
    }
    let parent = rustix::process::getpid();
    // Slurm may signal every process of a job at once. If this process died, everything in the pid namespace would be killed, so
    // block these signals: the leader stops the control plane.
    let blocked = crate::guard::block_job_signals()?;
    match linux::process::fork()? {
        ForkResult::Parent(child) => {
            let waited = rustix::process::waitpid(Some(child), WaitOptions::empty())?;
            let code = waited.map_or(1, |(_, status)| linux::process::shell_exit_code(status));
            Ok(crate::exit::code(code))
        }
        ForkResult::Child => {
            blocked.restore_mask()?;
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // getppid() is 0 in the new pid namespace, but /proc is still the outer one: check there that the parent has not died.
            if !std::path::Path::new(&format!("/proc/{parent}")).exists() {
                return Ok(ExitCode::FAILURE);
            }
            run_as_pid_1()
        }
    }
}

fn run_as_pid_1() -> anyhow::Result<ExitCode> {
    let config = match read_config() {
        Ok(config) => config,
        Err(error) => return report_setup_failure(&format!("{error:#}")),
    };
    let dir = match ControlPlaneDir::mount(&config) {
        Ok(dir) => dir,
        Err(error) => {
            return report_setup_failure(&format!(
                "cannot set up the control plane's tmpfs: {error}"
            ));
        }
    };
    send_event(&ControlPlaneEvent::Up {
        pid: pid_outside()?,
    })?;
    crate::block_on(supervise(config, dir))
}

async fn supervise(config: ClusterConfig, dir: ControlPlaneDir) -> anyhow::Result<ExitCode> {
    // As pid 1 this process ignores signals without a handler. The control plane stops at the end of standard input, or with this
    // process.
    match network::egress::EgressProxy::bind(&dir.egress_socket()) {
        Ok(proxy) => drop(tokio::spawn(proxy.serve())),
        Err(error) => {
            return report_setup_failure(&format!("cannot listen on the egress socket: {error}"));
        }
    }
    let (command_sender, commands) = mpsc::channel(1);
    let (events, mut event_receiver) = mpsc::unbounded_channel();
    tokio::spawn(read_commands(command_sender));
    let event_writer = tokio::spawn(async move {
        while let Some(event) = event_receiver.recv().await {
            if send_event(&event).is_err() {
                break;
            }
        }
    });
    let result = control_plane::supervisor::run(config, dir, commands, events).await;
    let _ = event_writer.await;
    match result {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => report_setup_failure(&format!("{:#}", anyhow::Error::from(error))),
    }
}

/// Reads the first line of the input and leaves the rest unread.
fn read_config() -> anyhow::Result<ClusterConfig> {
    let mut line = String::new();
    // A buffer of one byte, so that later commands stay in the pipe.
    io::BufReader::with_capacity(1, File::from(stdin()?)).read_line(&mut line)?;
    match serde_json::from_str(&line).context("cannot parse the first command")? {
        ControlPlaneCommand::Start(config) => Ok(*config),
        ControlPlaneCommand::StopComponents => anyhow::bail!("expected Start as the first command"),
    }
}

fn stdin() -> io::Result<OwnedFd> {
    rustix::stdio::stdin().try_clone_to_owned()
}

async fn read_commands(commands: mpsc::Sender<ControlPlaneCommand>) {
    // `tokio::io::stdin` uses a blocking thread, which would keep the process alive until the next line.
    let Ok(pipe) = stdin().and_then(Receiver::from_owned_fd) else {
        tracing::error!("standard input is not a pipe");
        return;
    };
    let mut lines = BufReader::new(pipe).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        match serde_json::from_str(&line) {
            Ok(command) => drop(commands.send(command).await),
            Err(error) => tracing::error!(%error, "cannot parse a command"),
        }
    }
    // Dropping the sender stops the control plane.
}

fn send_event(event: &ControlPlaneEvent) -> io::Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, event)?;
    out.write_all(b"\n")?;
    out.flush()
}

fn report_setup_failure(reason: &str) -> anyhow::Result<ExitCode> {
    send_event(&ControlPlaneEvent::SetupFailed {
        reason: reason.to_owned(),
    })?;
    Ok(ExitCode::FAILURE)
}

/// This process's pid outside of its pid namespace: `/proc` is still the outer one.
fn pid_outside() -> anyhow::Result<u32> {
    let link = std::fs::read_link("/proc/self").context("cannot read /proc/self")?;
    let pid = link.to_str().and_then(|pid| pid.parse().ok());
    pid.context("/proc/self is not a pid")
}
