//! Keeps the records, carries out plans, and publishes the state.

use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};

use super::Message;
use super::back_off::go_duration;
use super::clock::instant_of;
use super::hooks::Place;
use super::journal::Journal;
use super::plan::{Action, Facts, plan, seconds};
use super::record::{Ended, Kill, Kind, PullFailure, Record, Run, Stage, as_container};
use super::restart::RestartPolicy;
use super::run::{self, Fact, Order, Reporter};
use super::status::{self, Around};
use crate::probe::Subject;
use crate::probe::worker::{self, Which, Word};
use crate::protocol::{Bundle, PodState, Problem, Stop};
use crate::seams::{PodNetwork, Runtime};

/// How long a container that could not be made waits for its next try.
const RETRY: Duration = Duration::from_secs(10);
/// The shortest and the longest wait before the pod's namespaces and volumes are tried again.
const UP_RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// A bound on plans that follow each other without anything happening between them; never reached.
const PLANS: usize = 100;

/// The one who keeps the records.
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
    failure: Option<Problem>,
    born: Instant,
    /// Since when activeDeadlineSeconds counts.
    active_since: Instant,
    messages: mpsc::UnboundedSender<Message>,
    state: watch::Sender<PodState>,
}

/// The pod's namespaces, network and volumes.
enum Up {
    Trying { task: AbortHandle, delay: Duration },
    Waiting { until: Instant, delay: Duration },
    Done,
    Over,
}

/// What belongs to a run beside its record.
struct Handles {
    kill: watch::Sender<Option<Kill>>,
    probes: Vec<(Which, AbortHandle)>,
}

impl Drop for Handles {
    fn drop(&mut self) {
        for (_, task) in &self.probes {
            task.abort();
        }
    }
}

