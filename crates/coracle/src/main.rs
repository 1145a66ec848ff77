//! Coracle: real Kubernetes on a Slurm cluster, as an ordinary user.
//!
//! One binary contains every role. Users call `coracle run`, `coracle doctor`, `coracle image`, `coracle logs` and
//! `coracle kubernetes`; Coracle itself starts `coracle internal …` on the nodes. This crate parses the command line, connects
//! the other crates and reports to the user. docs/architecture.md shows the processes.

mod back_off;
mod cli;
mod commands;
mod exit;
mod guard;
mod log;
mod node_dir;
mod pod_lock;
mod probe;
mod roles;
mod rootfs;
mod settings;
mod waiting_tasks;

use console::FailureCode;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

use crate::cli::{Cli, Command, InternalCommand};
use crate::commands::{doctor, image, kubernetes, logs, run};
use crate::roles::{control_plane, hub, janitor, node, receive, sandbox};

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    // The agent serves its own log through the kubelet API.
    log::start(matches!(
        cli.command,
        Command::Internal(InternalCommand::Node)
    ));
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    // Each role starts its own threads, because some roles fork first.
    let ended = match cli.command {
        Command::Run(args) => run::main(args),
        Command::Doctor(args) => block_on(doctor::run(args)),
        Command::Kubernetes(command) => {
            block_on(kubernetes::run(command)).map(|()| ExitCode::SUCCESS)
        }
        Command::Image(command) => block_on(image::run(command)).map(|()| ExitCode::SUCCESS),
        Command::Logs(args) => block_on(logs::run(args)),
        Command::Internal(InternalCommand::ControlPlane) => control_plane::main(),
        Command::Internal(InternalCommand::Node) => node::main(),
        Command::Internal(InternalCommand::Hub { .. }) => hub::main(),
        Command::Internal(InternalCommand::Janitor) => janitor::main(),
        Command::Internal(InternalCommand::Sandbox { .. }) => sandbox::main(),
        Command::Internal(InternalCommand::Remove { dir }) => node_dir::remove(&dir)
            .map(|()| ExitCode::SUCCESS)
            .map_err(Into::into),
        Command::Internal(InternalCommand::FreeLayers { dir, low, age }) => {
            node::image_gc::free(&dir, low, Duration::from_secs(age))
        }
        Command::Internal(InternalCommand::Receive { dir }) => receive::main(&dir),
        Command::Internal(InternalCommand::Probe { name }) => {
            Ok(exit::code(linux::probe::main(&name)))
        }
    };
    ended.unwrap_or_else(|error| exit::report(&error))
}

/// Waits until the process of a pidfd exits: the pidfd is readable from then on. It is wrapped as a pipe only to poll it.
async fn ended(process: std::os::fd::OwnedFd) -> std::io::Result<()> {
    let process = tokio::net::unix::pipe::Receiver::from_owned_fd_unchecked(process)?;
    process.readable().await
}

/// Runs a future on this thread alone. A parent death signal is sent when the *thread* that forked the child exits, so children
/// must be forked on the thread that lives longest.
fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let done = runtime.block_on(work);
    // Does not wait for blocking threads: one may be reading from the terminal.
    runtime.shutdown_background();
    done
}

/// Prints clap's message. Help goes to standard output and is not an error.
fn usage(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    if error.use_stderr() {
        ExitCode::from(FailureCode::Usage as u8)
    } else {
        ExitCode::SUCCESS
    }
}
