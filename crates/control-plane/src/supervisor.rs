//! Keeps the components running.
//!
//! ```text
//!            spawn                     exits
//!   waiting ───────► running ─────────────────────► backing off ──► running …
//!      │                │  stop: SIGTERM, then SIGKILL      │ too often in a row
//!      └────────────────┴───────────► stopped ◄─────────────┘ (reported as failed)
//! ```
//!
//! etcd and the API server start immediately, the API server's clients as soon as it answers them. All are stopped one
//! after the other in reverse order. No component outlives the supervisor: each has a parent death signal, and
//! the supervisor is the first process of their pid namespace.

use std::io;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Signal};
use tokio::process::Child;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::api_probe::ApiProbe;
use crate::components;
use crate::dir::ControlPlaneDir;
use crate::log::RotatingLog;
use crate::output::forward_lines;
use crate::protocol::{
    ClusterConfig, ControlPlaneCommand, ControlPlaneComponent, ControlPlaneEvent,
};
use crate::seed;

/// The size limit of a log file and of its predecessor.
const LOG_LIMIT: u64 = 8 << 20;
/// A component that ran this long was healthy: its exit restarts the count of consecutive exits.
const HEALTHY_AFTER: Duration = Duration::from_secs(20);
/// After this many consecutive exits of an unhealthy component the control plane has failed.
const MAX_QUICK_EXITS: u32 = 5;
const RESTART_INITIAL_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(10);
/// The time between SIGTERM and SIGKILL. Killing etcd loses nothing that must be kept: its data is in memory only, or every
/// write that it has confirmed is on disk.
const STOP_GRACE_PERIOD: Duration = Duration::from_secs(3);

/// The control plane cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// A file of the control plane's directory cannot be written.
    #[error("cannot write the control plane's files")]
    Files(#[source] io::Error),
    /// The seed cannot be copied.
    #[error("cannot copy the prepared store {path}")]
    Seed {
        /// The seed's path.
        path: std::path::PathBuf,
        /// The error.
        source: io::Error,
    },
    /// A log file cannot be opened.
    #[error("cannot open the log file of {component} in {dir}")]
    Log {
        /// The component.
        component: ControlPlaneComponent,
        /// The directory of the logs.
        dir: std::path::PathBuf,
        /// The error.
        source: io::Error,
    },
}

/// Shared by all component tasks.
struct Shared {
    config: ClusterConfig,
    cp_dir: ControlPlaneDir,
    events: mpsc::UnboundedSender<ControlPlaneEvent>,
}

/// Runs the control plane until a command or the end of `commands` stops it, or until it fails.
pub async fn run(
    config: ClusterConfig,
    cp_dir: ControlPlaneDir,
    mut commands: mpsc::Receiver<ControlPlaneCommand>,
    events: mpsc::UnboundedSender<ControlPlaneEvent>,
) -> Result<(), SetupError> {
    prepare(&config, &cp_dir)?;
    let shared = Arc::new(Shared {
        config,
        cp_dir,
        events,
    });
    let (failed, mut failure) = mpsc::channel(1);
    let mut running = Vec::new();
    for component in [
        ControlPlaneComponent::Etcd,
        ControlPlaneComponent::KubeApiserver,
    ] {
        running.push(SupervisedComponent::start(
            &shared,
            component,
            failed.clone(),
        )?);
    }
    let probing = CancellationToken::new();
    let _stop_probing = probing.clone().drop_guard();
    let mut startable = startable_clients(&shared, probing).map_err(SetupError::Files)?;

    let mut stays_until_closed = false;
    loop {
        tokio::select! {
            command = commands.recv() => {
                stays_until_closed = matches!(command, Some(ControlPlaneCommand::StopComponents));
                break;
            }
            Some(event) = failure.recv() => {
                let _ = shared.events.send(event);
                break;
            }
            Some(component) = startable.recv() => {
                running.push(SupervisedComponent::start(&shared, component, failed.clone())?);
            }
        }
    }
    while let Some(component) = running.pop() {
        component.stop().await;
    }
    let _ = shared.events.send(ControlPlaneEvent::Stopped);
    while stays_until_closed && commands.recv().await.is_some() {}
    Ok(())
}

fn prepare(config: &ClusterConfig, cp_dir: &ControlPlaneDir) -> Result<(), SetupError> {
    let mut complete = config.clone();
    complete
        .files
        .extend(components::derived_files(config, cp_dir));
    cp_dir.write(&complete).map_err(SetupError::Files)?;
    if let Some(path) = &config.seed {
        seed::install(&cp_dir.seed(), &cp_dir.store()).map_err(|source| SetupError::Seed {
            path: path.clone(),
            source,
        })?;
    }
    Ok(())
}

/// Sends each client of the API server when it can be started.
///
/// A client whose first list request fails waits more than a second before the next one, and competes with the server for
/// CPUs. So the scheduler starts when its first request will succeed. The controller manager first polls `/healthz` once a
/// second. The server reports healthy a second after its first response, so the controller manager starts at that
/// time too.
fn startable_clients(
    shared: &Arc<Shared>,
    stop: CancellationToken,
) -> io::Result<mpsc::Receiver<ControlPlaneComponent>> {
    let scheduler = ApiProbe::new(&shared.config, ControlPlaneComponent::KubeScheduler)?;
    let controllers = ApiProbe::new(&shared.config, ControlPlaneComponent::KubeControllerManager)?;
    let events = shared.events.clone();
    let (sender, startable) = mpsc::channel(2);
    let probe = async move {
        controllers.until_ok("/version").await;
        let _ = events.send(ControlPlaneEvent::ApiServerResponds);
        scheduler.until_ok("/api/v1/pods?limit=1").await;
        let _ = sender.send(ControlPlaneComponent::KubeScheduler).await;
        let _ = sender
            .send(ControlPlaneComponent::KubeControllerManager)
            .await;
    };
    tokio::spawn(stop.run_until_cancelled_owned(probe));
    Ok(startable)
}

