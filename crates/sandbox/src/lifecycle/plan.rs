//! Decides what to do next, from the records alone. No clocks, no tasks, no side effects.
//!
//! The driver carries out the actions, updates the records, and plans again until no action is left.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, ResourceRequirements};
use pod_protocol::restart::{self, RestartPolicy};
use tokio::time::Instant;

use super::clock::seconds;
use super::container_record::{
    ContainerRecord, ContainerRun, ContainerType, KillOrder, RunStage, WaitingState,
};

/// How long the status shows an exit or a failed pull before it shows the back-off.
const BACK_OFF_STATUS_DELAY: Duration = Duration::from_secs(2);

/// The input of [`plan`].
pub struct PlanInput<'a> {
    /// All containers: init containers, containers, ephemeral containers, each in the order of the spec.
    pub records: &'a [ContainerRecord],
    /// The pod's restart policy.
    pub restart_policy: RestartPolicy,
    /// The pod's terminationGracePeriodSeconds.
    pub grace_period: Duration,
    /// The pod's namespaces, network and volumes are set up.
    pub sandbox_ready: bool,
    /// The end of the grace period, if the pod is being stopped.
    pub stop_deadline: Option<Instant>,
    /// All containers are being stopped in order to restart them (RestartAllContainers).
    pub restarting_all: bool,
    pub now: Instant,
}

/// The output of [`plan`].
#[derive(Debug, Default, PartialEq)]
pub struct LifecyclePlan {
    /// To be carried out in this order.
    pub actions: Vec<PlanAction>,
    /// Plan again at this time, even without a message.
    pub wake_at: Option<Instant>,
}

/// An action of the driver. Containers are named by their index in the records.
#[derive(Clone, Debug, PartialEq)]
pub enum PlanAction {
    Start(usize),
    /// Show a container as waiting with CrashLoopBackOff.
    ShowCrashLoopBackOff(usize),
    /// Show a container as waiting with ImagePullBackOff.
    ShowImagePullBackOff(usize),
    /// Stop a run, or change how it is being stopped.
    Kill {
        index: usize,
        order: KillOrder,
        /// Message of the Event; empty for the default.
        message: String,
    },
    /// A sidecar has started: stop blocking the containers after it.
    MarkStartedOnce(usize),
    /// Stop all runs in order to restart all containers.
    BeginRestartAll,
    /// All runs have ended: restart all containers.
    RestartAll,
    /// The pod has succeeded or failed: stop the remaining runs.
    StopPod,
    /// No container runs or will run: the pod is finished.
    Finish,
}

/// Decides what to do next.
pub fn plan(input: &PlanInput<'_>) -> LifecyclePlan {
    let mut plan = LifecyclePlan::default();
    if let Some(deadline) = input.stop_deadline {
        plan.stop_all(input, deadline);
    } else if input.restarting_all {
        plan.restart_all(input);
    } else if input
        .records
        .iter()
        .any(ContainerRecord::triggers_restart_all)
    {
        plan.actions.push(PlanAction::BeginRestartAll);
    } else if input.sandbox_ready {
        plan.run_all(input);
    }
    plan
}

impl LifecyclePlan {
    /// Runs the containers of a pod that is not being stopped.
    fn run_all(&mut self, input: &PlanInput<'_>) {
        for (index, record) in of_types(input, &[ContainerType::Ephemeral]) {
            if record.should_start(input.restart_policy) {
                self.start(input, index);
            }
        }
        match self.initialize(input) {
            Initialization::Failed => self.actions.push(PlanAction::StopPod),
            Initialization::Pending => {}
            Initialization::Done => self.run_regular(input),
        }
    }

