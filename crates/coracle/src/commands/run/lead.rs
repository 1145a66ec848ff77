//! The leader: starts a cluster, runs the workload in it, and ends both in order.

use console::{Failure, FailureCode, Phases, say};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use cluster::{Cluster, ClusterEnd, ClusterOptions, WORKLOAD_MARK, carry};
use rustix::process::{Pid, Signal};
use slurm::{Allocation, Slurm};
use tokio::process::Child;
use tokio::signal::unix::{SignalKind, signal};

use super::Settings;
use super::addons::Addons;
use super::look::FINISHED;
use super::manifests;
use super::workload::{Manifests, Workload, environment};
use crate::cli::RunOptions;
use crate::exit;
use crate::waiting_tasks;
use releases::Release;

/// Address space that upstream's components need. They use a tenth of it as memory.
const ADDRESS_SPACE: u64 = 4 << 30;
/// Debounce window for signals.
const ONE_WORD: Duration = Duration::from_millis(500);

/// Runs a cluster on the nodes of `allocation` until the workload ends.
pub async fn lead(
    settings: Settings,
    workload: Workload,
    allocation: Allocation,
) -> anyhow::Result<ExitCode> {
    let mut told = Told::listen()?;
    check_address_space()?;
    let mut progress = Phases::new();
    let carried_dir = carry::workload().map(|(dir, _)| dir);
    let slurm = Slurm::find().map_err(cluster::slurm_failure)?;
    let release = Release::find(settings.options.kubernetes.as_deref())?;
    let launch = async {
        let options = cluster_options(&settings.options);
        let seed = cluster::ensure_seed(&release, &options.service_cidr, &mut progress).await;
        Cluster::launch(&options, &allocation, &release, seed, slurm.clone()).await
    };
    let mut cluster = tokio::select! {
        launched = launch => launched?,
        signal = told.next() => return Ok(exit::code(exit::of_signal(signal))),
    };
    let mark = cluster.mark.clone();

    let patience = Duration::from_secs(settings.options.start_timeout);
    // Scripts create a Job and wait for its Pods in the next line, which fails unless the controllers run.
    let controllers = matches!(workload, Workload::Program { .. }) && !settings.options.early;
    let started = tokio::select! {
        started = cluster.until_ready(patience, controllers, &mut progress) => started.map(|()| None),
        signal = told.next() => Ok(Some(signal)),
    };
    let addons = match started {
        Ok(None) => Some(Addons::start(&cluster, slurm, &allocation).await),
        _ => None,
    };
    let ended = match started {
        Ok(None) => run(&mut cluster, workload, carried_dir.as_deref(), &mut told).await,
        Ok(Some(signal)) => Ok(exit::of_signal(signal)),
        Err(error) => Err(error),
    };
    progress.abandon();
    if told.guard_is_gone() {
        // The guard was killed, so do its work. Do it while the agents run: if this process is killed too, they do it.
        let _ = linux::process::kill_marked(&format!("{WORKLOAD_MARK}={mark}"));
        waiting_tasks::dismiss_all(&allocation).await;
    }
    let volumes_timeout = cluster.grace.nodes / 3;
    cluster
        .stop(async {
            if let Some(addons) = addons {
                addons.stop(volumes_timeout).await;
            }
        })
        .await;
    if settings.options.report_end && matches!(ended, Ok(0)) {
        say(format_args!("{FINISHED}"));
    }
    ended.map(exit::code)
}

fn cluster_options(options: &RunOptions) -> ClusterOptions {
    ClusterOptions {
        pod_cidr: options.pod_cidr.clone(),
        service_cidr: options.service_cidr.clone(),
        api_port: options.api_port,
        pods_as_steps: options.pods_as_steps,
        verbose: options.verbose,
        log_dir: options.logs.clone(),
    }
}

/// Refuses a low `ulimit -v`. Go programs reserve much more address space than they use, and crash below such a limit without a clear
/// error.
fn check_address_space() -> Result<(), Failure> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::As).current;
    match limit {
        Some(limit) if limit < ADDRESS_SPACE => Err(Failure::new(
            FailureCode::Host,
            format!(
                "the address space of processes is limited to {} MiB",
                limit >> 20
            ),
        )
        .hint(
            "lift the limit with `ulimit -v unlimited` first; Slurm limits memory by other means",
        )),
        _ => Ok(()),
    }
}

/// Runs the workload. If it was carried, it has been moved from `carried_dir`.
async fn run(
    cluster: &mut Cluster,
    workload: Workload,
    carried_dir: Option<&Path>,
    told: &mut Told,
) -> anyhow::Result<i32> {
    let files = cluster.files()?;
    let workload = match carried_dir {
        Some(dir) => workload.moved(dir, &files.workload()),
        None => workload,
    };
    let mut env = environment(
        &cluster.name,
        &files.kubeconfig(),
        &files.programs(),
        &files.cache(),
        &cluster.api,
        &cluster.token,
        cluster.node_port,
    );
    env.insert(WORKLOAD_MARK, cluster.mark.clone().into());
    match workload {
        Workload::Program { program, args } => {
            let child = spawn(&program, &args, &env)?;
            run_program(child, cluster, told).await
        }
        Workload::Manifests(manifests) => run_manifests(&manifests, &env, cluster, told).await,
    }
}

