//! Coracle: real Kubernetes on a Slurm cluster, as an ordinary user.
//!
//! One binary contains every role. Users call `coracle run`, `coracle kubectl`, `coracle logs` and the other commands; Coracle itself
//! starts `coracle internal …` on the nodes. This crate parses the command line, connects
//! the other crates and reports to the user; it leaves all else to them. docs/architecture.md shows the processes.
//!
//! Start reading at `commands/run/leader.rs` (a cluster's leader), `roles/node/` (a node's agent) and `roles/sandbox/` (a pod).

// Some development dependencies are used only by the tests in `tests/`.
#![cfg_attr(not(test), warn(unused_crate_dependencies))]

mod back_off;
mod cgroup;
mod cleanup;
mod cli;
mod commands;
mod completion_values;
mod exit;
mod foreground_srun;
mod guard;
mod launch;
mod log;
mod node_dir;
mod node_hub;
mod process_limit;
mod process_lock;
mod roles;
mod running_clusters;
mod sealed_program;
mod settings;
mod snapshotter;
mod waiting_tasks;

use console::FailureCode;
use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory, Parser};
use clap_complete::CompleteEnv;

use crate::cli::{Cli, Command, InternalCommand};
use crate::commands::{doctor, image, kubeconfig, kubectl, kubernetes, logs, man, run, shell};
use crate::roles::{
    control_plane, free_layers, hub, hub_inside, janitor, node, pod_job, probe, receive, remove,
    sandbox,
};

fn main() -> ExitCode {
    // If the shell asks for completions, this prints them and exits.
    CompleteEnv::with_factory(Cli::command)
        .var(completion_values::VARIABLE)
        .complete();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return print_usage(&error),
    };
    // The agent serves its own log through the kubelet API.
    log::init(matches!(
        cli.command,
        Command::Internal(InternalCommand::Node)
    ));
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    // Each role starts its own threads, because some roles fork first.
    let result = match cli.command {
        Command::Run(args) => run::main(args),
        Command::Doctor(args) => doctor::main(args),
        Command::Kubernetes(command) => kubernetes::main(command),
        Command::Image(command) => image::main(command),
        Command::Logs(args) => logs::main(args),
        Command::Kubectl(args) => kubectl::main(args),
        Command::Shell(args) => shell::main(args),
        Command::Kubeconfig(args) => kubeconfig::main(args),
        Command::Completion(args) => commands::completion::main(args),
        Command::Man(args) => man::main(args),
        Command::Internal(role) => match role {
            InternalCommand::ControlPlane => control_plane::main(),
            InternalCommand::FreeLayers { dir, low, age } => {
                free_layers::main(&dir, low, Duration::from_secs(age))
            }
            InternalCommand::Hub => hub::main(),
            InternalCommand::HubInside => hub_inside::main(),
            InternalCommand::Janitor => janitor::main(),
            InternalCommand::Node => node::main(),
            InternalCommand::PodJob => pod_job::main(),
            InternalCommand::Probe { name } => probe::main(&name),
            InternalCommand::Receive { dir } => receive::main(&dir),
            InternalCommand::Remove { dir, pod } => remove::main(&dir, pod),
            InternalCommand::Sandbox { .. } => sandbox::main(),
        },
    };
    result.unwrap_or_else(|error| exit::report(&error))
}

/// Runs a future on this thread alone. A parent death signal is sent when the *thread* that forked the child exits, so children
/// must be forked on the thread that lives longest.
fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let result = runtime.block_on(work);
    // Does not wait for blocking threads: one may be reading from the terminal.
    runtime.shutdown_background();
    result
}

/// Prints clap's message. Help goes to standard output and is not an error.
fn print_usage(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    if error.use_stderr() {
        ExitCode::from(FailureCode::Usage as u8)
    } else {
        ExitCode::SUCCESS
    }
}
