//! One run of one container: image, start, hooks, stop. A task that reports to the driver and receives its kill orders.

use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, ContainerStateTerminated};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use rustix::process::Signal;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};

use super::container_record::{CreatedContainer, KillOrder};
use super::event_log::EventType;
use super::hooks::{self, HookPod};
use super::{DriverMessage, image_pull};
use crate::container_id;
use crate::container_runtime::{
    ContainerExit, ContainerRuntime, ImageProblem, StartFailure, StartRequest, StartedContainer,
};
use pod_protocol::termination::TerminationReason;
use pod_protocol::{ContainerInput, Problem};

/// Minimum time between a container's stop signal and SIGKILL.
const MIN_GRACE_PERIOD: Duration = Duration::from_secs(2);

/// A report of a run to the driver.
#[derive(Debug)]
pub enum RunEvent {
    /// An Event about this container.
    PodEvent {
        event_type: EventType,
        /// As in upstream's Event.
        reason: &'static str,
        message: String,
    },
    /// The container was created; its postStart hook runs next.
    Created {
        started_at: Timestamp,
        container: Box<CreatedContainer>,
    },
    /// The postStart hook succeeded, or there is none.
    Running,
    /// The postStart hook failed: the container has to be killed.
    PostStartFailed(String),
    /// Final: the image is missing or could not be pulled.
    ImageFailed {
        /// The reference in the spec.
        image: String,
        problem: ImageProblem,
    },
    /// Final: the container could not be created.
    CreateFailed(Problem),
    /// Final: the run was stopped before the container was created.
    Cancelled,
    /// Final: the container exited.
    Terminated(ContainerStateTerminated),
}

/// Sends the events of a run to the driver.
#[derive(Clone, Debug)]
pub struct RunReporter {
    pub serial: u64,
    pub messages: mpsc::UnboundedSender<DriverMessage>,
}

impl RunReporter {
    pub fn send(&self, event: RunEvent) {
        // Fails if the driver has exited, because the pod is finished.
        let _ = self.messages.send(DriverMessage::RunEvent {
            serial: self.serial,
            event,
        });
    }

    /// Records an Event of type Normal.
    pub fn normal(&self, reason: &'static str, message: impl Into<String>) {
        self.send(RunEvent::PodEvent {
            event_type: EventType::Normal,
            reason,
            message: message.into(),
        });
    }

    /// Records an Event of type Warning.
    pub fn warning(&self, reason: &'static str, message: impl Into<String>) {
        self.send(RunEvent::PodEvent {
            event_type: EventType::Warning,
            reason,
            message: message.into(),
        });
    }
}

/// The input of [`run_container`].
pub struct RunSpec {
    pub container: Container,
    /// `targetContainerName` of an ephemeral container.
    pub target: Option<String>,
    /// The number of this run.
    pub attempt: u32,
    /// The API server's part of the configuration.
    pub input: ContainerInput,
    /// The pod, for its hooks.
    pub pod: HookPod,
}

