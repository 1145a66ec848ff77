//! Decides what to do next, from the records alone. No clocks, no tasks, no side effects.
//!
//! The driver carries out the actions, updates the records, and plans again until no action is left.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, ResourceRequirements};
use tokio::time::Instant;

use super::record::{Kill, Kind, Record, Run, Stage};
use super::restart::{self, RestartPolicy};

/// How long the status shows an exit or a failed pull before it shows the back-off.
const SHOWN: Duration = Duration::from_secs(2);

/// The input of [`plan`].
pub struct Facts<'a> {
    /// All containers: init containers, containers, ephemeral containers, each in the order of the spec.
    pub records: &'a [Record],
    /// The pod's restart policy.
    pub policy: RestartPolicy,
    /// The pod's terminationGracePeriodSeconds.
    pub grace: Duration,
    /// The pod's namespaces, network and volumes are set up.
    pub up: bool,
    /// The end of the grace period, if the pod is being stopped.
    pub ending: Option<Instant>,
    /// All containers are being stopped in order to restart them (RestartAllContainers).
    pub resetting: bool,
    pub now: Instant,
}

/// The output of [`plan`].
#[derive(Debug, Default, PartialEq)]
pub struct Plan {
    /// To be carried out in this order.
    pub actions: Vec<Action>,
    /// Plan again at this time, even without a message.
    pub wake: Option<Instant>,
}

/// An action of the driver. Containers are identified by their index in the records.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    Start(usize),
    /// Show a container as CrashLoopBackOff.
    CrashLoop(usize),
    /// Show a container as ImagePullBackOff.
    PullBackOff(usize),
    /// Stop a run, or change how it is being stopped.
    Kill {
        index: usize,
        kill: Kill,
        /// Message of the event; empty for the default.
        message: String,
    },
    /// A sidecar has started: stop blocking the containers after it.
    Pass(usize),
    /// Stop all runs in order to restart all containers.
    BeginReset,
    /// All runs have ended: restart all containers.
    Reset,
    /// The pod has succeeded or failed: stop the remaining runs.
    End,
    /// No container runs or will run.
    Finish,
}

pub fn plan(facts: &Facts<'_>) -> Plan {
    let mut plan = Plan::default();
    if let Some(deadline) = facts.ending {
        plan.end_all(facts, deadline);
    } else if facts.resetting {
        plan.reset(facts);
    } else if facts.records.iter().any(Record::asks_for_reset) {
        plan.actions.push(Action::BeginReset);
    } else if facts.up {
        plan.live(facts);
    }
    plan
}

impl Plan {
    fn live(&mut self, facts: &Facts<'_>) {
        for (index, record) in of(facts, &[Kind::Ephemeral]) {
            if record.wants_start(facts.policy) {
                self.start(facts, index);
            }
        }
        match self.initialize(facts) {
            Initialization::Failed => self.actions.push(Action::End),
            Initialization::Pending => {}
            Initialization::Done => self.regular(facts),
        }
    }

