//! One run of one container: image, start, hooks, stop. A task that reports to the driver and takes its orders to stop.

use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, ContainerStateTerminated, ContainerUser};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use rustix::process::Signal;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};

use super::hooks::{self, Place};
use super::record::Kill;
use super::status::full_id;
use super::{Message, image};
use crate::seams::{Exit, PodImage, Runtime, StartRequest, Started};
use pod_protocol::{ContainerInput, Problem};

/// Minimum time between a container's stop signal and SIGKILL.
const SHORTEST_GRACE: Duration = Duration::from_secs(2);

/// A report of a run to the driver.
#[derive(Debug)]
pub enum Fact {
    /// An event about this container.
    Event {
        warning: bool,
        /// As in upstream's event.
        reason: &'static str,
        message: String,
    },
    /// The container was created; its postStart hook runs next.
    Created {
        id: String,
        /// Its start time.
        at: Timestamp,
        image: Box<PodImage>,
        user: Box<Option<ContainerUser>>,
    },
    /// The postStart hook succeeded, or there is none.
    Running,
    /// The postStart hook failed: the container has to be killed.
    HookFailed(String),
    /// Final: the image is missing or could not be pulled.
    NoImage {
        /// The reference in the spec.
        image: String,
        problem: Problem,
    },
    /// Final: the container could not be created.
    NotCreated(Problem),
    /// Final: the run was stopped before the container was created.
    CalledOff,
    /// Final: the container exited.
    Ended(ContainerStateTerminated),
}

/// Sends the facts of a run to the driver.
#[derive(Clone, Debug)]
pub struct Reporter {
    pub serial: u64,
    pub to: mpsc::UnboundedSender<Message>,
}

impl Reporter {
    pub fn send(&self, fact: Fact) {
        // The driver has exited if the pod is finished: ignore.
        let _ = self.to.send(Message::Fact {
            serial: self.serial,
            fact,
        });
    }

    pub fn event(&self, warning: bool, reason: &'static str, message: impl Into<String>) {
        self.send(Fact::Event {
            warning,
            reason,
            message: message.into(),
        });
    }
}

/// The input of [`run`].
pub struct Order {
    pub container: Container,
    /// `targetContainerName` of an ephemeral container.
    pub target: Option<String>,
    /// The number of this run.
    pub attempt: u32,
    /// The API server's part of the configuration.
    pub input: ContainerInput,
    /// The pod, for its hooks.
    pub place: Place,
}

/// Runs a container until it exits.
pub async fn run<R: Runtime>(
    runtime: Rc<R>,
    report: Reporter,
    order: Order,
    mut kill: watch::Receiver<Option<Kill>>,
) {
    let Order {
        container,
        target,
        attempt,
        input,
        place,
    } = order;
    let image = tokio::select! {
        image = image::ensure_all(&*runtime, &report, &container) => image,
        () = ordered(&mut kill) => return report.send(Fact::CalledOff),
    };
    let image = match image {
        Ok(image) => image,
        Err((image, problem)) => return report.send(Fact::NoImage { image, problem }),
    };
    if let Some(problem) = input.problem {
        report.event(true, "Failed", format!("Error: {}", problem.message));
        return report.send(Fact::NotCreated(problem));
    }
    let request = StartRequest {
        container,
        target,
        attempt,
        input,
        image,
    };
    // Not cancelled by a kill: a start dropped half-way could leave a container without a record.
    let end = match runtime.start(&request).await {
        Ok(started) => {
            let running = Running {
                runtime: &*runtime,
                report: &report,
                request: &request,
                place: &place,
            };
            running.live(started, &mut kill).await
        }
        Err(problem) if start_error(&problem) => {
            report.event(false, "Created", "Container created");
            report.event(true, "Failed", format!("Error: {}", problem.message));
            let id = crate::id::new();
            report.send(Fact::Created {
                id: id.clone(),
                at: Timestamp::now(),
                image: Box::new(request.image.clone()),
                user: Box::new(None),
            });
            ContainerStateTerminated {
                container_id: Some(full_id(&id)),
                exit_code: 128,
                reason: Some("StartError".to_owned()),
                message: Some(problem.message),
                finished_at: Some(Time(Timestamp::now())),
                // The Unix epoch, as containerd reports for a container that never ran.
                started_at: Some(Time(Timestamp::UNIX_EPOCH)),
                ..Default::default()
            }
        }
        Err(problem) => {
            report.event(true, "Failed", format!("Error: {}", problem.message));
            return report.send(Fact::NotCreated(problem));
        }
    };
    report.send(Fact::Ended(end));
}

/// The container was created, but its program could not be started. This counts as a run.
fn start_error(problem: &Problem) -> bool {
    matches!(
        problem.reason.as_str(),
        "StartError" | "RunContainerError" | "ContainerCannotRun"
    )
}

struct Running<'a, R> {
    runtime: &'a R,
    report: &'a Reporter,
    request: &'a StartRequest,
    place: &'a Place,
}

/// Reason of events about a container's log; upstream has none.
const LOG_WARNING: &str = "FailedLogWrite";

type ExitReceiver = Pin<Box<oneshot::Receiver<Exit>>>;