fn spawn(
    program: &Path,
    args: &[OsString],
    env: &BTreeMap<&'static str, OsString>,
) -> anyhow::Result<Child> {
    let mut command = tokio::process::Command::new(program);
    command.args(args).envs(env).kill_on_drop(true);
    // In this process group: the workload may be a shell that uses the terminal.
    linux::process::bind_to_us_in_group(command.as_std_mut(), Signal::KILL);
    command.spawn().map_err(|error| {
        Failure::new(
            FailureCode::NoWorkload,
            format!("cannot run {}", program.display()),
        )
        .because(error)
        .hint("check that it is a program for this machine, or a script whose interpreter exists")
        .into()
    })
}

async fn run_program(
    mut child: Child,
    cluster: &mut Cluster,
    told: &mut Told,
) -> anyhow::Result<i32> {
    loop {
        tokio::select! {
            status = child.wait() => return Ok(exit::of_child(status?)),
            word = told.word() => match word {
                Word::ForWorkload(signal) => pass_on(&child, signal),
                Word::End(signal) => {
                    pass_on(&child, signal);
                    break;
                }
            },
            ended = cluster.watch() => match ended {
                ClusterEnd::BySlurm => {
                    pass_on(&child, Signal::TERM);
                    break;
                }
                ClusterEnd::Broken(failure) => {
                    pass_on(&child, Signal::TERM);
                    let _ = tokio::time::timeout(cluster.grace.workload, child.wait()).await;
                    return Err(failure.into());
                }
            },
        }
    }
    let status = tokio::select! {
        status = child.wait() => Some(status?),
        () = tokio::time::sleep(cluster.grace.workload) => None,
        () = told.impatience() => None,
    };
    match status {
        Some(status) => Ok(exit::of_child(status)),
        None => {
            child.kill().await.context("cannot end the workload")?;
            Ok(exit::of_signal(Signal::KILL))
        }
    }
}

async fn run_manifests(
    manifests: &Manifests,
    env: &BTreeMap<&'static str, OsString>,
    cluster: &mut Cluster,
    told: &mut Told,
) -> anyhow::Result<i32> {
    let client = cluster.client.clone();
    tokio::select! {
        code = manifests::run(manifests, env, client) => code,
        signal = told.next() => Ok(exit::of_signal(signal)),
        ended = cluster.watch() => match ended {
            ClusterEnd::BySlurm => Ok(exit::of_signal(Signal::TERM)),
            ClusterEnd::Broken(failure) => Err(failure.into()),
        },
    }
}

fn pass_on(child: &Child, signal: Signal) {
    // The terminal has sent SIGINT to the whole group; a second one may mean something else to the workload.
    if signal == Signal::INT && std::io::stdin().is_terminal() {
        return;
    }
    if let Some(pid) = child.id().and_then(|id| Pid::from_raw(id.cast_signed())) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}

/// The action that a signal requests.
enum Word {
    /// End the cluster in order.
    End(Signal),
    /// Forward it to the workload (`sbatch --signal=USR1@60`).
    ForWorkload(Signal),
}

/// Receives the leader's signals.
struct Told {
    hangup: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
    user: [tokio::signal::unix::Signal; 2],
    guard: Option<Pid>,
}

impl Told {
    fn listen() -> anyhow::Result<Self> {
        Ok(Self {
            hangup: signal(SignalKind::hangup())?,
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            user: [
                signal(SignalKind::user_defined1())?,
                signal(SignalKind::user_defined2())?,
            ],
            guard: rustix::process::getppid(),
        })
    }

    async fn word(&mut self) -> Word {
        let [first, second] = &mut self.user;
        tokio::select! {
            _ = self.hangup.recv() => Word::End(Signal::HUP),
            _ = self.interrupt.recv() => Word::End(Signal::INT),
            _ = self.terminate.recv() => Word::End(Signal::TERM),
            _ = first.recv() => Word::ForWorkload(Signal::USR1),
            _ = second.recv() => Word::ForWorkload(Signal::USR2),
        }
    }

    /// Waits for the next signal that ends the cluster. Drops signals for the workload, which does not run yet or any more.
    async fn next(&mut self) -> Signal {
        loop {
            if let Word::End(signal) = self.word().await {
                return signal;
            }
        }
    }

    /// Waits for a second Ctrl-C of the user. Slurm and the guard may send duplicates of the first signal, so debounce.
    async fn impatience(&mut self) {
        tokio::time::sleep(ONE_WORD).await;
        // Drop duplicates.
        while tokio::time::timeout(Duration::ZERO, self.next())
            .await
            .is_ok()
        {}
        while self.next().await != Signal::INT {}
    }

    fn guard_is_gone(&self) -> bool {
        rustix::process::getppid() != self.guard
    }
}