/// The handle of a component's task.
struct SupervisedComponent {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl SupervisedComponent {
    fn start(
        shared: &Arc<Shared>,
        component: ControlPlaneComponent,
        failed: mpsc::Sender<ControlPlaneEvent>,
    ) -> Result<Self, SetupError> {
        let dir = shared.cp_dir.logs();
        let log = RotatingLog::open(&dir, component.program(), LOG_LIMIT).map_err(|source| {
            SetupError::Log {
                component,
                dir,
                source,
            }
        })?;
        let stop = CancellationToken::new();
        let component_task = ComponentTask {
            shared: shared.clone(),
            component,
            log,
            stop: stop.clone(),
        };
        let task = tokio::spawn(component_task.keep_running(failed));
        Ok(Self { stop, task })
    }

    async fn stop(self) {
        self.stop.cancel();
        // The task ends after SIGKILL at the latest.
        let _ = self.task.await;
    }
}

/// Keeps one component running.
struct ComponentTask {
    shared: Arc<Shared>,
    component: ControlPlaneComponent,
    log: RotatingLog,
    stop: CancellationToken,
}

impl ComponentTask {
    async fn keep_running(mut self, failed: mpsc::Sender<ControlPlaneEvent>) {
        let mut quick_exits = 0;
        let mut restarts = 0;
        loop {
            let started = Instant::now();
            let status = match self.run_once(restarts).await {
                Ok(Some(status)) => status,
                Ok(None) => return,
                // A failed exec is not transient.
                Err(error) => return self.fail(&failed, format!("cannot start: {error}")),
            };
            if started.elapsed() >= HEALTHY_AFTER {
                quick_exits = 0;
            }
            quick_exits += 1;
            restarts += 1;
            if quick_exits >= MAX_QUICK_EXITS {
                let reason = format!("exited {quick_exits} times in a row, last with {status}");
                return self.fail(&failed, reason);
            }
            self.send_event(ControlPlaneEvent::Exited {
                component: self.component,
                status,
            });
            tokio::select! {
                () = sleep(backoff(quick_exits)) => {}
                () = self.stop.cancelled() => return,
            }
        }
    }

    fn fail(&self, failed: &mpsc::Sender<ControlPlaneEvent>, reason: String) {
        // The first failure stops the control plane; later ones do not matter.
        let _ = failed.try_send(ControlPlaneEvent::Failed {
            component: self.component,
            reason,
            tail: self.log.tail(),
        });
    }

    /// Starts the component and waits for its exit; `None` if it was stopped.
    async fn run_once(&mut self, restarts: u32) -> io::Result<Option<String>> {
        let mut child = self.spawn()?;
        self.send_event(ControlPlaneEvent::Started {
            component: self.component,
            restarts,
        });
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let (lines, mut logged) = mpsc::channel(256);
        tokio::spawn(forward_lines(stdout, lines.clone()));
        tokio::spawn(forward_lines(stderr, lines));
        let exit_status = loop {
            tokio::select! {
                status = child.wait() => break Some(describe(status)),
                Some(line) = logged.recv() => self.log_line(&line),
                () = self.stop.cancelled() => {
                    // Drain its pipes: a component that blocks on a full pipe would not stop.
                    tokio::spawn(async move { while logged.recv().await.is_some() {} });
                    stop_child(&mut child).await;
                    return Ok(None);
                }
            }
        };
        while let Some(line) = logged.recv().await {
            self.log_line(&line);
        }
        Ok(exit_status)
    }

    fn spawn(&self) -> io::Result<Child> {
        let program = self.shared.cp_dir.programs().join(self.component.program());
        let mut command = tokio::process::Command::new(program);
        command
            .args(components::flags(
                self.component,
                &self.shared.config,
                &self.shared.cp_dir,
            ))
            .env_clear()
            .envs(components::environment(&self.shared.config))
            .stdin(std::process::Stdio::null())
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped());
        linux::process::set_death_signal_in_new_group(command.as_std_mut(), Signal::KILL);
        command.spawn()
    }

    fn log_line(&mut self, line: &[u8]) {
        if let Err(error) = self.log.write_line(line) {
            self.send_event(ControlPlaneEvent::LogWriteFailed {
                component: self.component,
                reason: error.to_string(),
            });
        }
        if self.shared.config.verbose {
            self.send_event(ControlPlaneEvent::Log {
                component: self.component,
                line: String::from_utf8_lossy(line).into_owned(),
            });
        }
    }

    fn send_event(&self, event: ControlPlaneEvent) {
        // The receiver is closed only during shutdown.
        let _ = self.shared.events.send(event);
    }
}

async fn stop_child(child: &mut Child) {
    let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    if let Some(pid) = pid {
        let _ = rustix::process::kill_process(pid, Signal::TERM);
    }
    if timeout(STOP_GRACE_PERIOD, child.wait()).await.is_err() {
        let _ = child.kill().await;
    }
}

fn backoff(exits: u32) -> Duration {
    RESTART_INITIAL_BACKOFF
        .saturating_mul(4_u32.saturating_pow(exits.saturating_sub(1)))
        .min(MAX_BACKOFF)
}

fn describe(status: io::Result<ExitStatus>) -> String {
    match status {
        Ok(status) => status.to_string(),
        Err(error) => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_grows_and_is_bounded() {
        let delays: Vec<u128> = (1..=6).map(|n| backoff(n).as_millis()).collect();
        assert_eq!(delays, [50, 200, 800, 3200, 10_000, 10_000]);
    }
}
