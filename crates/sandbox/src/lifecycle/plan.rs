//! What is to be done next, decided from what is known. No clocks, no tasks, no side effects.
//!
//! The one who asks carries out the actions, notes what they change in the records, and asks again until there is
//! nothing left to do.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, ResourceRequirements};
use tokio::time::Instant;

use super::container_record::{KillOrder, ContainerType, ContainerRecord, ContainerRun, RunStage};
use super::restart::{self, RestartPolicy};

/// How long the end of a container, or a failed pull, is shown before the state says that it is being waited.
const SHOWN: Duration = Duration::from_secs(2);

/// What decisions are made from.
pub struct PlanInput<'a> {
    /// All containers: init containers, containers, ephemeral containers, each in the order of the spec.
    pub records: &'a [ContainerRecord],
    /// The pod's restart policy.
    pub policy: RestartPolicy,
    /// The pod's terminationGracePeriodSeconds.
    pub grace: Duration,
    /// The pod's namespaces, network and volumes are there.
    pub up: bool,
    /// The pod is to end; this is when patience ends.
    pub stop_deadline: Option<Instant>,
    /// All containers are being ended in order to start over.
    pub restarting_all: bool,
    /// The present.
    pub now: Instant,
}

/// What is to be done.
#[derive(Debug, Default, PartialEq)]
pub struct Plan {
    /// In this order.
    pub actions: Vec<Action>,
    /// Look again then, even if nothing happens.
    pub wake: Option<Instant>,
}

/// Something to do. Containers are named by their place in the records.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Start a container.
    Start(usize),
    /// Say that the restart of a container is being waited.
    CrashLoop(usize),
    /// Say that the pull of its image is being waited.
    PullBackOff(usize),
    /// End a run, or change the order to.
    Kill {
        /// Which.
        index: usize,
        /// How.
        kill: KillOrder,
        /// What to say about it.
        message: String,
    },
    /// A sidecar is up: those after it can start.
    Pass(usize),
    /// End all runs in order to start over.
    BeginReset,
    /// All runs have ended: start over.
    Reset,
    /// The pod's work is done, or can't be done: end what still runs.
    End,
    /// Nothing runs and nothing will.
    Finish,
}

/// Decides.
pub fn plan(facts: &PlanInput<'_>) -> Plan {
    let mut plan = Plan::default();
    if let Some(deadline) = facts.stop_deadline {
        plan.end_all(facts, deadline);
    } else if facts.restarting_all {
        plan.reset(facts);
    } else if facts.records.iter().any(ContainerRecord::wants_restart_of_all) {
        plan.actions.push(Action::BeginRestartAll);
    } else if facts.up {
        plan.live(facts);
    }
    plan
}

impl Plan {
    fn live(&mut self, facts: &PlanInput<'_>) {
        for (index, record) in of(facts, &[ContainerType::Ephemeral]) {
            if record.wants_start(facts.policy) {
                self.start(facts, index);
            }
        }
        match self.initialize(facts) {
            Initialization::Failed => self.actions.push(Action::StopPod),
            Initialization::Pending => {}
            Initialization::Done => self.regular(facts),
        }
    }

    /// Init containers one after the other, sidecars kept up.
    fn initialize(&mut self, facts: &PlanInput<'_>) -> Initialization {
        // Once a regular container has come, init containers are history.
        let initialized = of(facts, &[ContainerType::Regular])
            .any(|(_, record)| record.run.is_some() || record.exit().is_some());
        let mut result = Initialization::Done;
        for (index, record) in of(facts, &[ContainerType::Init, ContainerType::Sidecar]) {
            match record.kind {
                ContainerType::Sidecar => {
                    if record.run.is_some() {
                        self.check(facts, index);
                        if record.started() && !record.started_once {
                            self.actions.push(Action::MarkStarted(index));
                        }
                    } else {
                        self.start(facts, index);
                    }
                    if !record.started_once && !record.started() && !initialized {
                        result = Initialization::Pending;
                        break;
                    }
                }
                _ if initialized || record.succeeded() => {}
                _ if record.run.is_some() => {
                    result = Initialization::Pending;
                    break;
                }
                _ if record.wants_start(facts.policy) => {
                    self.start(facts, index);
                    result = Initialization::Pending;
                    break;
                }
                _ => return Initialization::Failed,
            }
        }
        result
    }