/// Runs a container until it exits.
pub async fn run_container<R: ContainerRuntime>(
    runtime: Rc<R>,
    reporter: RunReporter,
    spec: RunSpec,
    mut kill: watch::Receiver<Option<KillOrder>>,
) {
    let RunSpec {
        container,
        target,
        attempt,
        input,
        pod,
    } = spec;
    let image = tokio::select! {
        image = image_pull::ensure_images(&*runtime, &reporter, &container) => image,
        () = kill_ordered(&mut kill) => return reporter.send(RunEvent::Cancelled),
    };
    let image = match image {
        Ok(image) => image,
        Err((image, problem)) => return reporter.send(RunEvent::ImageFailed { image, problem }),
    };
    if let Some(problem) = input.problem {
        reporter.warning("Failed", format!("Error: {}", problem.message));
        return reporter.send(RunEvent::CreateFailed(problem));
    }
    let request = StartRequest {
        container,
        target,
        attempt,
        input,
        image,
    };
    // Not cancelled by a kill order: a start dropped half-way could leave a container without a record.
    let terminated = match runtime.start(&request).await {
        Ok(started) => {
            let run = ActiveRun {
                runtime: &*runtime,
                reporter: &reporter,
                request: &request,
                pod: &pod,
            };
            run.run_to_exit(started, &mut kill).await
        }
        Err(StartFailure::Program(message)) => {
            reporter.normal("Created", "Container created");
            reporter.warning("Failed", format!("Error: {message}"));
            let id = container_id::generate();
            reporter.send(RunEvent::Created {
                started_at: Timestamp::now(),
                container: Box::new(CreatedContainer {
                    id: id.clone(),
                    image: request.image.clone(),
                    user: None,
                }),
            });
            ContainerStateTerminated {
                container_id: Some(container_id::to_api(&id)),
                exit_code: 128,
                reason: Some(TerminationReason::StartError.as_str().to_owned()),
                message: Some(message),
                finished_at: Some(Time(Timestamp::now())),
                // The Unix epoch, as containerd reports for a container that never ran.
                started_at: Some(Time(Timestamp::UNIX_EPOCH)),
                ..Default::default()
            }
        }
        Err(StartFailure::Create(problem)) => {
            reporter.warning("Failed", format!("Error: {}", problem.message));
            return reporter.send(RunEvent::CreateFailed(problem));
        }
    };
    reporter.send(RunEvent::Terminated(terminated));
}

/// A run whose container was started.
struct ActiveRun<'a, R> {
    runtime: &'a R,
    reporter: &'a RunReporter,
    request: &'a StartRequest,
    pod: &'a HookPod,
}

/// Reason of Events about a container's log; upstream has none.
const LOG_WARNING: &str = "FailedLogWrite";

type ExitReceiver = Pin<Box<oneshot::Receiver<ContainerExit>>>;

