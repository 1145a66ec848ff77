//! One run of one container: image, start, hooks, end. A task that tells what happens and obeys orders to end.

use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, ContainerStateTerminated, ContainerUser};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use rustix::process::Signal;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};

use super::hooks::{self, HookContext};
use super::container_record::KillOrder;
use super::status::full_id;
use super::{Message, image};
use crate::container_runtime::{ContainerExit, ContainerRuntime, PodImage, StartRequest, StartedContainer};
use pod_protocol::{ContainerInput, Problem};

/// A container gets at least so long between its stop signal and SIGKILL.
const SHORTEST_GRACE: Duration = Duration::from_secs(2);

/// What a run tells.
#[derive(Debug)]
pub enum RunEvent {
    /// Something worth an event about this container.
    Event {
        /// It is a warning.
        warning: bool,
        /// Upstream's word.
        reason: &'static str,
        /// The same for people.
        message: String,
    },
    /// The container is there; its postStart hook runs next.
    Created {
        /// Its id.
        id: String,
        /// Since when it runs.
        at: Timestamp,
        /// From which image.
        image: Box<PodImage>,
        /// Who its first process is.
        user: Box<Option<ContainerUser>>,
    },
    /// The postStart hook is done, if there was one.
    Running,
    /// The postStart hook failed: the container has to end.
    HookFailed(String),
    /// The end: there is no image.
    NoImage {
        /// Which.
        image: String,
        /// Why not.
        problem: Problem,
    },
    /// The end: there is no container.
    NotCreated(Problem),
    /// The end: it was called off before there was a container.
    CalledOff,
    /// The end.
    TerminatedRun(ContainerStateTerminated),
}

/// Carries what a run tells to the one who keeps the records.
#[derive(Clone, Debug)]
pub struct RunReporter {
    /// Which run.
    pub serial: u64,
    /// To whom.
    pub to: mpsc::UnboundedSender<Message>,
}

impl RunReporter {
    /// Tells something.
    pub fn send(&self, fact: RunEvent) {
        // Nobody listens any more once the pod is over.
        let _ = self.to.send(Message::RunEvent {
            serial: self.serial,
            fact,
        });
    }

    /// Tells something worth an event.
    pub fn event(&self, warning: bool, reason: &'static str, message: impl Into<String>) {
        self.send(RunEvent::Event {
            warning,
            reason,
            message: message.into(),
        });
    }
}

/// What is to be run.
pub struct RunSpec {
    /// The container.
    pub container: Container,
    /// For an ephemeral container: whose processes it wants to see.
    pub target: Option<String>,
    /// The number of this run.
    pub attempt: u32,
    /// What the API server contributed.
    pub input: ContainerInput,
    /// Where its hooks find it.
    pub place: HookContext,
}

/// Runs a container to its end.
pub async fn run<R: ContainerRuntime>(
    runtime: Rc<R>,
    report: RunReporter,
    order: RunSpec,
    mut kill: watch::Receiver<Option<KillOrder>>,
) {
    let RunSpec {
        container,
        target,
        attempt,
        input,
        place,
    } = order;
    let image = tokio::select! {
        image = image::ensure_all(&*runtime, &report, &container) => image,
        () = ordered(&mut kill) => return report.send(RunEvent::CalledOff),
    };
    let image = match image {
        Ok(image) => image,
        Err((image, problem)) => return report.send(RunEvent::NoImage { image, problem }),
    };
    if let Some(problem) = input.problem {
        report.event(true, "Failed", format!("Error: {}", problem.message));
        return report.send(RunEvent::NotCreated(problem));
    }
    let request = StartRequest {
        container,
        target,
        attempt,
        input,
        image,
    };
    // Never dropped half-way, whatever is ordered: a container could be left of which nobody knows.
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
            let id = crate::container_id::new();
            report.send(RunEvent::Created {
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
                // The zero of time, as containerd has it for what never ran.
                started_at: Some(Time(Timestamp::UNIX_EPOCH)),
                ..Default::default()
            }
        }
        Err(problem) => {
            report.event(true, "Failed", format!("Error: {}", problem.message));
            return report.send(RunEvent::NotCreated(problem));
        }
    };
    report.send(RunEvent::Exited(end));
}

/// The container was there, but its program could not be run: that counts as a run.
fn start_error(problem: &Problem) -> bool {
    matches!(
        problem.reason.as_str(),
        "StartError" | "RunContainerError" | "ContainerCannotRun"
    )
}

struct Running<'a, R> {
    runtime: &'a R,
    report: &'a RunReporter,
    request: &'a StartRequest,
    place: &'a HookContext,
}

/// The reason of events about a container's log; upstream has none.
const LOG_WARNING: &str = "FailedLogWrite";

type ExitReceiver = Pin<Box<oneshot::Receiver<ContainerExit>>>;

impl<R: ContainerRuntime> Running<'_, R> {
    async fn live(
        &self,
        started: StartedContainer,
        kill: &mut watch::Receiver<Option<KillOrder>>,
    ) -> ContainerStateTerminated {
        let StartedContainer {
            id,
            at,
            exit,
            stop_signal,
            user,
            mut log_warnings,
        } = started;
        self.report.event(false, "Created", "Container created");
        self.report.event(false, "StartedContainer", "Container started");
        self.report.send(RunEvent::Created {
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
        // The log's last warning comes with the container's end.
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
        kill: &mut watch::Receiver<Option<KillOrder>>,
    ) -> Option<ContainerExit> {
        if let Some(ended) = self.post_start(id, exit, kill).await {
            return Some(ended);
        }
        tokio::select! {
            ended = &mut *exit => ended.ok(),
            () = ordered(kill) => self.stop(id, stop_signal, exit, kill).await,
        }
    }

    /// Runs the postStart hook; tells of an end that came before the hook's.
    async fn post_start(
        &self,
        id: &str,
        exit: &mut ExitReceiver,
        kill: &mut watch::Receiver<Option<KillOrder>>,
    ) -> Option<ContainerExit> {
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
                self.report.send(RunEvent::HookFailed(message));
                return None;
            }
        }
        self.report.send(RunEvent::Running);
        None
    }

    /// preStop hook, its turn, stop signal, SIGKILL.
    async fn stop(
        &self,
        id: &str,
        stop_signal: i32,
        exit: &mut ExitReceiver,
        kill: &mut watch::Receiver<Option<KillOrder>>,
    ) -> Option<ContainerExit> {
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
                .wait_for(|kill| kill.is_some_and(|kill| kill.may_signal))
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

    async fn end(&self, id: String, at: Timestamp, exit: Option<ContainerExit>) -> ContainerStateTerminated {
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
            // The runtime should never do this; the container is gone all the same.
            None => {
                state.exit_code = 137;
                state.finished_at = Some(Time(Timestamp::now()));
                state.reason = Some("ContainerStatusUnknown".to_owned());
            }
        }
        state
    }
}

/// Waits for the order to end.
async fn ordered(kill: &mut watch::Receiver<Option<KillOrder>>) {
    if kill.wait_for(Option::is_some).await.is_err() {
        std::future::pending::<()>().await;
    }
}

fn deadline(kill: &watch::Receiver<Option<KillOrder>>) -> Instant {
    kill.borrow()
        .map_or_else(Instant::now, |kill| kill.deadline)
}

/// Waits until patience ends, which can come nearer meanwhile, but not before `shortest` has passed since `since`.
async fn patience(kill: &mut watch::Receiver<Option<KillOrder>>, shortest: Duration, since: Instant) {
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