    fn regular(&mut self, facts: &PlanInput<'_>) {
        let mut alive = false;
        // A container is started for the first time when those before it have been, postStart hook and all.
        let mut first_start_under_way = false;
        for (index, record) in of(facts, &[ContainerType::Regular]) {
            if let Some(run) = &record.run {
                alive = true;
                first_start_under_way |=
                    record.exit().is_none() && !matches!(run.stage, RunStage::Running { .. });
                self.check(facts, index);
            } else if record.wants_start(facts.policy) {
                alive = true;
                if record.exit().is_some() {
                    self.start(facts, index);
                } else if !first_start_under_way {
                    first_start_under_way = self.start(facts, index);
                }
            }
        }
        if !alive {
            // Whatever was planned for sidecars is moot.
            self.actions.clear();
            self.actions.push(Action::StopPod);
        }
    }

    /// Plans to start a container, at once or when its time has come; tells whether it is at once.
    fn start(&mut self, facts: &PlanInput<'_>, index: usize) -> bool {
        let record = &facts.records[index];
        if record.blocked {
            return false;
        }
        if let Some(failure) = &record.pull_failure
            && !failure.shown
            && record.retry.is_some()
        {
            self.at(facts, failure.at + SHOWN, Action::ShowImagePullBackOff(index));
        }
        if let Some(retry) = record.retry
            && retry > facts.now
        {
            self.wake_at(retry);
            return false;
        }
        if let Some(ended) = &record.ended
            && let Some(until) = record.back_off.until(ended.at)
            && until > facts.now
        {
            let shown = record
                .waiting
                .as_ref()
                .is_some_and(|waiting| waiting.reason == "CrashLoopBackOff");
            if !shown {
                self.at(facts, ended.at + SHOWN, Action::ShowCrashLoopBackOff(index));
            }
            self.wake_at(until);
            return false;
        }
        self.actions.push(Action::Start(index));
        true
    }

    /// Ends a run that can't go on as it is.
    fn check(&mut self, facts: &PlanInput<'_>, index: usize) {
        let record = &facts.records[index];
        let Some(run) = record.run.as_ref().filter(|run| run.kill.is_none()) else {
            return;
        };
        let what = match record.kind {
            ContainerType::Sidecar => "Init container",
            _ => "Container",
        };
        let name = record.name();
        let (mut message, grace, restart) = if changed(record, run) {
            let message = format!("{what} {name} definition changed");
            (message, None, true)
        } else if restarts_to_resize(&record.spec, run.resources.as_ref()) {
            let message = format!("{what} {name} resize requires restart");
            (message, None, true)
        } else {
            // A rule can't be asked before there is an exit code; only the policies count.
            let restart = restart::policy(&record.spec, facts.policy) != RestartPolicy::Never;
            let (message, probe) = if run.liveness_failed {
                (
                    format!("{what} {name} failed liveness probe"),
                    &record.spec.liveness_probe,
                )
            } else if run.startup == Some(false) {
                (
                    format!("{what} {name} failed startup probe"),
                    &record.spec.startup_probe,
                )
            } else {
                return;
            };
            let grace = probe
                .as_ref()
                .and_then(|probe| probe.termination_grace_period_seconds);
            (message, grace, restart)
        };
        if restart && record.kind == ContainerType::Regular {
            message.push_str(", will be restarted");
        }
        let grace = grace.map_or(facts.grace, seconds);
        self.actions.push(Action::Kill {
            index,
            kill: KillOrder {
                deadline: facts.now + grace,
                may_signal: true,
                restart,
            },
            message,
        });
    }

