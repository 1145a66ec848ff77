//! The leader: starts a cluster, runs the workload in it, and ends both in order.

use console::{Failure, FailureCode, Phases, print_stderr};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use cluster::{
    Cluster, ClusterEnd, ClusterKeys, ClusterMembership, ClusterOptions, ClusterStorage,
    WORKLOAD_MARK, carry,
};
use rustix::process::{Pid, Signal};
use slurm::{Allocation, Slurm};
use tokio::process::Child;
use tokio::signal::unix::{SignalKind, signal};

use super::RunSettings;
use super::addons::Addons;
use super::end_reason::{EndCause, describe_end};
use super::file_check::WORKLOAD_SUCCEEDED;
use super::manifests;
use super::pod_logs::LogStyle;
use super::progress::{ObservedWorkload, ProgressOptions, WorkloadOutcome};
use super::settings::host_path_mappings;
use super::workload::{Manifests, Workload, environment};
use crate::cli::{LogPrefix, RunOptions};
use crate::exit;
use crate::waiting_tasks;
use releases::Release;

/// Address space that upstream's components need. They use a tenth of it as memory.
const MIN_ADDRESS_SPACE: u64 = 4 << 30;
/// Time to delete volumes at the end. The rest of the time is the pods'.
const MAX_VOLUMES_TIMEOUT: Duration = Duration::from_secs(2);
/// Debounce window for signals.
const SIGNAL_DEBOUNCE: Duration = Duration::from_millis(500);

/// Runs a cluster on the nodes of `allocation` until the workload ends.
pub async fn run(
    settings: RunSettings,
    workload: Workload,
    allocation: Allocation,
) -> anyhow::Result<ExitCode> {
    let mut signals = LeaderSignals::listen()?;
    check_address_space()?;
    let mut phases = Phases::new();
    let carried_dir = carry::workload().map(|(dir, _)| dir);
    let slurm = Slurm::find().map_err(cluster::slurm_failure)?;
    let release = Release::find(settings.options.kubernetes.as_deref())?;
    let launch = async {
        let has_program = matches!(workload, Workload::Program { .. });
        let options = cluster_options(&settings.options, has_program)?;
        let seed = cluster::ensure_seed(&release, &options.service_cidr, &mut phases).await;
        Cluster::launch(&options, &allocation, &release, seed, slurm.clone()).await
    };
    let mut cluster = tokio::select! {
        launched = launch => launched?,
        signal = signals.next_end() => return Ok(exit::code(exit::of_signal(signal))),
    };
    let mark = cluster.mark.clone();

    let start_timeout = Duration::from_secs(settings.options.start_timeout);
    // Scripts create a Job and wait for its Pods in the next line, which fails unless the controllers run.
    let controllers = matches!(workload, Workload::Program { .. }) && !settings.options.early;
    let started = tokio::select! {
        started = cluster.wait_until_ready(start_timeout, controllers, &mut phases) => started.map(|()| None),
        signal = signals.next_end() => Ok(Some(signal)),
    };
    let addons = match started {
        Ok(None) => Some(Addons::start(&cluster, slurm.clone(), &allocation).await),
        _ => None,
    };
    let mut observed = None;
    let result = match started {
        Ok(None) => {
            let carried_dir = carried_dir.as_deref();
            let context = WorkloadContext {
                cluster: &mut cluster,
                signals: &mut signals,
                options: &settings.options,
                observed: &mut observed,
            };
            run_workload(context, workload, carried_dir).await
        }
        Ok(Some(signal)) => Ok(exit::of_signal(signal)),
        Err(error) => Err(error),
    };
    phases.cancel();
    if signals.guard_has_died() {
        // The guard was killed, so do its work. Do it while the agents run: if this process is killed too, they do it.
        let _ = linux::process::kill_marked(&format!("{WORKLOAD_MARK}={mark}"));
        waiting_tasks::end_all(&allocation).await;
    }
    let volumes_timeout = (cluster.grace.nodes / 3).min(MAX_VOLUMES_TIMEOUT);
    let reason = match &observed {
        Some((workload, cause)) => {
            workload.begin_stop(cluster.grace.nodes).await;
            let (cause, lost_nodes) = (cause.clone(), cluster.lost_nodes());
            let job = allocation.job_id;
            // Slurm may respond slowly, while the time to end is limited.
            Some(tokio::spawn(async move {
                describe_end(&cause, &lost_nodes, &slurm, job).await
            }))
        }
        None => None,
    };
    cluster
        .stop(async {
            if let (Some((workload, _)), Some(reason)) = (observed, reason) {
                workload.finish(reason.await.unwrap_or_default()).await;
            }
            if let Some(addons) = addons {
                addons.stop(volumes_timeout).await;
            }
        })
        .await;
    if settings.options.report_end && matches!(result, Ok(0)) {
        print_stderr(format_args!("{WORKLOAD_SUCCEEDED}"));
    }
    result.map(exit::code)
}