    /// Runs init containers one after the other, and keeps sidecars running.
    fn initialize(&mut self, facts: &Facts<'_>) -> Initialization {
        // Once a regular container was started, init containers do not run again.
        let initialized = of(facts, &[Kind::Regular])
            .any(|(_, record)| record.run.is_some() || record.exit().is_some());
        let mut result = Initialization::Done;
        for (index, record) in of(facts, &[Kind::Init, Kind::Sidecar]) {
            match record.kind {
                Kind::Sidecar => {
                    if record.run.is_some() {
                        self.check(facts, index);
                        if record.started() && !record.passed {
                            self.actions.push(Action::Pass(index));
                        }
                    } else {
                        self.start(facts, index);
                    }
                    if !record.passed && !record.started() && !initialized {
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

    fn regular(&mut self, facts: &Facts<'_>) {
        let mut alive = false;
        // A container's first start waits until the containers before it have started and their postStart hooks are
        // done.
        let mut first_start_under_way = false;
        for (index, record) in of(facts, &[Kind::Regular]) {
            if let Some(run) = &record.run {
                alive = true;
                first_start_under_way |=
                    record.exit().is_none() && !matches!(run.stage, Stage::Running { .. });
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
            // The pod ends, so drop the actions planned for sidecars.
            self.actions.clear();
            self.actions.push(Action::End);
        }
    }

    /// Plans the start of a container, now or when its back-off is over. Returns whether it is now.
    fn start(&mut self, facts: &Facts<'_>, index: usize) -> bool {
        let record = &facts.records[index];
        if record.held {
            return false;
        }
        if let Some(failure) = &record.pull_failure
            && !failure.shown
            && record.retry.is_some()
        {
            self.at(facts, failure.at + SHOWN, Action::PullBackOff(index));
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
                self.at(facts, ended.at + SHOWN, Action::CrashLoop(index));
            }
            self.wake_at(until);
            return false;
        }
        self.actions.push(Action::Start(index));
        true
    }

    /// Kills a run if its container's definition has changed or a probe has failed.
    fn check(&mut self, facts: &Facts<'_>, index: usize) {
        let record = &facts.records[index];
        let Some(run) = record.run.as_ref().filter(|run| run.kill.is_none()) else {
            return;
        };
        let what = match record.kind {
            Kind::Sidecar => "Init container",
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
            // Restart rules need an exit code, and there is none yet, so that only the policies count.
            let restart = restart::policy(&record.spec, facts.policy) != RestartPolicy::Never;
            let (message, probe) = if run.dead {
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
        if restart && record.kind == Kind::Regular {
            message.push_str(", will be restarted");
        }
        let grace = grace.map_or(facts.grace, seconds);
        self.actions.push(Action::Kill {
            index,
            kill: Kill {
                deadline: facts.now + grace,
                turn: true,
                restart,
            },
            message,
        });
    }

    /// Stops everything: regular containers first, then sidecars in reverse order.
    fn end_all(&mut self, facts: &Facts<'_>, deadline: Instant) {
        let records = facts.records;
        if records.iter().all(|record| record.run.is_none()) {
            self.actions.push(Action::Finish);
            return;
        }
        for (index, record) in records.iter().enumerate() {
            let Some(run) = &record.run else { continue };
            let turn = record.kind != Kind::Sidecar
                || !records.iter().enumerate().any(|(other, before)| {
                    before.run.is_some()
                        && (before.kind == Kind::Regular
                            || (before.kind == Kind::Sidecar && other > index))
                });
            self.kill(index, run, deadline, turn);
        }
    }

    fn reset(&mut self, facts: &Facts<'_>) {
        let mut running = false;
        for (index, record) in of(facts, &[Kind::Init, Kind::Sidecar, Kind::Regular]) {
            if let Some(run) = &record.run {
                running = true;
                if run.kill.is_none() {
                    self.kill(index, run, facts.now, true);
                }
            }
        }
        if !running {
            self.actions.push(Action::Reset);
        }
    }

    /// Stops a run, or changes how it is being stopped; a change can only shorten the grace period.
    fn kill(&mut self, index: usize, run: &Run, deadline: Instant, turn: bool) {
        let kill = match run.kill {
            Some(kill) => Kill {
                deadline: kill.deadline.min(deadline),
                turn: kill.turn || turn,
                restart: kill.restart,
            },
            None => Kill {
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

    /// Plans an action for `moment`, or now if that has passed.
    fn at(&mut self, facts: &Facts<'_>, moment: Instant, action: Action) {
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

fn of<'a>(facts: &Facts<'a>, kinds: &'static [Kind]) -> impl Iterator<Item = (usize, &'a Record)> {
    facts
        .records
        .iter()
        .enumerate()
        .filter(|(_, record)| kinds.contains(&record.kind))
}

/// Whether the container wants other resources than its run has, and its resizePolicy requires a restart for them.
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

fn changed(record: &Record, run: &Run) -> bool {
    record.spec.image.as_deref().unwrap_or_default() != run.image
}

/// Converts seconds of a spec; negative values count as 0.
pub fn seconds(value: i64) -> Duration {
    // The cap of a year keeps sums of instants from overflowing.
    Duration::from_secs(u64::try_from(value).unwrap_or(0).min(365 * 86_400))
}
