//! Owns the records, carries out plans, and publishes the pod's state.

mod actions;
mod bundle;
mod probes;
mod run_events;
mod setup;

use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodSpec};
use pod_protocol::restart::RestartPolicy;
use pod_protocol::{Bundle, HostFacts, PodFailure, PodState, Stop};
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};

use super::DriverMessage;
use super::clock::seconds;
use super::container_record::{ContainerRecord, ContainerType, KillOrder};
use super::event_log::EventLog;
use super::plan::{PlanAction, PlanInput, plan};
use super::status::{self, StatusContext};
use crate::container_runtime::{ContainerRuntime, PodNetwork};
use crate::lifecycle::probe::worker::ProbeKind;
use setup::SetupState;

/// Bound on consecutive plans without a message in between. It guards against an endless loop and is never reached.
const MAX_PLANS: usize = 100;
/// Pause after that bound is reached.
const PLAN_PAUSE: Duration = Duration::from_secs(10);

/// Runs one pod; the sole owner of its records.
pub struct LifecycleDriver<R> {
    runtime: Rc<R>,
    bundle: Bundle,
    /// Init containers, containers, ephemeral containers, each in the order of the spec.
    records: Vec<ContainerRecord>,
    /// By serial of the run.
    handles: HashMap<u64, RunHandles>,
    last_serial: u64,
    events: EventLog,
    setup: SetupState,
    network: PodNetwork,
    /// The end of the grace period, if the pod is being stopped.
    stop_deadline: Option<Instant>,
    restarting_all: bool,
    /// Set if the sandbox ends and the pod goes on in another one: the statuses of the killed containers before the kill.
    /// The next sandbox must not count these exits, because the pod did not cause them.
    abandoned: Option<Vec<ContainerStatus>>,
    failure: Option<PodFailure>,
    created_at: Instant,
    /// Start of activeDeadlineSeconds.
    active_since: Instant,
    messages: mpsc::UnboundedSender<DriverMessage>,
    state: watch::Sender<PodState>,
}

/// The kill channel and the probe tasks of a run.
struct RunHandles {
    kill: watch::Sender<Option<KillOrder>>,
    probes: Vec<(ProbeKind, AbortHandle)>,
}

impl Drop for RunHandles {
    fn drop(&mut self) {
        for (_, task) in &self.probes {
            task.abort();
        }
    }
}

impl<R: ContainerRuntime> LifecycleDriver<R> {
    /// Restores the records, but starts nothing.
    pub fn new(
        runtime: Rc<R>,
        bundle: Bundle,
        messages: mpsc::UnboundedSender<DriverMessage>,
        state: watch::Sender<PodState>,
    ) -> Self {
        let now = Instant::now();
        let mut driver = Self {
            runtime,
            records: Vec::new(),
            handles: HashMap::new(),
            last_serial: 0,
            events: EventLog::default(),
            setup: SetupState::due_at(now),
            network: PodNetwork::default(),
            stop_deadline: None,
            restarting_all: false,
            abandoned: None,
            failure: None,
            created_at: now,
            active_since: now,
            messages,
            state,
            bundle,
        };
        driver.update_records();
        driver.restore_records(now);
        driver.publish(false);
        driver
    }