fn cluster_options(options: &RunOptions, has_program: bool) -> Result<ClusterOptions, Failure> {
    Ok(ClusterOptions {
        host_path_mappings: host_path_mappings(options)?,
        pod_cidr: options.pod_cidr.clone(),
        service_cidr: options.service_cidr.clone(),
        api_port: options.api_port,
        pods_as_steps: options.pods_as_steps,
        storage: ClusterStorage::Memory,
        keys: ClusterKeys::Generated,
        membership: ClusterMembership::Fixed,
        has_program,
        verbose: options.verbose,
        log_dir: options.logs.clone(),
    })
}

/// Refuses a low `ulimit -v`. Go programs reserve much more address space than they use, and crash below such a limit without a clear
/// error.
fn check_address_space() -> Result<(), Failure> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::As).current;
    match limit {
        Some(limit) if limit < MIN_ADDRESS_SPACE => Err(Failure::new(
            FailureCode::Host,
            format!(
                "the address space of processes is limited to {} MiB",
                limit >> 20
            ),
        )
        .with_hint(
            "lift the limit with `ulimit -v unlimited` first; Slurm limits memory by other means",
        )),
        _ => Ok(()),
    }
}

/// What the functions that run a workload need.
struct WorkloadContext<'a> {
    cluster: &'a mut Cluster,
    signals: &'a mut LeaderSignals,
    options: &'a RunOptions,
    /// Receives the observer of manifests, which runs until the nodes have ended, and why they end.
    observed: &'a mut Option<(ObservedWorkload, EndCause)>,
}