    /// Runs init containers one after the other, and keeps sidecars running.
    fn initialize(&mut self, input: &PlanInput<'_>) -> Initialization {
        // Once a regular container was started, init containers do not run again.
        let initialized = of_types(input, &[ContainerType::Regular])
            .any(|(_, record)| record.run.is_some() || record.last_fresh_run().is_some());
        let mut result = Initialization::Done;
        for (index, record) in of_types(input, &[ContainerType::Init, ContainerType::Sidecar]) {
            match record.container_type {
                ContainerType::Sidecar => {
                    if record.run.is_some() {
                        self.check_run(input, index);
                        if record.is_started() && !record.started_once {
                            self.actions.push(PlanAction::MarkStartedOnce(index));
                        }
                    } else {
                        self.start(input, index);
                    }
                    if !record.started_once && !record.is_started() && !initialized {
                        result = Initialization::Pending;
                        break;
                    }
                }
                _ if initialized || record.has_succeeded() => {}
                _ if record.run.is_some() => {
                    result = Initialization::Pending;
                    break;
                }
                _ if record.should_start(input.restart_policy) => {
                    self.start(input, index);
                    result = Initialization::Pending;
                    break;
                }
                _ => return Initialization::Failed,
            }
        }
        result
    }

    fn run_regular(&mut self, input: &PlanInput<'_>) {
        let mut any_active = false;
        // A container's first start waits until the containers before it have started and their postStart hooks are
        // done.
        let mut first_start_under_way = false;
        for (index, record) in of_types(input, &[ContainerType::Regular]) {
            if let Some(run) = &record.run {
                any_active = true;
                first_start_under_way |= record.last_fresh_run().is_none()
                    && !matches!(run.stage, RunStage::Running { .. });
                self.check_run(input, index);
            } else if record.should_start(input.restart_policy) {
                any_active = true;
                if record.last_fresh_run().is_some() {
                    self.start(input, index);
                } else if !first_start_under_way {
                    first_start_under_way = self.start(input, index);
                }
            }
        }
        if !any_active {
            // The pod ends, so drop the actions planned for sidecars.
            self.actions.clear();
            self.actions.push(PlanAction::StopPod);
        }
    }

    /// Plans the start of a container, now or when its back-off is over. Returns whether it is now.
    fn start(&mut self, input: &PlanInput<'_>, index: usize) -> bool {
        let record = &input.records[index];
        if record.waits_for_bundle {
            return false;
        }
        if let Some(failure) = &record.pull_failure
            && !failure.back_off_shown
            && record.retry_at.is_some()
        {
            self.push_at(
                input,
                failure.at + BACK_OFF_STATUS_DELAY,
                PlanAction::ShowImagePullBackOff(index),
            );
        }
        if let Some(retry_at) = record.retry_at
            && retry_at > input.now
        {
            self.wake_by(retry_at);
            return false;
        }
        if let Some(last_run) = &record.last_run
            && let Some(restart_at) = record.back_off.retry_at(last_run.at)
            && restart_at > input.now
        {
            if !matches!(record.waiting, Some(WaitingState::CrashLoopBackOff(_))) {
                self.push_at(
                    input,
                    last_run.at + BACK_OFF_STATUS_DELAY,
                    PlanAction::ShowCrashLoopBackOff(index),
                );
            }
            self.wake_by(restart_at);
            return false;
        }
        self.actions.push(PlanAction::Start(index));
        true
    }

    /// Kills a run if its image has changed, a resize requires a restart, or a probe has failed.
    fn check_run(&mut self, input: &PlanInput<'_>, index: usize) {
        let record = &input.records[index];
        let Some(run) = record.run.as_ref().filter(|run| run.kill.is_none()) else {
            return;
        };
        let type_name = match record.container_type {
            ContainerType::Sidecar => "Init container",
            _ => "Container",
        };
        let name = record.name();
        let (mut message, grace_seconds, restart) = if image_changed(record, run) {
            let message = format!("{type_name} {name} definition changed");
            (message, None, true)
        } else if resize_requires_restart(&record.spec, run.resources.as_ref()) {
            let message = format!("{type_name} {name} resize requires restart");
            (message, None, true)
        } else {
            // Restart rules need an exit code, and there is none yet, so only the policies count.
            let policy = restart::effective_policy(&record.spec, input.restart_policy);
            let restart = policy != RestartPolicy::Never;
            let (message, probe) = if run.liveness_failed {
                (
                    format!("{type_name} {name} failed liveness probe"),
                    &record.spec.liveness_probe,
                )
            } else if run.startup_succeeded == Some(false) {
                (
                    format!("{type_name} {name} failed startup probe"),
                    &record.spec.startup_probe,
                )
            } else {
                return;
            };
            let grace_seconds = probe
                .as_ref()
                .and_then(|probe| probe.termination_grace_period_seconds);
            (message, grace_seconds, restart)
        };
        if restart && record.container_type == ContainerType::Regular {
            message.push_str(", will be restarted");
        }
        let grace_period = grace_seconds.map_or(input.grace_period, seconds);
        self.actions.push(PlanAction::Kill {
            index,
            order: KillOrder {
                deadline: input.now + grace_period,
                may_signal: true,
                force_restart: restart,
            },
            message,
        });
    }