    /// Runs the pod until it is finished or abandoned.
    pub async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<DriverMessage>) {
        loop {
            let (wake_at, is_finished) = self.carry_out_plans();
            if is_finished {
                break;
            }
            self.publish(false);
            let timer = async {
                match wake_at {
                    Some(wake_at) => sleep_until(wake_at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                message = inbox.recv() => {
                    // Handle all pending messages before acting or publishing.
                    let mut next = message;
                    while let Some(message) = next {
                        self.handle(message);
                        next = inbox.try_recv().ok();
                    }
                }
                () = timer => {}
            }
        }
        self.publish(false);
        if self.abandoned.is_some() {
            return;
        }
        self.setup = SetupState::Ended;
        self.runtime.tear_down().await;
        // Messages that arrived meanwhile, such as a stop with a failure reason.
        while let Ok(message) = inbox.try_recv() {
            self.handle(message);
        }
        self.publish(true);
    }

    /// Plans and carries out actions until none is left. Returns when to plan again, and whether the pod is finished.
    fn carry_out_plans(&mut self) -> (Option<Instant>, bool) {
        let mut wake_at = None;
        for _ in 0..MAX_PLANS {
            let active_deadline = self.check_active_deadline();
            let setup_retry = self.check_setup();
            let plan = plan(&self.plan_input());
            let times = [active_deadline, setup_retry, plan.wake_at];
            wake_at = times.into_iter().flatten().min();
            if plan.actions.is_empty() {
                return (wake_at, false);
            }
            for action in plan.actions {
                if action == PlanAction::Finish {
                    return (None, true);
                }
                self.carry_out(action);
            }
        }
        tracing::error!(pod = %self.pod_full_name(), "plans do not come to an end; pausing");
        let earliest = Instant::now() + PLAN_PAUSE;
        (Some(wake_at.map_or(earliest, |at| at.max(earliest))), false)
    }

    fn plan_input(&self) -> PlanInput<'_> {
        PlanInput {
            records: &self.records,
            restart_policy: self.restart_policy(),
            grace_period: self.grace_period(),
            sandbox_ready: matches!(self.setup, SetupState::Done),
            stop_deadline: self.stop_deadline,
            restarting_all: self.restarting_all,
            now: Instant::now(),
        }
    }

    /// Stops the pod. A later call can only shorten the grace period.
    fn begin_stop(&mut self, grace_period: Duration) {
        let deadline = Instant::now() + grace_period;
        let earlier = self.stop_deadline;
        self.stop_deadline = Some(earlier.map_or(deadline, |earlier| earlier.min(deadline)));
    }

    fn handle(&mut self, message: DriverMessage) {
        match message {
            DriverMessage::Bundle(bundle) => self.apply_bundle(*bundle),
            DriverMessage::Stop(stop) => self.stop(stop),
            DriverMessage::Abandon => self.abandon(),
            DriverMessage::SetupResult(result) => self.apply_setup_result(result),
            DriverMessage::RunEvent { serial, event } => self.apply_run_event(serial, event),
            DriverMessage::ProbeEvent {
                serial,
                kind,
                event,
            } => self.apply_probe_event(serial, kind, event),
        }
    }

    fn abandon(&mut self) {
        if self.stop_deadline.is_none() {
            let killed = self.records.iter().filter(|record| {
                let run = record.run.as_ref();
                run.is_some_and(|run| run.kill.is_none())
            });
            let statuses = killed.map(|record| status::status(record, self.status_context()));
            self.abandoned = Some(statuses.collect());
            self.setup = SetupState::Ended;
            self.begin_stop(self.grace_period());
        }
    }

    fn stop(&mut self, stop: Stop) {
        // The stop ends the pod itself, so the exits of its containers count.
        self.abandoned = None;
        if self.failure.is_none() {
            self.failure = stop.failure;
        }
        self.begin_stop(seconds(stop.grace_seconds));
    }

    fn status_context(&self) -> StatusContext {
        StatusContext {
            restart_policy: self.restart_policy(),
            has_init_containers: self.records.iter().any(|record| {
                matches!(
                    record.container_type,
                    ContainerType::Init | ContainerType::Sidecar
                )
            }),
            is_stopping: self.stop_deadline.is_some(),
        }
    }

    /// The status to publish for a container.
    fn status(&self, record: &ContainerRecord, context: StatusContext) -> ContainerStatus {
        let Some(killed) = &self.abandoned else {
            return status::status(record, context);
        };
        let before = killed.iter().find(|status| status.name == record.name());
        let mut status = before
            .cloned()
            .unwrap_or_else(|| status::status(record, context));
        // Containers of an abandoned pod are being killed, and must not get traffic.
        status.ready = false;
        status
    }

    fn publish(&self, finished: bool) {
        let context = self.status_context();
        let statuses = |types: &[ContainerType]| {
            self.records
                .iter()
                .filter(|record| types.contains(&record.container_type))
                .map(|record| self.status(record, context))
                .collect::<Vec<_>>()
        };
        let mut init_containers = statuses(&[ContainerType::Init, ContainerType::Sidecar]);
        let mut containers = statuses(&[ContainerType::Regular]);
        if finished {
            let initialized = self
                .records
                .iter()
                .all(|record| match record.container_type {
                    ContainerType::Init => record.has_succeeded(),
                    ContainerType::Sidecar => record.started_once,
                    ContainerType::Regular | ContainerType::Ephemeral => true,
                });
            status::fail_unterminated(initialized, &mut init_containers, &mut containers);
        }
        let state = PodState {
            // The sandbox adds it.
            host: HostFacts::default(),
            sandbox_ready: matches!(self.setup, SetupState::Done),
            pod_ips: self.network.ips.iter().map(ToString::to_string).collect(),
            init_containers,
            containers,
            ephemeral_containers: statuses(&[ContainerType::Ephemeral]),
            failure: self.failure.clone(),
            finished,
            events: self.events.events(),
            observed_generation: self.bundle.pod.metadata.generation,
        };
        self.state.send_if_modified(|published| {
            let is_changed = *published != state;
            if is_changed {
                *published = state;
            }
            is_changed
        });
    }

    fn spec(&self) -> Option<&PodSpec> {
        self.bundle.pod.spec.as_ref()
    }

    fn restart_policy(&self) -> RestartPolicy {
        RestartPolicy::of_pod(self.spec().and_then(|spec| spec.restart_policy.as_deref()))
    }

    fn grace_period(&self) -> Duration {
        let spec = self.spec();
        seconds(
            spec.and_then(|spec| spec.termination_grace_period_seconds)
                .unwrap_or(30),
        )
    }

    /// The pod in messages, as upstream formats it: `NAME_NAMESPACE(UID)`.
    fn pod_full_name(&self) -> String {
        let Pod { metadata, .. } = &self.bundle.pod;
        let part = |part: &Option<String>| part.clone().unwrap_or_default();
        format!(
            "{}_{}({})",
            part(&metadata.name),
            part(&metadata.namespace),
            part(&metadata.uid)
        )
    }
}