    /// Ends everything: regular containers first, sidecars in reverse order.
    fn end_all(&mut self, facts: &PlanInput<'_>, deadline: Instant) {
        let records = facts.records;
        if records.iter().all(|record| record.run.is_none()) {
            self.actions.push(Action::Finish);
            return;
        }
        for (index, record) in records.iter().enumerate() {
            let Some(run) = &record.run else { continue };
            let turn = record.kind != ContainerType::Sidecar
                || !records.iter().enumerate().any(|(other, before)| {
                    before.run.is_some()
                        && (before.kind == ContainerType::Regular
                            || (before.kind == ContainerType::Sidecar && other > index))
                });
            self.kill(index, run, deadline, turn);
        }
    }

    fn reset(&mut self, facts: &PlanInput<'_>) {
        let mut running = false;
        for (index, record) in of(facts, &[ContainerType::Init, ContainerType::Sidecar, ContainerType::Regular]) {
            if let Some(run) = &record.run {
                running = true;
                if run.kill.is_none() {
                    self.kill(index, run, facts.now, true);
                }
            }
        }
        if !running {
            self.actions.push(Action::RestartAll);
        }
    }

    /// Orders the end of a run, or changes the order; later orders only shorten.
    fn kill(&mut self, index: usize, run: &ContainerRun, deadline: Instant, may_signal: bool) {
        let kill = match run.kill {
            Some(kill) => KillOrder {
                deadline: kill.deadline.min(deadline),
                may_signal: kill.may_signal || turn,
                restart: kill.restart,
            },
            None => KillOrder {
                deadline,
                turn,
                restart: false,
            },
        };
        if run.kill != Some(kill) {
            self.actions.push(Action::Kill {
                index,
                kill,
                message: String::new(),
            });
        }
    }

    /// Plans something for a moment, which may have come.
    fn at(&mut self, facts: &PlanInput<'_>, moment: Instant, action: Action) {
        if moment <= facts.now {
            self.actions.push(action);
        } else {
            self.wake_at(moment);
        }
    }

    fn wake_at(&mut self, moment: Instant) {
        self.wake = Some(self.wake.map_or(moment, |wake| wake.min(moment)));
    }
}

enum Initialization {
    Pending,
    Done,
    Failed,
}

fn of<'a>(facts: &PlanInput<'a>, kinds: &'static [ContainerType]) -> impl Iterator<Item = (usize, &'a ContainerRecord)> {
    facts
        .records
        .iter()
        .enumerate()
        .filter(|(_, record)| kinds.contains(&record.kind))
}

/// Whether it wants other resources than its run has, and says that it has to be restarted for them.
pub fn restarts_to_resize(container: &Container, has: Option<&ResourceRequirements>) -> bool {
    let wanted = container.resources.as_ref();
    let policies = container.resize_policy.iter().flatten();
    let mut strict = policies.filter(|policy| policy.restart_policy == "RestartContainer");
    strict.any(|policy| {
        let of = |resources: Option<&ResourceRequirements>| {
            let get =
                |list: &Option<BTreeMap<_, _>>| list.as_ref()?.get(&policy.resource_name).cloned();
            resources.map(|resources| (get(&resources.requests), get(&resources.limits)))
        };
        of(wanted).unwrap_or_default() != of(has).unwrap_or_default()
    })
}

fn changed(record: &ContainerRecord, run: &ContainerRun) -> bool {
    record.spec.image.as_deref().unwrap_or_default() != run.image
}

/// Seconds of a spec, which may be negative.
pub fn seconds(value: i64) -> Duration {
    // Longer than a year is forever, and keeps sums of instants from overflowing.
    Duration::from_secs(u64::try_from(value).unwrap_or(0).min(365 * 86_400))
}