impl<R: Runtime> Running<'_, R> {
    async fn live(
        &self,
        started: Started,
        kill: &mut watch::Receiver<Option<Kill>>,
    ) -> ContainerStateTerminated {
        let Started {
            id,
            at,
            exit,
            stop_signal,
            user,
            mut log_warnings,
        } = started;
        self.report.event(false, "Created", "Container created");
        self.report.event(false, "Started", "Container started");
        self.report.send(Fact::Created {
            id: id.clone(),
            at,
            image: Box::new(self.request.image.clone()),
            user: Box::new(user),
        });
        let mut exit = Box::pin(exit);
        let warn = |words: String| self.report.event(true, LOG_WARNING, words);
        let ended = tokio::select! {
            ended = self.until_ended(&id, stop_signal, &mut exit, kill) => ended,
            () = async {
                while let Some(words) = log_warnings.recv().await {
                    warn(words);
                }
                std::future::pending().await
            } => None,
        };
        // The last warning about the log can arrive together with the exit.
        while let Ok(words) = log_warnings.try_recv() {
            warn(words);
        }
        self.end(id, at, ended).await
    }

    async fn until_ended(
        &self,
        id: &str,
        stop_signal: i32,
        exit: &mut ExitReceiver,
        kill: &mut watch::Receiver<Option<Kill>>,
    ) -> Option<Exit> {
        if let Some(ended) = self.post_start(id, exit, kill).await {
            return Some(ended);
        }
        tokio::select! {
            ended = &mut *exit => ended.ok(),
            () = ordered(kill) => self.stop(id, stop_signal, exit, kill).await,
        }
    }

    /// Runs the postStart hook. Returns the exit of the container if that comes first.
    async fn post_start(
        &self,
        id: &str,
        exit: &mut ExitReceiver,
        kill: &mut watch::Receiver<Option<Kill>>,
    ) -> Option<Exit> {
        let lifecycle = self.request.container.lifecycle.as_ref();
        if let Some(hook) = lifecycle.and_then(|lifecycle| lifecycle.post_start.as_ref()) {
            let result = tokio::select! {
                result = hooks::run(self.runtime, self.place, &self.request.container, id, hook) => result,
                ended = exit => return ended.ok(),
                () = ordered(kill) => return None,
            };
            if let Err(message) = result {
                self.report
                    .event(true, "FailedPostStartHook", "PostStartHook failed");
                self.report.send(Fact::HookFailed(message));
                return None;
            }
        }
        self.report.send(Fact::Running);
        None
    }

    /// Runs the preStop hook, waits for its turn, and sends the stop signal, then SIGKILL.
    async fn stop(
        &self,
        id: &str,
        stop_signal: i32,
        exit: &mut ExitReceiver,
        kill: &mut watch::Receiver<Option<Kill>>,
    ) -> Option<Exit> {
        let container = &self.request.container;
        let lifecycle = container.lifecycle.as_ref();
        if let Some(hook) = lifecycle.and_then(|lifecycle| lifecycle.pre_stop.as_ref())
            && deadline(kill) > Instant::now()
        {
            let hook = async {
                if hooks::run(self.runtime, self.place, container, id, hook)
                    .await
                    .is_err()
                {
                    self.report
                        .event(true, "FailedPreStopHook", "PreStopHook failed");
                }
            };
            tokio::select! {
                () = hook => {}
                () = patience(kill, Duration::ZERO, Instant::now()) => {}
                ended = &mut *exit => return ended.ok(),
            }
        }
        let mut orders = kill.clone();
        let turn = async {
            if orders
                .wait_for(|kill| kill.is_some_and(|kill| kill.turn))
                .await
                .is_err()
            {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = turn => {}
            () = patience(kill, Duration::ZERO, Instant::now()) => {}
            ended = &mut *exit => return ended.ok(),
        }
        self.runtime.signal(id, stop_signal);
        tokio::select! {
            ended = &mut *exit => return ended.ok(),
            () = patience(kill, SHORTEST_GRACE, Instant::now()) => {}
        }
        self.runtime.signal(id, Signal::KILL.as_raw());
        exit.await.ok()
    }

    async fn end(&self, id: String, at: Timestamp, exit: Option<Exit>) -> ContainerStateTerminated {
        let mut state = ContainerStateTerminated {
            container_id: Some(full_id(&id)),
            started_at: Some(Time(at)),
            ..Default::default()
        };
        match exit {
            Some(exit) => {
                state.exit_code = exit.code;
                state.finished_at = Some(Time(exit.at));
                let reason = match exit.code {
                    _ if exit.oom_killed => "OOMKilled",
                    0 => "Completed",
                    _ => "Error",
                };
                state.reason = Some(reason.to_owned());
                let failed = exit.code != 0;
                state.message = self
                    .runtime
                    .termination_message(self.request, failed)
                    .await
                    .filter(|message| !message.is_empty());
            }
            // The runtime dropped the sender, which it should never do. The container has ended all the same.
            None => {
                state.exit_code = 137;
                state.finished_at = Some(Time(Timestamp::now()));
                state.reason = Some("ContainerStatusUnknown".to_owned());
            }
        }
        state
    }
}

/// Waits for an order to stop the run.
async fn ordered(kill: &mut watch::Receiver<Option<Kill>>) {
    if kill.wait_for(Option::is_some).await.is_err() {
        std::future::pending::<()>().await;
    }
}

fn deadline(kill: &watch::Receiver<Option<Kill>>) -> Instant {
    kill.borrow()
        .map_or_else(Instant::now, |kill| kill.deadline)
}

/// Waits until the grace period ends, which can be shortened meanwhile, but at least until `shortest` after `since`.
async fn patience(kill: &mut watch::Receiver<Option<Kill>>, shortest: Duration, since: Instant) {
    loop {
        let end = deadline(kill).max(since + shortest);
        tokio::select! {
            () = sleep_until(end) => return,
            changed = kill.changed() => if changed.is_err() {
                return sleep_until(end).await;
            },
        }
    }
}
