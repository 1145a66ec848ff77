//! Coracle: real Kubernetes on a Slurm cluster, as an ordinary user.
//!
//! One binary holds every role. Users call `coracle run`, `coracle doctor`, `coracle image`, `coracle logs`
//! and `coracle kubernetes`; Coracle itself starts `coracle internal …` on the nodes. This crate resolves the
//! command line, wires the other crates together and tells the user what happens; docs/architecture.md
//! shows the processes.

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
    // A node is asked for its log.
    log::start(matches!(
        cli.command,
        Command::Internal(InternalCommand::Node)
    ));
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    // Every role decides by itself when it starts threads: some fork before.
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

/// Waits for the end of a process, given its descriptor, which is readable from then on. (A pipe by name only: it is never read.)
async fn ended(process: std::os::fd::OwnedFd) -> std::io::Result<()> {
    let process = tokio::net::unix::pipe::Receiver::from_owned_fd_unchecked(process)?;
    process.readable().await
}

/// Runs asynchronous work on this thread alone. Children that die with us watch the thread that
/// started them, so it must be the one that lives longest; and no role has work for a second one.
fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let done = runtime.block_on(work);
    // Not waiting for a thread that may sit in a read of the terminal for ever.
    runtime.shutdown_background();
    done
}

/// Clap's own message; help goes to standard output and is no error.
fn usage(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    if error.use_stderr() {
        ExitCode::from(FailureCode::Usage as u8)
    } else {
        ExitCode::SUCCESS
    }
}
