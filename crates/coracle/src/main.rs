//! Coracle: real Kubernetes on a Slurm cluster, as an ordinary user.
//!
//! One binary holds every role. Users call `coracle run`, `coracle doctor`, `coracle image` and
//! `coracle kubernetes`; Coracle itself starts `coracle internal …` on the nodes. This crate resolves the
//! command line, wires the other crates together and tells the user what happens; docs/architecture.md
//! shows the processes.

mod bars;
mod carried;
mod cli;
mod client;
mod control_plane_role;
mod doctor;
mod exit;
mod guard;
mod handover;
mod hub_role;
mod image;
mod janitor_role;
mod kubernetes;
mod node;
mod progress;
mod run;
mod sandbox_role;
mod say;
mod seed;
mod token;

use std::process::ExitCode;

use clap::Parser;

use crate::cli::{Cli, Command, InternalCommand};

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    log_to_stderr();
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    // Every role decides by itself when it starts threads: some fork before.
    let ended = match cli.command {
        Command::Run(args) => run::main(args),
        Command::Doctor(args) => block_on(doctor::run(args)),
        Command::Kubernetes(command) => {
            block_on(kubernetes::run(command)).map(|()| ExitCode::SUCCESS)
        }
        Command::Image(command) => block_on(image::run(command)).map(|()| ExitCode::SUCCESS),
        Command::Internal(InternalCommand::ImagePull) => block_on(image::role::main()),
        Command::Internal(InternalCommand::ControlPlane) => control_plane_role::main(),
        Command::Internal(InternalCommand::Node) => node::main(),
        Command::Internal(InternalCommand::Hub) => hub_role::main(),
        Command::Internal(InternalCommand::Janitor) => janitor_role::main(),
        Command::Internal(InternalCommand::Sandbox) => sandbox_role::main(),
        Command::Internal(InternalCommand::Remove { dir }) => node::place::remove(&dir)
            .map(|()| ExitCode::SUCCESS)
            .map_err(Into::into),
        Command::Internal(InternalCommand::Receive { dir }) => carried::receive::main(&dir),
        Command::Internal(InternalCommand::Probe { name }) => {
            Ok(exit::code(linux::probe::main(&name)))
        }
    };
    ended.unwrap_or_else(|error| exit::report(&error))
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
        ExitCode::from(exit::Code::Usage as u8)
    } else {
        ExitCode::SUCCESS
    }
}

/// `CORACLE_LOG` chooses what is logged, in the form of `RUST_LOG`; warnings by default. The client library
/// would report every attempt to connect while the API server is not there yet.
fn log_to_stderr() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("CORACLE_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn,kube_client=off"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .with_target(false)
        // A terminal that is gone must not take us with it.
        .log_internal_errors(false)
        .init();
}
