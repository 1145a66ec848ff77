//! Keeps the components running.
//!
//! ```text
//!            spawn                 ends by itself
//!   waiting ───────► running ─────────────────────► backing off ──► running …
//!      │                │  stop: SIGTERM, then SIGKILL      │ too often in a row
//!      └────────────────┴───────────► stopped ◄─────────────┘ (reported as failed)
//! ```
//!
//! etcd and the API server start at once, their clients as soon as they will be answered, and all are
//! stopped one after the other in reverse order. Nothing can be orphaned: every component has the parent death signal,
//! and the supervisor is the first process of their pid namespace.

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

use crate::api::Probe;
use crate::components;
use crate::home::Home;
use crate::log::RotatingLog;
use crate::output::pump;
use crate::protocol::{ClusterConfig, Command, Component, Event};
use crate::seed;

/// A log file and its predecessor may each grow to this.
const LOG_LIMIT: u64 = 8 << 20;
/// A component that ran this long was healthy: its next end starts the count anew.
const HEALTHY_AFTER: Duration = Duration::from_secs(20);
/// So many ends in a row without being healthy, and the control plane has failed.
const MAX_QUICK_ENDS: u32 = 5;
const FIRST_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(10);
/// What a component gets between SIGTERM and SIGKILL. The store is in memory, so nothing is lost.
const STOP_GRACE: Duration = Duration::from_secs(3);

/// The control plane could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// A file of the private place could not be written.
    #[error("cannot write the control plane's files")]
    Files(#[source] io::Error),
    /// The seed could not be copied.
    #[error("cannot copy the prepared store {path}")]
    Seed {
        /// Where it is.
        path: std::path::PathBuf,
        /// What went wrong.
        source: io::Error,
    },
    /// A log file could not be opened.
    #[error("cannot open the log file of {component} in {dir}")]
    Log {
        /// Whose.
        component: Component,
        /// Where.
        dir: std::path::PathBuf,
        /// What went wrong.
        source: io::Error,
    },
}

/// What all components share.
struct Shared {
    config: ClusterConfig,
    home: Home,
    events: mpsc::UnboundedSender<Event>,
}

/// Runs the control plane until a command or the end of `commands` stops it, or it fails.
pub async fn run(
    config: ClusterConfig,
    home: Home,
    mut commands: mpsc::Receiver<Command>,
    events: mpsc::UnboundedSender<Event>,
) -> Result<(), SetupError> {
    prepare(&config, &home)?;
    let shared = Arc::new(Shared {
        config,
        home,
        events,
    });
    let (failed, mut failure) = mpsc::channel(1);
    let mut running = Vec::new();
    for component in [Component::Etcd, Component::KubeApiserver] {
        running.push(Supervised::start(&shared, component, failed.clone())?);
    }
    let asking = CancellationToken::new();
    let _stop_asking = asking.clone().drop_guard();
    let mut welcome = clients_in_turn(&shared, asking).map_err(SetupError::Files)?;

    let mut rest = false;
    loop {
        tokio::select! {
            command = commands.recv() => {
                rest = matches!(command, Some(Command::Rest));
                break;
            }
            Some(event) = failure.recv() => {
                let _ = shared.events.send(event);
                break;
            }
            Some(component) = welcome.recv() => {
                running.push(Supervised::start(&shared, component, failed.clone())?);
            }
        }
    }
    while let Some(component) = running.pop() {
        component.stop().await;
    }
    let _ = shared.events.send(Event::Stopped);
    while rest && commands.recv().await.is_some() {}
    Ok(())
}

fn prepare(config: &ClusterConfig, home: &Home) -> Result<(), SetupError> {
    let mut complete = config.clone();
    complete
        .files
        .extend(components::derived_files(config, home));
    home.write(&complete).map_err(SetupError::Files)?;
    if let Some(path) = &config.seed {
        seed::copy(&home.seed(), &home.store()).map_err(|source| SetupError::Seed {
            path: path.clone(),
            source,
        })?;
    }
    Ok(())
}

/// Tells, one by one, which client of the API server may be started now.
///
/// A client whose first list is refused waits more than a second before the next, and would take from the server one of
/// few cores. So the scheduler starts when its first request will be answered. The controllers ask for `/healthz` first,
/// once a second. The server says yes a second after it first answers, so they can as well start when it does.
fn clients_in_turn(
    shared: &Arc<Shared>,
    stop: CancellationToken,
) -> io::Result<mpsc::Receiver<Component>> {
    let scheduler = Probe::new(&shared.config, Component::KubeScheduler)?;
    let controllers = Probe::new(&shared.config, Component::KubeControllerManager)?;
    let events = shared.events.clone();
    let (tell, told) = mpsc::channel(2);
    let ask = async move {
        controllers.until_ok("/version").await;
        let _ = events.send(Event::ApiAnswers);
        scheduler.until_ok("/api/v1/pods?limit=1").await;
        let _ = tell.send(Component::KubeScheduler).await;
        let _ = tell.send(Component::KubeControllerManager).await;
    };
    tokio::spawn(stop.run_until_cancelled_owned(ask));
    Ok(told)
}