impl<R: ContainerRuntime> ActiveRun<'_, R> {
    async fn run_to_exit(
        &self,
        started: StartedContainer,
        kill: &mut watch::Receiver<Option<KillOrder>>,
    ) -> ContainerStateTerminated {
        let StartedContainer {
            id,
            started_at,
            exit,
            stop_signal,
            user,
            mut log_warnings,
        } = started;
        self.reporter.normal("Created", "Container created");
        self.reporter.normal("Started", "Container started");
        self.reporter.send(RunEvent::Created {
            started_at,
            container: Box::new(CreatedContainer {
                id: id.clone(),
                image: self.request.image.clone(),
                user,
            }),
        });
        let mut exit = Box::pin(exit);
        let warn = |message: String| self.reporter.warning(LOG_WARNING, message);
        let exited = tokio::select! {
            exited = self.wait_for_exit(&id, stop_signal, &mut exit, kill) => exited,
            () = async {
                while let Some(message) = log_warnings.recv().await {
                    warn(message);
                }
                std::future::pending().await
            } => None,
        };
        // The last warning about the log can arrive together with the exit.
        while let Ok(message) = log_warnings.try_recv() {
            warn(message);
        }
        self.terminated(&id, started_at, exited).await
    }

    async fn wait_for_exit(
        &self,
        id: &str,
        stop_signal: i32,
        exit: &mut ExitReceiver,
        kill: &mut watch::Receiver<Option<KillOrder>>,
    ) -> Option<ContainerExit> {
        if let Some(exited) = self.post_start(id, exit, kill).await {
            return Some(exited);
        }
        tokio::select! {
            exited = &mut *exit => exited.ok(),
            () = kill_ordered(kill) => self.stop(id, stop_signal, exit, kill).await,
        }
    }

    /// Runs the postStart hook. Returns the exit of the container if that comes first.
    async fn post_start(
        &self,
        id: &str,
        exit: &mut ExitReceiver,
        kill: &mut watch::Receiver<Option<KillOrder>>,
    ) -> Option<ContainerExit> {
        let lifecycle = self.request.container.lifecycle.as_ref();
        if let Some(hook) = lifecycle.and_then(|lifecycle| lifecycle.post_start.as_ref()) {
            let result = tokio::select! {
                result = hooks::run(self.runtime, self.pod, &self.request.container, id, hook) => result,
                exited = exit => return exited.ok(),
                () = kill_ordered(kill) => return None,
            };
            if let Err(message) = result {
                self.reporter
                    .warning("FailedPostStartHook", "PostStartHook failed");
                self.reporter.send(RunEvent::PostStartFailed(message));
                return None;
            }
        }
        self.reporter.send(RunEvent::Running);
        None
    }

    /// Runs the preStop hook, waits until the stop signal may be sent, and sends it, then SIGKILL.
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
                if hooks::run(self.runtime, self.pod, container, id, hook)
                    .await
                    .is_err()
                {
                    self.reporter
                        .warning("FailedPreStopHook", "PreStopHook failed");
                }
            };
            tokio::select! {
                () = hook => {}
                () = grace_period_over(kill, Duration::ZERO, Instant::now()) => {}
                exited = &mut *exit => return exited.ok(),
            }
        }
        let mut orders = kill.clone();
        let may_signal = async {
            if orders
                .wait_for(|order| order.is_some_and(|order| order.may_signal))
                .await
                .is_err()
            {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = may_signal => {}
            () = grace_period_over(kill, Duration::ZERO, Instant::now()) => {}
            exited = &mut *exit => return exited.ok(),
        }
        self.runtime.signal(id, stop_signal);
        tokio::select! {
            exited = &mut *exit => return exited.ok(),
            () = grace_period_over(kill, MIN_GRACE_PERIOD, Instant::now()) => {}
        }
        self.runtime.signal(id, Signal::KILL.as_raw());
        exit.await.ok()
    }

    /// The state of the terminated container, with its termination message.
    async fn terminated(
        &self,
        id: &str,
        started_at: Timestamp,
        exited: Option<ContainerExit>,
    ) -> ContainerStateTerminated {
        let mut state = ContainerStateTerminated {
            container_id: Some(container_id::to_api(id)),
            started_at: Some(Time(started_at)),
            ..Default::default()
        };
        match exited {
            Some(exit) => {
                state.exit_code = exit.code;
                state.finished_at = Some(Time(exit.finished_at));
                let reason = match exit.code {
                    _ if exit.oom_killed => TerminationReason::OomKilled,
                    0 => TerminationReason::Completed,
                    _ => TerminationReason::Error,
                };
                state.reason = Some(reason.as_str().to_owned());
                let failed = exit.code != 0;
                state.message = self
                    .runtime
                    .termination_message(self.request, failed)
                    .await
                    .filter(|message| !message.is_empty());
            }
            // The runtime dropped the sender, which it should never do. Treat the container as exited.
            None => {
                state.exit_code = 137;
                state.finished_at = Some(Time(Timestamp::now()));
                let reason = TerminationReason::ContainerStatusUnknown;
                state.reason = Some(reason.as_str().to_owned());
            }
        }
        state
    }
}

/// Waits for an order to stop the run.
async fn kill_ordered(kill: &mut watch::Receiver<Option<KillOrder>>) {
    if kill.wait_for(Option::is_some).await.is_err() {
        std::future::pending::<()>().await;
    }
}

fn deadline(kill: &watch::Receiver<Option<KillOrder>>) -> Instant {
    kill.borrow()
        .map_or_else(Instant::now, |order| order.deadline)
}

/// Waits until the grace period ends, which can be shortened meanwhile, but at least until `minimum` after `since`.
async fn grace_period_over(
    kill: &mut watch::Receiver<Option<KillOrder>>,
    minimum: Duration,
    since: Instant,
) {
    loop {
        let end = deadline(kill).max(since + minimum);
        tokio::select! {
            () = sleep_until(end) => return,
            changed = kill.changed() => if changed.is_err() {
                return sleep_until(end).await;
            },
        }
    }
}
