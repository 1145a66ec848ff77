//! Keeps the records, carries out plans, and publishes the state.

mod actions;
mod bundle;
mod run_events;
mod probes;
mod setup;

use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodSpec};
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};

use super::Message;
use super::event_log::EventLog;
use super::plan::{Action, PlanInput, plan, seconds};
use super::container_record::{KillOrder, ContainerType, ContainerRecord};
use super::restart::RestartPolicy;
use super::status::{self, StatusContext};
use crate::probe::worker::ProbeKind;
use crate::container_runtime::{ContainerRuntime, PodNetwork};
use pod_protocol::{Bundle, PodState, Problem, Stop};
use setup::SetupState;

/// A bound on plans that follow each other without anything happening between them; never reached.
const PLANS: usize = 100;

/// The one who keeps the records.
pub struct Driver<R> {
    runtime: Rc<R>,
    bundle: Bundle,
    /// Init containers, containers, ephemeral containers, each in the order of the spec.
    records: Vec<ContainerRecord>,
    handles: HashMap<u64, RunHandles>,
    last_serial: u64,
    events: EventLog,
    up: SetupState,
    network: PodNetwork,
    stop_deadline: Option<Instant>,
    restarting_all: bool,
    /// The containers end, and the pod goes on in another sandbox.
    abandoned: bool,
    failure: Option<Problem>,
    born: Instant,
    /// Since when activeDeadlineSeconds counts.
    active_since: Instant,
    messages: mpsc::UnboundedSender<Message>,
    state: watch::Sender<PodState>,
}

/// What belongs to a run beside its record.
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

impl<R: ContainerRuntime> Driver<R> {
    /// A pod before anything of it was started.
    pub fn new(
        runtime: Rc<R>,
        bundle: Bundle,
        messages: mpsc::UnboundedSender<Message>,
        state: watch::Sender<PodState>,
    ) -> Self {
        let now = Instant::now();
        let mut driver = Self {
            runtime,
            records: Vec::new(),
            handles: HashMap::new(),
            last_serial: 0,
            events: EventLog::default(),
            up: SetupState::first(now),
            network: PodNetwork::default(),
            stop_deadline: None,
            restarting_all: false,
            abandoned: false,
            failure: None,
            born: now,
            active_since: now,
            messages,
            state,
            bundle,
        };
        driver.take_specs();
        driver.remember(now);
        driver.publish(false);
        driver
    }

    /// Lives the pod's life.
    pub async fn live(mut self, mut inbox: mpsc::UnboundedReceiver<Message>) {
        loop {
            let (wake, over) = self.act();
            if over {
                break;
            }
            self.publish(false);
            let alarm = async {
                match wake {
                    Some(wake) => sleep_until(wake).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                message = inbox.recv() => {
                    // All that has been said by now is heard before anything is done or published.
                    let mut next = message;
                    while let Some(message) = next {
                        self.hear(message);
                        next = inbox.try_recv().ok();
                    }
                }
                () = alarm => {}
            }
        }
        self.publish(false);
        if self.abandoned {
            return;
        }
        self.up = SetupState::Over;
        self.runtime.tear_down().await;
        // What was said meanwhile, such as a reason for the end.
        while let Ok(message) = inbox.try_recv() {
            self.hear(message);
        }
        self.publish(true);
    }

    /// Plans and does, until there is nothing left to do; tells when to look again, or that all is over.
    fn act(&mut self) -> (Option<Instant>, bool) {
        let mut wake = None;
        for _ in 0..PLANS {
            let deadline = self.check_deadline();
            let up = self.check_up();
            let plan = plan(&self.facts());
            wake = [deadline, up, plan.wake].into_iter().flatten().min();
            if plan.actions.is_empty() {
                return (wake, false);
            }
            for action in plan.actions {
                if action == Action::Finish {
                    return (None, true);
                }
                self.carry_out(action);
            }
        }
        tracing::error!(pod = %self.pod_name(), "plans without end; waiting a while");
        let later = Instant::now() + Duration::from_secs(10);
        (Some(wake.map_or(later, |wake| wake.max(later))), false)
    }

    fn facts(&self) -> PlanInput<'_> {
        PlanInput {
            records: &self.records,
            policy: self.policy(),
            grace: self.grace(),
            up: matches!(self.up, SetupState::Done),
            stop_deadline: self.stop_deadline,
            restarting_all: self.restarting_all,
            now: Instant::now(),
        }
    }

    fn end(&mut self, grace: Duration) {
        let deadline = Instant::now() + grace;
        self.stop_deadline = Some(self.stop_deadline.map_or(deadline, |before| before.min(deadline)));
    }

    fn hear(&mut self, message: Message) {
        match message {
            Message::Bundle(bundle) => self.take_bundle(*bundle),
            Message::Stop(stop) => self.stop(stop),
            Message::Abandon => self.abandon(),
            Message::SetUp(result) => self.came_up(result),
            Message::RunEvent { serial, fact } => self.note_fact(serial, fact),
            Message::Probe {
                serial,
                which,
                word,
            } => self.note_probe(serial, which, word),
        }
    }

    fn abandon(&mut self) {
        if self.stop_deadline.is_none() {
            self.abandoned = true;
            self.up = SetupState::Over;
            self.end(self.grace());
        }
    }

    fn stop(&mut self, stop: Stop) {
        // Now the pod itself is to end.
        self.abandoned = false;
        if self.failure.is_none() {
            self.failure = stop.failure;
        }
        self.end(seconds(stop.grace_seconds));
    }

    fn publish(&self, finished: bool) {
        let around = StatusContext {
            policy: self.policy(),
            has_init: self
                .records
                .iter()
                .any(|record| matches!(record.kind, ContainerType::Init | ContainerType::Sidecar)),
            stop_deadline: self.stop_deadline.is_some(),
        };
        let statuses = |kinds: &[ContainerType]| {
            self.records
                .iter()
                .filter(|record| kinds.contains(&record.kind))
                .map(|record| status::status(record, around))
                .collect::<Vec<_>>()
        };
        let mut init_containers = statuses(&[ContainerType::Init, ContainerType::Sidecar]);
        let mut containers = statuses(&[ContainerType::Regular]);
        if self.abandoned {
            let all = init_containers.iter_mut().chain(&mut containers);
            all.for_each(|status| status.ready = false);
        }
        if finished {
            let initialized = self.records.iter().all(|record| match record.kind {
                ContainerType::Init => record.succeeded(),
                ContainerType::Sidecar => record.started_once,
                ContainerType::Regular | ContainerType::Ephemeral => true,
            });
            status::give_up(initialized, &mut init_containers, &mut containers);
        }
        let state = PodState {
            sandbox_ready: matches!(self.up, SetupState::Done),
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
            let differs = *published != state;
            if differs {
                *published = state;
            }
            differs
        });
    }

    fn spec(&self) -> Option<&PodSpec> {
        self.bundle.pod.spec.as_ref()
    }

    fn policy(&self) -> RestartPolicy {
        RestartPolicy::of_pod(self.spec().and_then(|spec| spec.restart_policy.as_deref()))
    }

    fn grace(&self) -> Duration {
        let spec = self.spec();
        seconds(
            spec.and_then(|spec| spec.termination_grace_period_seconds)
                .unwrap_or(30),
        )
    }

    fn pod_name(&self) -> String {
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