/// A component that is kept running by a task of its own.
struct Supervised {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Supervised {
    fn start(
        shared: &Arc<Shared>,
        component: Component,
        failed: mpsc::Sender<Event>,
    ) -> Result<Self, SetupError> {
        let dir = shared.home.logs();
        let log = RotatingLog::open(&dir, component.program(), LOG_LIMIT).map_err(|source| {
            SetupError::Log {
                component,
                dir,
                source,
            }
        })?;
        let stop = CancellationToken::new();
        let keeper = Keeper {
            shared: shared.clone(),
            component,
            log,
            stop: stop.clone(),
        };
        let task = tokio::spawn(keeper.keep_running(failed));
        Ok(Self { stop, task })
    }

    async fn stop(self) {
        self.stop.cancel();
        // The task ends on its own after SIGKILL at the latest.
        let _ = self.task.await;
    }
}

struct Keeper {
    shared: Arc<Shared>,
    component: Component,
    log: RotatingLog,
    stop: CancellationToken,
}

impl Keeper {
    async fn keep_running(mut self, failed: mpsc::Sender<Event>) {
        let mut quick_ends = 0;
        let mut restarts = 0;
        loop {
            let began = Instant::now();
            let status = match self.run_once(restarts).await {
                Ok(Some(status)) => status,
                Ok(None) => return,
                // A program that can't be started won't do better next time.
                Err(error) => return self.fail(&failed, format!("it can't be started: {error}")),
            };
            if began.elapsed() >= HEALTHY_AFTER {
                quick_ends = 0;
            }
            quick_ends += 1;
            restarts += 1;
            if quick_ends >= MAX_QUICK_ENDS {
                let reason = format!("it ended {quick_ends} times in a row, last with {status}");
                return self.fail(&failed, reason);
            }
            self.tell(Event::Exited {
                component: self.component,
                status,
            });
            tokio::select! {
                () = sleep(backoff(quick_ends)) => {}
                () = self.stop.cancelled() => return,
            }
        }
    }

    fn fail(&self, failed: &mpsc::Sender<Event>, reason: String) {
        // One failure is enough to stop everything.
        let _ = failed.try_send(Event::Failed {
            component: self.component,
            reason,
            tail: self.log.tail(),
        });
    }

    /// Starts the component and waits for its end; `None` when it was stopped on purpose.
    async fn run_once(&mut self, restarts: u32) -> io::Result<Option<String>> {
        let mut child = self.spawn()?;
        self.tell(Event::Started {
            component: self.component,
            restarts,
        });
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let (lines, mut logged) = mpsc::channel(256);
        tokio::spawn(pump(stdout, lines.clone()));
        tokio::spawn(pump(stderr, lines));
        let ended = loop {
            tokio::select! {
                status = child.wait() => break Some(describe(status)),
                Some(line) = logged.recv() => self.log_line(&line),
                () = self.stop.cancelled() => {
                    // Its pipes are read to the end: a component that blocks on them would not stop.
                    tokio::spawn(async move { while logged.recv().await.is_some() {} });
                    stop_child(&mut child).await;
                    return Ok(None);
                }
            }
        };
        while let Some(line) = logged.recv().await {
            self.log_line(&line);
        }
        Ok(ended)
    }

    fn spawn(&self) -> io::Result<Child> {
        let program = self.shared.home.programs().join(self.component.program());
        let mut command = tokio::process::Command::new(program);
        command
            .args(components::flags(
                self.component,
                &self.shared.config,
                &self.shared.home,
            ))
            .env_clear()
            .envs(components::environment(&self.shared.config))
            .stdin(std::process::Stdio::null())
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped());
        linux::process::bind_to_us(command.as_std_mut(), Signal::KILL);
        command.spawn()
    }

    fn log_line(&mut self, line: &[u8]) {
        if let Err(error) = self.log.line(line) {
            self.tell(Event::LogLost {
                component: self.component,
                reason: error.to_string(),
            });
        }
        if self.shared.config.verbose {
            self.tell(Event::Log {
                component: self.component,
                line: String::from_utf8_lossy(line).into_owned(),
            });
        }
    }

    fn tell(&self, event: Event) {
        // Nobody listens any more only when we are about to be stopped.
        let _ = self.shared.events.send(event);
    }
}

async fn stop_child(child: &mut Child) {
    let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    if let Some(pid) = pid {
        let _ = rustix::process::kill_process(pid, Signal::TERM);
    }
    if timeout(STOP_GRACE, child.wait()).await.is_err() {
        let _ = child.kill().await;
    }
}

fn backoff(ends: u32) -> Duration {
    FIRST_BACKOFF
        .saturating_mul(4_u32.saturating_pow(ends.saturating_sub(1)))
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
    fn the_pause_grows_and_is_bounded() {
        let pauses: Vec<u128> = (1..=6).map(|n| backoff(n).as_millis()).collect();
        assert_eq!(pauses, [50, 200, 800, 3200, 10_000, 10_000]);
    }
}