    /// Stops all containers: regular containers first, then sidecars in reverse order.
    fn stop_all(&mut self, input: &PlanInput<'_>, deadline: Instant) {
        let records = input.records;
        if records.iter().all(|record| record.run.is_none()) {
            self.actions.push(PlanAction::Finish);
            return;
        }
        for (index, record) in records.iter().enumerate() {
            let Some(run) = &record.run else { continue };
            // Sidecars wait for regular containers and for later sidecars.
            let must_wait = record.container_type == ContainerType::Sidecar
                && records.iter().enumerate().any(|(other_index, other)| {
                    other.run.is_some()
                        && (other.container_type == ContainerType::Regular
                            || (other.container_type == ContainerType::Sidecar
                                && other_index > index))
                });
            self.kill(index, run, deadline, !must_wait);
        }
    }

    /// Stops all containers but ephemeral ones, then restarts them.
    fn restart_all(&mut self, input: &PlanInput<'_>) {
        let mut running = false;
        for (index, record) in of_types(
            input,
            &[
                ContainerType::Init,
                ContainerType::Sidecar,
                ContainerType::Regular,
            ],
        ) {
            if let Some(run) = &record.run {
                running = true;
                if run.kill.is_none() {
                    self.kill(index, run, input.now, true);
                }
            }
        }
        if !running {
            self.actions.push(PlanAction::RestartAll);
        }
    }

    /// Stops a run, or changes how it is being stopped; a change can only shorten the grace period.
    fn kill(&mut self, index: usize, run: &ContainerRun, deadline: Instant, may_signal: bool) {
        let order = match run.kill {
            Some(earlier) => KillOrder {
                deadline: earlier.deadline.min(deadline),
                may_signal: earlier.may_signal || may_signal,
                force_restart: earlier.force_restart,
            },
            None => KillOrder {
                deadline,
                may_signal,
                force_restart: false,
            },
        };
        if run.kill != Some(order) {
            self.actions.push(PlanAction::Kill {
                index,
                order,
                message: String::new(),
            });
        }
    }

    /// Plans an action, now or at a later plan if `at` has not passed.
    fn push_at(&mut self, input: &PlanInput<'_>, at: Instant, action: PlanAction) {
        if at <= input.now {
            self.actions.push(action);
        } else {
            self.wake_by(at);
        }
    }

    fn wake_by(&mut self, at: Instant) {
        self.wake_at = Some(self.wake_at.map_or(at, |wake_at| wake_at.min(at)));
    }
}

enum Initialization {
    Pending,
    Done,
    Failed,
}

fn of_types<'a>(
    input: &PlanInput<'a>,
    types: &'static [ContainerType],
) -> impl Iterator<Item = (usize, &'a ContainerRecord)> {
    input
        .records
        .iter()
        .enumerate()
        .filter(|(_, record)| types.contains(&record.container_type))
}

/// Whether the spec's resources differ from those of the run, and resizePolicy requires a restart for that.
pub fn resize_requires_restart(
    container: &Container,
    actual: Option<&ResourceRequirements>,
) -> bool {
    let wanted = container.resources.as_ref();
    let policies = container.resize_policy.iter().flatten();
    let mut with_restart = policies.filter(|policy| policy.restart_policy == "RestartContainer");
    with_restart.any(|policy| {
        let amounts = |resources: Option<&ResourceRequirements>| {
            let get =
                |list: &Option<BTreeMap<_, _>>| list.as_ref()?.get(&policy.resource_name).cloned();
            resources.map(|resources| (get(&resources.requests), get(&resources.limits)))
        };
        amounts(wanted).unwrap_or_default() != amounts(actual).unwrap_or_default()
    })
}

fn image_changed(record: &ContainerRecord, run: &ContainerRun) -> bool {
    record.spec.image.as_deref().unwrap_or_default() != run.image
}