impl<R: Runtime> Driver<R> {
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
            journal: Journal::default(),
            up: Up::Waiting {
                until: now,
                delay: UP_RETRY.0,
            },
            network: PodNetwork::default(),
            ending: None,
            resetting: false,
            failure: None,
            born: now,
            active_since: now,
            messages,
            state,
            bundle,
        };
        driver.take_specs();
        driver.remember(now);
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
                message = inbox.recv() => if let Some(message) = message { self.hear(message) },
                () = alarm => {}
            }
        }
        self.publish(false);
        self.up = Up::Over;
        self.runtime.down().await;
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
        let later = Instant::now() + RETRY;
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

    fn carry_out(&mut self, action: Action) {
        match action {
            Action::Start(index) => self.start(index),
            Action::CrashLoop(index) => self.crash_loop(index),
            Action::PullBackOff(index) => self.pull_back_off(index),
            Action::Kill {
                index,
                kill,
                message,
            } => self.kill(index, kill, message),
            Action::Pass(index) => self.records[index].passed = true,
            Action::BeginReset => self.resetting = true,
            Action::Reset => {
                self.resetting = false;
                for record in &mut self.records {
                    if record.kind != Kind::Ephemeral {
                        record.reset();
                    }
                }
            }
            Action::End => self.end(self.grace()),
            // Ends the loop before it comes here.
            Action::Finish => {}
        }
    }

    fn start(&mut self, index: usize) {
        let now = Instant::now();
        let place = Place {
            pod: self.pod_name(),
            ip: self.network.ips.first().copied(),
        };
        self.last_serial += 1;
        let serial = self.last_serial;
        let record = &mut self.records[index];
        if let Some(ended) = &record.ended {
            record.back_off.step(ended.at, now);
        }
        record.retry = None;
        record.run = Some(Run {
            serial,
            image: record.spec.image.clone().unwrap_or_default(),
            stage: Stage::Preparing,
            kill: None,
            startup: None,
            dead: false,
            ready: false,
        });
        let order = Order {
            container: record.spec.clone(),
            target: record.target.clone(),
            attempt: u32::try_from(record.next_attempt()).unwrap_or(0),
            input: self
                .bundle
                .containers
                .get(&record.spec.name)
                .cloned()
                .unwrap_or_default(),
            place,
        };
        let (kill, orders) = watch::channel(None);
        self.handles.insert(
            serial,
            Handles {
                kill,
                probes: Vec::new(),
            },
        );
        let report = Reporter {
            serial,
            to: self.messages.clone(),
        };
        tokio::task::spawn_local(run::run(self.runtime.clone(), report, order, orders));
    }

    fn crash_loop(&mut self, index: usize) {
        let pod = self.pod_name();
        let record = &mut self.records[index];
        let name = record.name().to_owned();
        let delay = go_duration(record.back_off.delay());
        record.waiting = Some(Problem {
            reason: "CrashLoopBackOff".to_owned(),
            message: format!("back-off {delay} restarting failed container={name} pod={pod}"),
        });
        let path = record.field_path();
        self.journal.note(
            Some(path),
            true,
            "BackOff",
            format!("Back-off restarting failed container {name} in pod {pod}"),
        );
    }

    fn pull_back_off(&mut self, index: usize) {
        let record = &mut self.records[index];
        let path = record.field_path();
        let image = record.spec.image.clone().unwrap_or_default();
        let Some(failure) = &mut record.pull_failure else {
            return;
        };
        failure.shown = true;
        let message = format!("Back-off pulling image {image:?}");
        record.waiting = Some(Problem {
            reason: "ImagePullBackOff".to_owned(),
            message: format!("{message}: {}", failure.message),
        });
        self.journal
            .note(Some(path.clone()), false, "BackOff", message);
        self.journal
            .note(Some(path), true, "Failed", "Error: ImagePullBackOff");
    }

    fn kill(&mut self, index: usize, kill: Kill, message: String) {
        let record = &mut self.records[index];
        let path = record.field_path();
        let name = record.name().to_owned();
        let Some(run) = &mut record.run else { return };
        let first = run.kill.is_none();
        run.kill = Some(kill);
        if let Some(handles) = self.handles.get_mut(&run.serial) {
            handles.kill.send_replace(Some(kill));
            // Nobody asks any more whether it is alive; whether it takes work is still of interest.
            handles.probes.retain(|(which, task)| {
                let keep = *which == Which::Readiness;
                if !keep {
                    task.abort();
                }
                keep
            });
        }
        if first && run.stage != Stage::Preparing {
            let message = if message.is_empty() {
                format!("Stopping container {name}")
            } else {
                message
            };
            self.journal.note(Some(path), false, "Killing", message);
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
            Message::Up(result) => self.came_up(result),
            Message::Fact { serial, fact } => self.note_fact(serial, fact),
            Message::Probe {
                serial,
                which,
                word,
            } => self.note_probe(serial, which, word),
        }
    }

    fn stop(&mut self, stop: Stop) {
        if self.failure.is_none() {
            self.failure = stop.failure;
        }
        self.end(seconds(stop.grace_seconds));
    }

    fn take_bundle(&mut self, bundle: Bundle) {
        self.bundle = bundle;
        self.take_specs();
        // What stood in the way may be gone.
        if let Up::Waiting { until, .. } = &mut self.up {
            *until = Instant::now();
        }
    }

    /// Brings the records up to the bundle.
    fn take_specs(&mut self) {
        let status = self.bundle.pod.status.as_ref();
        self.active_since = status
            .and_then(|status| status.start_time.as_ref())
            .map_or(self.born, |time| instant_of(time.0));
        let spec = self.bundle.pod.spec.clone().unwrap_or_default();
        for (kind, container, target) in containers(&spec) {
            let name = container.name.clone();
            let known = self.records.iter_mut().find(|record| record.name() == name);
            let Some(record) = known else {
                self.records.push(Record::new(kind, container, target));
                continue;
            };
            if record.spec.image != container.image {
                record.back_off.clear();
                record.pull_back_off.clear();
                record.pull_failure = None;
                record.retry = None;
            }
            record.spec = container;
            let problem = self
                .bundle
                .containers
                .get(&name)
                .and_then(|input| input.problem.clone());
            if record.held {
                record.held = problem.is_some();
                record.waiting = problem.or(record.waiting.take());
            }
        }
    }

    /// Goes on from an earlier sandbox of this pod.
    fn remember(&mut self, now: Instant) {
        for before in &self.bundle.before {
            if let Some(record) = self
                .records
                .iter_mut()
                .find(|record| record.name() == before.name)
            {
                record.remember(before, now);
            }
        }
        let policy = self.policy();
        let regular = || self.records.iter().filter(|r| r.kind == Kind::Regular);
        let any_ran = self.records.iter().any(|record| record.has_run);
        let done = regular().any(|record| record.has_run)
            && !regular().any(|record| record.wants_start(policy));
        if (policy == RestartPolicy::Never && any_ran) || done {
            self.end(Duration::ZERO);
        }
    }

    /// Ends a pod that was active for too long; tells when that will be.
    fn check_deadline(&mut self) -> Option<Instant> {
        if self.ending.is_some() {
            return None;
        }
        let limit = self.spec()?.active_deadline_seconds?;
        let deadline = self.active_since + seconds(limit);
        if deadline > Instant::now() {
            return Some(deadline);
        }
        const MESSAGE: &str = "Pod was active on the node longer than the specified deadline";
        const REASON: &str = "DeadlineExceeded";
        self.journal.note(None, false, REASON, MESSAGE);
        self.failure = Some(Problem {
            reason: REASON.to_owned(),
            message: MESSAGE.to_owned(),
        });
        self.end(self.grace());
        None
    }

    /// Tries to bring the pod's namespaces up when it is time; tells when that will be.
    fn check_up(&mut self) -> Option<Instant> {
        if self.ending.is_some() {
            if let Up::Trying { task, .. } = &self.up {
                task.abort();
                self.up = Up::Over;
            }
            return None;
        }
        let Up::Waiting { until, delay } = self.up else {
            return None;
        };
        if until > Instant::now() {
            return Some(until);
        }
        let (runtime, messages) = (self.runtime.clone(), self.messages.clone());
        let task = tokio::task::spawn_local(async move {
            let result = runtime.up().await;
            let _ = messages.send(Message::Up(result));
        });
        self.up = Up::Trying {
            task: task.abort_handle(),
            delay,
        };
        None
    }

    fn came_up(&mut self, result: Result<PodNetwork, Problem>) {
        let Up::Trying { delay, .. } = self.up else {
            return;
        };
        match result {
            Ok(network) => {
                self.network = network;
                self.up = Up::Done;
            }
            Err(problem) => {
                let volumes = matches!(
                    problem.reason.as_str(),
                    "FailedMount" | "FailedAttachVolume" | "FailedMapVolume" | "NetworkNotReady"
                );
                if volumes {
                    let (reason, message) = (problem.reason, problem.message);
                    self.journal.note(None, true, &reason, message);
                } else {
                    let message = format!("Failed to create pod sandbox: {}", problem.message);
                    self.journal
                        .note(None, true, "FailedCreatePodSandBox", message);
                }
                self.up = Up::Waiting {
                    until: Instant::now() + delay,
                    delay: (delay * 2).min(UP_RETRY.1),
                };
            }
        }
    }

    fn note_fact(&mut self, serial: u64, fact: Fact) {
        let grace = self.grace();
        let Some(index) = self.index_of(serial) else {
            return;
        };
        let now = Instant::now();
        let record = &mut self.records[index];
        let path = record.field_path();
        match fact {
            Fact::Event {
                warning,
                reason,
                message,
            } => self.journal.note(Some(path), warning, reason, message),
            Fact::Created { id, at, image } => {
                record.restarts = record.next_attempt();
                record.has_run = true;
                record.id = Some(id);
                record.image = Some(image);
                record.pull_failure = None;
                record.pull_back_off.clear();
                if let Some(run) = &mut record.run {
                    run.stage = Stage::Hook { at };
                }
            }
            Fact::Running => {
                record.waiting = None;
                if let Some(ended) = record.ended.take() {
                    record.previous = Some(ended.state);
                }
                if let Some(run) = &mut record.run
                    && let Stage::Hook { at } = run.stage
                {
                    run.stage = Stage::Running { at };
                }
                self.probe_first(index);
            }
            Fact::HookFailed(message) => {
                record.waiting = Some(Problem {
                    reason: "PostStartHookError".to_owned(),
                    message,
                });
                let kill = Kill {
                    deadline: now + grace,
                    turn: true,
                    restart: false,
                };
                self.kill(index, kill, "FailedPostStartHook".to_owned());
            }
            Fact::NoImage(problem) => {
                self.forget(index);
                let record = &mut self.records[index];
                if matches!(
                    problem.reason.as_str(),
                    "InvalidImageName" | "ErrImageNeverPull" | "ImageInspectError"
                ) {
                    record.retry = Some(now + RETRY);
                } else {
                    record.pull_back_off.step(now, now);
                    record.retry = record.pull_back_off.until(now);
                    record.pull_failure = Some(PullFailure {
                        message: format!("{}: {}", problem.reason, problem.message),
                        at: now,
                        shown: false,
                    });
                }
                record.waiting = Some(problem);
            }
            Fact::NotCreated(problem) => {
                self.forget(index);
                let record = &mut self.records[index];
                record.held = self
                    .bundle
                    .containers
                    .get(record.name())
                    .is_some_and(|input| input.problem.is_some());
                record.retry = Some(now + RETRY).filter(|_| !record.held);
                record.pull_failure = None;
                record.waiting = Some(problem);
            }
            Fact::CalledOff => self.forget(index),
            Fact::Ended(state) => self.note_end(index, state, now),
        }
    }

    fn note_end(
        &mut self,
        index: usize,
        state: k8s_openapi::api::core::v1::ContainerStateTerminated,
        now: Instant,
    ) {
        let record = &mut self.records[index];
        let run = record.run.as_ref();
        let restart = run
            .and_then(|run| run.kill)
            .is_some_and(|kill| kill.restart);
        let created = !run.is_none_or(|run| run.stage == Stage::Preparing);
        if !created {
            // It could not even be run: that was a run all the same, with an id that nobody knows.
            record.restarts = record.next_attempt();
            record.has_run = true;
        }
        let hook_failed = record
            .waiting
            .as_ref()
            .is_some_and(|waiting| waiting.reason == "PostStartHookError");
        if !hook_failed {
            record.waiting = None;
        }
        // A run that never got past its hook has not replaced the one before it.
        if let Some(ended) = record.ended.take() {
            record.previous = Some(ended.state);
        }
        record.ended = Some(Ended {
            state,
            at: now,
            restart,
            stale: false,
        });
        self.forget(index);
    }

    /// A run is over.
    fn forget(&mut self, index: usize) {
        if let Some(run) = self.records[index].run.take() {
            self.handles.remove(&run.serial);
        }
    }

    fn note_probe(&mut self, serial: u64, which: Which, word: Word) {
        let Some(index) = self.index_of(serial) else {
            return;
        };
        let record = &mut self.records[index];
        let path = record.field_path();
        let Some(run) = &mut record.run else { return };
        match (which, word) {
            (_, Word::Event(reason, message)) => {
                self.journal.note(Some(path), true, reason, message);
            }
            // Too late to matter.
            (Which::Startup | Which::Liveness, _) if run.kill.is_some() => {}
            (Which::Startup, Word::Verdict(well)) => {
                run.startup = Some(well);
                if well {
                    self.probe_on(index);
                }
            }
            (Which::Liveness, Word::Verdict(well)) => run.dead = !well,
            (Which::Readiness, Word::Verdict(well)) => run.ready = well,
        }
    }

    /// Begins to ask a container that has just come up.
    fn probe_first(&mut self, index: usize) {
        let record = &self.records[index];
        if matches!(record.kind, Kind::Init | Kind::Ephemeral) {
            return;
        }
        if record.spec.startup_probe.is_some() {
            self.probe(index, Which::Startup);
        } else {
            self.probe_on(index);
        }
    }

    /// The container is up: what is asked from now on.
    fn probe_on(&mut self, index: usize) {
        self.probe(index, Which::Liveness);
        self.probe(index, Which::Readiness);
    }

    fn probe(&mut self, index: usize, which: Which) {
        let record = &self.records[index];
        let spec = match which {
            Which::Startup => &record.spec.startup_probe,
            Which::Liveness => &record.spec.liveness_probe,
            Which::Readiness => &record.spec.readiness_probe,
        };
        let (Some(probe), Some(run), Some(id)) = (spec.clone(), &record.run, &record.id) else {
            return;
        };
        if run.kill.is_some() {
            return;
        }
        let subject = Subject {
            container: record.spec.clone(),
            id: id.clone(),
            ip: self.network.ips.first().copied(),
        };
        let serial = run.serial;
        let since = match run.stage {
            Stage::Hook { at } | Stage::Running { at } => instant_of(at),
            Stage::Preparing => Instant::now(),
        };
        let messages = self.messages.clone();
        let tell = move |word| {
            let _ = messages.send(Message::Probe {
                serial,
                which,
                word,
            });
        };
        let work = worker::work(self.runtime.clone(), which, subject, probe, since, tell);
        let task = tokio::task::spawn_local(work).abort_handle();
        if let Some(handles) = self.handles.get_mut(&serial) {
            handles.probes.push((which, task));
        } else {
            task.abort();
        }
    }

    fn publish(&self, finished: bool) {
        let around = Around {
            policy: self.policy(),
            has_init: self
                .records
                .iter()
                .any(|record| matches!(record.kind, Kind::Init | Kind::Sidecar)),
            ending: self.ending.is_some(),
        };
        let statuses = |kinds: &[Kind]| {
            self.records
                .iter()
                .filter(|record| kinds.contains(&record.kind))
                .map(|record| status::status(record, around))
                .collect::<Vec<_>>()
        };
        let mut init_containers = statuses(&[Kind::Init, Kind::Sidecar]);
        let mut containers = statuses(&[Kind::Regular]);
        if finished {
            status::give_up(&mut init_containers, &mut containers);
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

    fn index_of(&self, serial: u64) -> Option<usize> {
        self.records
            .iter()
            .position(|record| record.run.as_ref().is_some_and(|run| run.serial == serial))
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

/// All containers of a pod, in the order of the records.
fn containers(spec: &PodSpec) -> impl Iterator<Item = (Kind, Container, Option<String>)> + '_ {
    let init = spec.init_containers.iter().flatten().map(|container| {
        let kind = match container.restart_policy.as_deref() {
            Some("Always") => Kind::Sidecar,
            _ => Kind::Init,
        };
        (kind, container.clone(), None)
    });
    let regular = spec
        .containers
        .iter()
        .map(|container| (Kind::Regular, container.clone(), None));
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|container| {
        let target = container.target_container_name.clone();
        (Kind::Ephemeral, as_container(container), target)
    });
    init.chain(regular).chain(ephemeral)
}