/// Runs the workload. If it was carried, it has been moved from `carried_dir`.
async fn run_workload(
    context: WorkloadContext<'_>,
    workload: Workload,
    carried_dir: Option<&Path>,
) -> anyhow::Result<i32> {
    let cluster = &context.cluster;
    let dir = cluster.control_plane_dir()?;
    let workload = match carried_dir {
        Some(from) => workload.moved(from, &dir.workload()),
        None => workload,
    };
    let mut env = environment(
        &cluster.name,
        &dir.kubeconfig(),
        &dir.programs(),
        &dir.cache(),
        &cluster.api,
        &cluster.token,
        cluster.node_port,
    );
    env.insert(WORKLOAD_MARK, cluster.mark.clone().into());
    match workload {
        Workload::Program { program, args } => {
            let child = spawn(&program, &args, &env)?;
            run_program(child, context.cluster, context.signals).await
        }
        Workload::Manifests(manifests) => run_manifests(context, &manifests, &env).await,
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
    linux::process::set_death_signal_in_our_group(command.as_std_mut(), Signal::KILL);
    command.spawn().map_err(|error| {
        Failure::new(
            FailureCode::NoWorkload,
            format!("cannot run {}", program.display()),
        )
        .with_source(error)
        .with_hint(
            "check that it is a program for this machine, or a script whose interpreter exists",
        )
        .into()
    })
}

async fn run_program(
    mut child: Child,
    cluster: &mut Cluster,
    signals: &mut LeaderSignals,
) -> anyhow::Result<i32> {
    loop {
        tokio::select! {
            status = child.wait() => return Ok(exit::of_child(status?)),
            action = signals.next_action() => match action {
                SignalAction::Forward(signal) => forward_signal(&child, signal),
                SignalAction::EndCluster(signal) => {
                    forward_signal(&child, signal);
                    break;
                }
            },
            ended = cluster.watch() => match ended {
                ClusterEnd::JobEnded => {
                    forward_signal(&child, Signal::TERM);
                    break;
                }
                ClusterEnd::ControlPlaneFailed(failure) => {
                    forward_signal(&child, Signal::TERM);
                    let _ = tokio::time::timeout(cluster.grace.workload, child.wait()).await;
                    return Err(failure.into());
                }
            },
        }
    }
    let status = tokio::select! {
        status = child.wait() => Some(status?),
        () = tokio::time::sleep(cluster.grace.workload) => None,
        () = signals.second_interrupt() => None,
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
    context: WorkloadContext<'_>,
    manifests: &Manifests,
    env: &BTreeMap<&'static str, OsString>,
) -> anyhow::Result<i32> {
    let WorkloadContext {
        cluster,
        signals,
        options,
        observed,
    } = context;
    let client = cluster.client.clone();
    let mut workload = None;
    let outcome = async {
        let applied = manifests::apply(manifests, env).await?;
        let started = ObservedWorkload::start(client, applied, progress_options(options)?);
        Ok(workload.insert(started).outcome().await)
    };
    let (result, cause) = tokio::select! {
        outcome = outcome => match outcome {
            Ok(WorkloadOutcome::Done { succeeded }) => (Ok(i32::from(!succeeded)), EndCause::WorkloadDone),
            Ok(WorkloadOutcome::GaveUp { reason }) => (Err(gave_up(&reason).into()), EndCause::GaveUp),
            Err(error) => (Err(error), EndCause::ClusterFailed),
        },
        signal = signals.next_end() => (Ok(exit::of_signal(signal)), EndCause::Signal(signal)),
        ended = cluster.watch() => match ended {
            ClusterEnd::JobEnded => (Ok(exit::of_signal(Signal::TERM)), EndCause::Signal(Signal::TERM)),
            ClusterEnd::ControlPlaneFailed(failure) => (Err(failure.into()), EndCause::ClusterFailed),
        },
    };
    *observed = workload.map(|workload| (workload, cause));
    result
}

fn progress_options(options: &RunOptions) -> anyhow::Result<ProgressOptions> {
    let dir = options.logs.as_ref().map(std::path::absolute).transpose()?;
    Ok(ProgressOptions {
        logs: LogStyle {
            prints: !options.no_logs,
            has_prefix: options.log_prefix == LogPrefix::Pod,
            is_coloured: options.log_colour,
            dir,
            ..LogStyle::default()
        },
        give_up_after: (!options.give_up_after.is_zero()).then_some(options.give_up_after),
    })
}

fn gave_up(reason: &str) -> Failure {
    Failure::new(FailureCode::GaveUp, reason).with_hint(
        "check the names of images (`coracle image pull` tries one) and what the pods request; --give-up-after allows more time",
    )
}

fn forward_signal(child: &Child, signal: Signal) {
    // The terminal has sent SIGINT to the whole group; a second one may mean something else to the workload.
    if signal == Signal::INT && std::io::stdin().is_terminal() {
        return;
    }
    if let Some(pid) = child.id().and_then(|id| Pid::from_raw(id.cast_signed())) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}

/// The action that a signal requests.
enum SignalAction {
    /// End the cluster in order.
    EndCluster(Signal),
    /// Forward it to the workload (`sbatch --signal=USR1@60`).
    Forward(Signal),
}

/// Receives the leader's signals.
struct LeaderSignals {
    hangup: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
    user: [tokio::signal::unix::Signal; 2],
    guard: Option<Pid>,
}

impl LeaderSignals {
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

    async fn next_action(&mut self) -> SignalAction {
        let [first, second] = &mut self.user;
        tokio::select! {
            _ = self.hangup.recv() => SignalAction::EndCluster(Signal::HUP),
            _ = self.interrupt.recv() => SignalAction::EndCluster(Signal::INT),
            _ = self.terminate.recv() => SignalAction::EndCluster(Signal::TERM),
            _ = first.recv() => SignalAction::Forward(Signal::USR1),
            _ = second.recv() => SignalAction::Forward(Signal::USR2),
        }
    }

    /// Waits for the next signal that ends the cluster. Drops signals for the workload, which does not run yet or any more.
    async fn next_end(&mut self) -> Signal {
        loop {
            if let SignalAction::EndCluster(signal) = self.next_action().await {
                return signal;
            }
        }
    }

    /// Waits for a second Ctrl-C of the user. Slurm and the guard may send duplicates of the first signal, so debounce.
    async fn second_interrupt(&mut self) {
        tokio::time::sleep(SIGNAL_DEBOUNCE).await;
        // Drop duplicates.
        while tokio::time::timeout(Duration::ZERO, self.next_end())
            .await
            .is_ok()
        {}
        while self.next_end().await != Signal::INT {}
    }

    fn guard_has_died(&self) -> bool {
        rustix::process::getppid() != self.guard
    }
}
