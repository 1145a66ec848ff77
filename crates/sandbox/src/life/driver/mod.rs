//! Keeps the records, carries out plans, and publishes the state.

mod actions;
mod bundle;
mod facts;
mod probes;
mod up;

use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodSpec};
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};

use super::Message;
use super::journal::Journal;
use super::plan::{Action, Facts, plan, seconds};
use super::record::{Kill, Kind, Record};
use super::restart::RestartPolicy;
use super::status::{self, Around};
use crate::probe::worker::ProbeKind;
use crate::seams::{PodNetwork, Runtime};
use pod_protocol::{Bundle, PodState, Problem, Stop};
use up::Up;

/// Bound on consecutive plans without a message in between. It guards against an endless loop and is never reached.
const PLANS: usize = 100;

/// Runs one pod; the sole owner of its records.
pub struct Driver<R> {
    runtime: Rc<R>,
    bundle: Bundle,
    /// Init containers, containers, ephemeral containers, each in the order of the spec.
    records: Vec<Record>,
    handles: HashMap<u64, Handles>,
    last_serial: u64,
    journal: Journal,
    up: Up,
    network: PodNetwork,
    ending: Option<Instant>,
    resetting: bool,
    /// Set if the sandbox gives up and the pod goes on in another one. Holds the statuses of the killed containers from
    /// before the kill: these exits are not the pod's own, and the next sandbox must not count them.
    abandoned: Option<Vec<ContainerStatus>>,
    failure: Option<Problem>,
    born: Instant,
    /// Start of activeDeadlineSeconds.
    active_since: Instant,
    messages: mpsc::UnboundedSender<Message>,
    state: watch::Sender<PodState>,
}

/// The kill channel and the probe tasks of a run.
struct Handles {
    kill: watch::Sender<Option<Kill>>,
    probes: Vec<(ProbeKind, AbortHandle)>,
}

impl Drop for Handles {
    fn drop(&mut self) {
        for (_, task) in &self.probes {
            task.abort();
        }
    }
}

impl<R: Runtime> Driver<R> {
    /// Restores the records, but starts nothing.
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
            journal: Journal::default(),
            up: Up::first(now),
            network: PodNetwork::default(),
            ending: None,
            resetting: false,
            abandoned: None,
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

    /// Runs the pod until it is finished or abandoned.
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
                    // Handle all pending messages before acting or publishing.
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
        if self.abandoned.is_some() {
            return;
        }
        self.up = Up::Over;
        self.runtime.down().await;
        // Messages that arrived meanwhile, such as a stop with a failure reason.
        while let Ok(message) = inbox.try_recv() {
            self.hear(message);
        }
        self.publish(true);
    }

    /// Plans and carries out actions until none is left. Returns when to plan again, and whether the pod is finished.
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

    fn facts(&self) -> Facts<'_> {
        Facts {
            records: &self.records,
            policy: self.policy(),
            grace: self.grace(),
            up: matches!(self.up, Up::Done),
            ending: self.ending,
            resetting: self.resetting,
            now: Instant::now(),
        }
    }

    fn end(&mut self, grace: Duration) {
        let deadline = Instant::now() + grace;
        self.ending = Some(self.ending.map_or(deadline, |before| before.min(deadline)));
    }

    fn hear(&mut self, message: Message) {
        match message {
            Message::Bundle(bundle) => self.take_bundle(*bundle),
            Message::Stop(stop) => self.stop(stop),
            Message::Abandon => self.abandon(),
            Message::Up(result) => self.came_up(result),
            Message::Fact { serial, fact } => self.note_fact(serial, fact),
            Message::Probe {
                serial,
                which,
                word,
            } => self.note_probe(serial, which, word),
        }
    }

    fn abandon(&mut self) {
        if self.ending.is_none() {
            let killed = self.records.iter().filter(|record| {
                let run = record.run.as_ref();
                run.is_some_and(|run| run.kill.is_none())
            });
            let statuses = killed.map(|record| status::status(record, self.around()));
            self.abandoned = Some(statuses.collect());
            self.up = Up::Over;
            self.end(self.grace());
        }
    }

    fn stop(&mut self, stop: Stop) {
        // The stop ends the pod itself, so the exits of its containers count.
        self.abandoned = None;
        if self.failure.is_none() {
            self.failure = stop.failure;
        }
        self.end(seconds(stop.grace_seconds));
    }

    fn around(&self) -> Around {
        Around {
            policy: self.policy(),
            has_init: self
                .records
                .iter()
                .any(|record| matches!(record.kind, Kind::Init | Kind::Sidecar)),
            ending: self.ending.is_some(),
        }
    }

    /// The status to publish for a container.
    fn status(&self, record: &Record, around: Around) -> ContainerStatus {
        let Some(killed) = &self.abandoned else {
            return status::status(record, around);
        };
        let before = killed.iter().find(|status| status.name == record.name());
        let mut status = before
            .cloned()
            .unwrap_or_else(|| status::status(record, around));
        // Containers of an abandoned pod are being killed, and must not get traffic.
        status.ready = false;
        status
    }

    fn publish(&self, finished: bool) {
        let around = self.around();
        let statuses = |kinds: &[Kind]| {
            self.records
                .iter()
                .filter(|record| kinds.contains(&record.kind))
                .map(|record| self.status(record, around))
                .collect::<Vec<_>>()
        };
        let mut init_containers = statuses(&[Kind::Init, Kind::Sidecar]);
        let mut containers = statuses(&[Kind::Regular]);
        if finished {
            let initialized = self.records.iter().all(|record| match record.kind {
                Kind::Init => record.succeeded(),
                Kind::Sidecar => record.passed,
                Kind::Regular | Kind::Ephemeral => true,
            });
            status::give_up(initialized, &mut init_containers, &mut containers);
        }
        let state = PodState {
            sandbox_ready: matches!(self.up, Up::Done),
            pod_ips: self.network.ips.iter().map(ToString::to_string).collect(),
            init_containers,
            containers,
            ephemeral_containers: statuses(&[Kind::Ephemeral]),
            failure: self.failure.clone(),
            finished,
            events: self.journal.events(),
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
