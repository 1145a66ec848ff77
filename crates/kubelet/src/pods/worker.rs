//! One pod's worker: brings about what the API server wants of the pod, and tells it how the pod is.
//!
//! ```text
//!   seen ──► (awaited) ──► launched ──► connected ──► finished ──► status written ──► object deleted ──► dismissed
//!                 ▲            │            │
//!                 └── lost ◄───┴────────────┘     and, if its policy says so, launched again
//! ```
//!
//! Everything is level-triggered: [`Worker::step`] looks at all that is known and does what is due; the loop around it
//! only waits for something to change. The pod's own life (restarts, probes, hooks) is its sandbox's.

use std::sync::Arc;
use std::time::Duration;

use futures::stream::{BoxStream, StreamExt};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{DeleteParams, Preconditions};
use sandbox::connection::{ConnectionError, SandboxClient};
use sandbox::protocol::{Bundle, PodState, Problem, Stop};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::Shared;
use super::launch::{Handle, Launch};
use super::spec::{
    full_name, grace_seconds, is_final, is_to_be_deleted, name, namespace, phase, uid,
};
use super::status::{Known, lost, lost_for_good, pod_status, refusal, survives};
use super::writer::{Writer, is_of_another_pod};
use crate::api::call;
use crate::backoff::Doubling;

/// How long a sandbox that was there before this kubelet has for dialling it; it tries every second.
const ADOPTION_PATIENCE: Duration = Duration::from_secs(3);
/// How long a sandbox has for dialling again when its connection breaks.
const REDIAL_PATIENCE: Duration = Duration::from_secs(3);
/// How long a new sandbox has for dialling the first time.
const LAUNCH_PATIENCE: Duration = Duration::from_secs(60);
/// How long a sandbox may take to answer.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);
/// A sandbox that was told to clean up and exit is killed after this.
const DISMISSAL_PATIENCE: Duration = Duration::from_secs(10);
/// A sandbox that was told to end is killed so long after the pod's grace.
const OVERDUE_PATIENCE: Duration = Duration::from_secs(60);
/// How long to wait at most before a sandbox that could not be started, or died, is started again.
const RELAUNCH_AT_MOST: Duration = Duration::from_secs(60);

/// What the API server says of a pod.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    /// The pod as it was last shown.
    pub pod: Arc<Pod>,
    /// It is not there any more.
    pub gone: bool,
}

/// How a worker begins.
pub(super) enum Beginning {
    /// The pod is new, and this node takes it.
    Admitted,
    /// The pod is new, and this node can't take it, unless its labels have changed meanwhile.
    Doubtful(Problem),
    /// The pod is new, and this node can't take it.
    Refused(Problem),
    /// The pod was here before this kubelet.
    Inherited,
}

/// What a worker hears from.
pub(super) struct Ears {
    pub seen: watch::Receiver<Seen>,
    pub bundles: watch::Receiver<Option<Arc<Bundle>>>,
    pub connections: mpsc::UnboundedReceiver<SandboxClient>,
    /// The node goes down, and pods have until then.
    pub shutdown: watch::Receiver<Option<Instant>>,
}

/// What a sandbox was just told.
enum Told {
    Nothing,
    Bundle,
    /// To end, in so many seconds.
    Stop(i64),
}

/// The connection to a sandbox.
struct Link {
    client: SandboxClient,
    states: BoxStream<'static, PodState>,
    /// The sandbox has been sent the bundle that is current.
    has_bundle: bool,
    /// What it was last told about its end.
    told: Option<Stop>,
}

pub(super) struct Worker {
    shared: Arc<Shared>,
    pod: Arc<Pod>,
    gone: bool,
    /// The status as last concluded.
    status: PodStatus,
    writer: Writer,
    handle: Option<Box<dyn Handle>>,
    link: Option<Link>,
    state: Option<PodState>,
    bundle: Option<Arc<Bundle>>,
    /// The sandbox that this kubelet has launched has been sent a bundle.
    instructed: bool,
    /// How containers stood when an earlier sandbox was lost.
    before: Vec<ContainerStatus>,
    /// The serial of the last of the sandbox's events that was recorded.
    recorded: u64,
    /// The node goes down, and the pod has so many seconds.
    shutdown: Option<i64>,
    /// The pod object was deleted, as far as that is ours to do.
    removed: bool,
    /// When to look again, and what then has failed to happen.
    alarm: Option<(Instant, Alarm)>,
    relaunch: Doubling,
}

/// What an alarm is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Alarm {
    /// No sandbox has dialled in time.
    NoSandbox,
    /// It is time for another attempt to start a sandbox.
    Relaunch,
    /// It is time for another attempt to delete the pod.
    Remove,
    /// The sandbox was told to end, and has not.
    Overdue,
}

impl Worker {
    /// Looks after a pod until nothing of it is left.
    pub(super) async fn run(shared: Arc<Shared>, mut ears: Ears, beginning: Beginning) {
        let pod = Arc::clone(&ears.seen.borrow_and_update().pod);
        let mut worker = Self {
            writer: Writer::new(&shared.client, &pod, Arc::clone(&shared.room)),
            status: pod.status.clone().unwrap_or_default(),
            shared,
            pod,
            gone: false,
            handle: None,
            link: None,
            state: None,
            bundle: None,
            instructed: false,
            before: vec![],
            recorded: 0,
            shutdown: None,
            removed: false,
            alarm: None,
            relaunch: Doubling::up_to(RELAUNCH_AT_MOST),
        };
        match beginning {
            Beginning::Admitted => {}
            Beginning::Doubtful(problem) => {
                if !worker.shared.matches_by_now(&worker.pod).await {
                    worker.refuse(&problem);
                }
            }
            Beginning::Refused(problem) => worker.refuse(&problem),
            Beginning::Inherited => worker.set_alarm(ADOPTION_PATIENCE, Alarm::NoSandbox),
        }
        while worker.step().await {
            worker.listen(&mut ears).await;
        }
        worker.shared.known.disconnected(uid(&worker.pod));
    }

    /// Waits until something has changed, and takes note of it.
    async fn listen(&mut self, ears: &mut Ears) {
        tokio::select! {
            Ok(()) = ears.seen.changed() => {
                let seen = ears.seen.borrow_and_update().clone();
                (self.pod, self.gone) = (seen.pod, seen.gone);
            }
            Ok(()) = ears.bundles.changed() => {
                self.bundle = ears.bundles.borrow_and_update().clone();
                if let Some(link) = &mut self.link {
                    link.has_bundle = false;
                }
            }
            Some(client) = ears.connections.recv() => self.connected(client).await,
            state = next_state(&mut self.link) => match state {
                Some(state) => self.heard(state),
                None => self.disconnected(),
            },
            how = exit(&mut self.handle) => self.exited(&how),
            alarm = ring(self.alarm) => {
                self.alarm = None;
                self.rang(alarm);
            }
            () = self.writer.wrote() => {}
            Ok(()) = ears.shutdown.changed() => {
                let until = *ears.shutdown.borrow_and_update();
                self.shutdown = until.map(|until| {
                    let left = until.saturating_duration_since(Instant::now());
                    i64::try_from(left.as_secs()).unwrap_or(i64::MAX)
                });
            }
        }
    }

    /// Does what is due; `false` once nothing is left to be done.
    async fn step(&mut self) -> bool {
        self.instruct().await;
        if self.needs_sandbox() {
            self.launch().await;
        } else if !self.has_sandbox() && self.is_ending() && !is_final(self.phase()) {
            self.status = lost_for_good(&self.known(), self.verdict().as_ref(), Timestamp::now());
        }
        self.conclude();
        if !self.is_over() {
            return true;
        }
        if is_to_be_deleted(&self.pod) && !self.gone && !self.removed {
            self.remove().await;
        }
        if self.gone || self.removed || self.shutdown.is_some() {
            self.dismiss().await;
            return false;
        }
        // It stays for its logs.
        true
    }

    // What is known

    fn phase(&self) -> &str {
        self.status.phase.as_deref().unwrap_or_default()
    }

    fn known(&self) -> Known<'_> {
        Known {
            pod: &self.pod,
            state: self.state.as_ref(),
            previous: &self.status,
            ending: self.is_ending(),
            host_ips: &self.shared.host_ips,
        }
    }

    /// It is to end, whatever its policy.
    fn is_ending(&self) -> bool {
        self.gone || self.shutdown.is_some() || is_to_be_deleted(&self.pod)
    }

    fn has_sandbox(&self) -> bool {
        self.link.is_some() || self.handle.is_some() || self.alarm_is(Alarm::NoSandbox)
    }

    fn needs_sandbox(&self) -> bool {
        !self.has_sandbox()
            && !self.is_ending()
            && !is_final(self.phase())
            && !self.alarm_is(Alarm::Relaunch)
    }

    /// Nothing of it runs, nothing will, and the API server knows.
    fn is_over(&self) -> bool {
        let runs = self.has_sandbox() && !self.state.as_ref().is_some_and(|state| state.finished);
        let written = self.writer.written();
        let told = is_final(phase(&self.pod))
            || written.gone
            || written
                .status
                .and_then(|status| status.phase)
                .is_some_and(|phase| is_final(&phase));
        // A pod whose end the API server knows may still have a sandbox that has not said so yet.
        !runs && (told || self.gone)
    }

    fn alarm_is(&self, kind: Alarm) -> bool {
        self.alarm.is_some_and(|(_, alarm)| alarm == kind)
    }

    fn set_alarm(&mut self, after: Duration, alarm: Alarm) {
        self.alarm = Some((Instant::now() + after, alarm));
    }

    // What changed

    async fn connected(&mut self, client: SandboxClient) {
        let states = match tokio::time::timeout(ANSWER_PATIENCE, client.states()).await {
            Ok(Ok(states)) => states,
            _ => {
                tracing::warn!(
                    pod = full_name(&self.pod),
                    "a sandbox dialled and fell silent"
                );
                return;
            }
        };
        self.alarm = None;
        self.shared.known.connected(uid(&self.pod), client.clone());
        self.link = Some(Link {
            client,
            states: states.filter_map(|state| async { state.ok() }).boxed(),
            has_bundle: false,
            told: None,
        });
    }

    fn heard(&mut self, state: PodState) {
        for event in &state.events {
            if event.serial > self.recorded {
                self.recorded = event.serial;
                self.shared.recorder.record(&self.pod, event.clone());
            }
        }
        self.relaunch.restart();
        self.state = Some(state);
    }

    fn disconnected(&mut self) {
        self.link = None;
        self.shared.known.disconnected(uid(&self.pod));
        self.set_alarm(REDIAL_PATIENCE, Alarm::NoSandbox);
    }

    fn exited(&mut self, how: &str) {
        tracing::info!(pod = full_name(&self.pod), how, "the pod's sandbox is gone");
        self.handle = None;
        self.link = None;
        self.alarm = None;
        self.lost();
    }

    fn rang(&mut self, alarm: Alarm) {
        if matches!(alarm, Alarm::NoSandbox | Alarm::Overdue) {
            tracing::warn!(
                pod = full_name(&self.pod),
                ?alarm,
                "the pod's sandbox does not answer"
            );
            self.kill();
            self.lost();
        }
    }

    /// The sandbox is gone, and with it every container that ran.
    fn lost(&mut self) {
        self.shared.known.disconnected(uid(&self.pod));
        let finished = self.state.take().is_some_and(|state| state.finished);
        self.recorded = 0;
        if finished || is_final(self.phase()) {
            return;
        }
        if !survives(&self.pod, &self.status) {
            self.status = lost_for_good(&self.known(), None, Timestamp::now());
            return;
        }
        for statuses in [
            &mut self.status.init_container_statuses,
            &mut self.status.container_statuses,
            &mut self.status.ephemeral_container_statuses,
        ] {
            *statuses = statuses.as_deref().map(lost);
        }
        self.before = [
            &self.status.init_container_statuses,
            &self.status.container_statuses,
            &self.status.ephemeral_container_statuses,
        ]
        .into_iter()
        .flatten()
        .flatten()
        .cloned()
        .collect();
        let wait = self.relaunch.wait();
        self.set_alarm(wait, Alarm::Relaunch);
    }

    // What is done

    fn refuse(&mut self, problem: &Problem) {
        tracing::info!(
            pod = full_name(&self.pod),
            reason = problem.reason,
            message = problem.message,
            "refused a pod"
        );
        self.status = refusal(&self.pod, problem, Timestamp::now());
        self.shared
            .recorder
            .say(&self.pod, true, &problem.reason, &problem.message);
    }

    fn kill(&mut self) {
        self.link = None;
        self.alarm = None;
        if let Some(mut handle) = self.handle.take() {
            handle.kill();
        }
    }

    async fn launch(&mut self) {
        let launch = Launch {
            uid: uid(&self.pod).to_owned(),
            namespace: namespace(&self.pod).to_owned(),
            name: name(&self.pod).to_owned(),
            token: self.shared.config.node_key.token(uid(&self.pod)),
        };
        match self.shared.launcher.launch(launch).await {
            Ok(handle) => {
                self.handle = Some(handle);
                self.instructed = false;
                self.set_alarm(LAUNCH_PATIENCE, Alarm::NoSandbox);
            }
            Err(error) => {
                let message = format!("Failed to create pod sandbox: {}", chain(&error));
                tracing::warn!(pod = full_name(&self.pod), message);
                self.shared
                    .recorder
                    .say(&self.pod, true, "FailedCreatePodSandBox", &message);
                let wait = self.relaunch.wait();
                self.set_alarm(wait, Alarm::Relaunch);
            }
        }
    }

    /// Tells the sandbox what it doesn't know yet: the pod, and that it is to end.
    async fn instruct(&mut self) {
        let stop = self.stop_order();
        if stop.is_some() && self.handle.is_some() && !self.instructed {
            // It knows of no pod yet, so there is nothing to end but itself.
            self.kill();
            self.lost();
            return;
        }
        let Some(link) = &mut self.link else { return };
        let instructed = tokio::time::timeout(ANSWER_PATIENCE, async {
            match (&stop, &self.bundle) {
                (Some(order), _) if link.told != stop => {
                    link.client.stop(order).await?;
                    link.told.clone_from(&stop);
                    Ok(Told::Stop(order.grace_seconds))
                }
                (None, Some(bundle)) if !link.has_bundle => {
                    let mut bundle = Bundle::clone(bundle);
                    bundle.before.clone_from(&self.before);
                    link.client.put_bundle(&bundle).await?;
                    link.has_bundle = true;
                    Ok(Told::Bundle)
                }
                _ => Ok::<_, ConnectionError>(Told::Nothing),
            }
        });
        let problem = match instructed.await {
            Ok(Ok(told)) => {
                match told {
                    Told::Bundle => self.instructed = true,
                    Told::Stop(grace) => {
                        let grace = Duration::from_secs(grace.unsigned_abs());
                        self.set_alarm(grace + OVERDUE_PATIENCE, Alarm::Overdue);
                    }
                    Told::Nothing => {}
                }
                return;
            }
            Ok(Err(error)) => chain(&error),
            Err(_) => "it does not answer".to_owned(),
        };
        tracing::warn!(
            pod = full_name(&self.pod),
            problem,
            "could not instruct a sandbox"
        );
        self.disconnected();
    }

    /// The order to end, if the pod is to end.
    fn stop_order(&self) -> Option<Stop> {
        self.is_ending().then(|| {
            let allowed = self.shutdown.unwrap_or(i64::MAX);
            Stop {
                grace_seconds: grace_seconds(&self.pod).min(allowed).max(1),
                failure: self.verdict(),
            }
        })
    }

    /// What the pod fails by, if it is this node that ends it.
    fn verdict(&self) -> Option<Problem> {
        let by_node = self.shutdown.is_some() && !self.gone && !is_to_be_deleted(&self.pod);
        by_node.then(|| Problem {
            reason: "Terminated".to_owned(),
            message: "Pod was terminated in response to imminent node shutdown.".to_owned(),
        })
    }

    /// Concludes the pod's status and has it written.
    fn conclude(&mut self) {
        if self.gone {
            return;
        }
        // Of a refused pod there is nothing more to say.
        if self.state.is_some() || !is_final(self.phase()) {
            self.status = pod_status(&self.known(), Timestamp::now());
        }
        self.shared.known.concluded(uid(&self.pod), &self.status);
        self.writer.want(&self.pod, &self.status);
    }

    /// Deletes the pod object: its end is recorded, and nothing of it runs.
    async fn remove(&mut self) {
        // Asked for already; what holds it now is somebody's finalizer.
        if self.pod.metadata.deletion_grace_period_seconds == Some(0) && is_final(phase(&self.pod))
        {
            self.removed = true;
            return;
        }
        let api: Api<Pod> = Api::namespaced(self.shared.client.clone(), namespace(&self.pod));
        let now = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(Preconditions {
                uid: self.pod.metadata.uid.clone(),
                resource_version: None,
            }),
            ..Default::default()
        };
        match call(api.delete(name(&self.pod), &now)).await {
            Ok(_) => self.removed = true,
            Err(error) if is_of_another_pod(&error) => self.removed = true,
            Err(error) => {
                tracing::warn!(
                    pod = full_name(&self.pod),
                    error = &error as &dyn std::error::Error,
                    "could not delete the pod; will try again"
                );
                let wait = self.relaunch.wait();
                self.set_alarm(wait, Alarm::Remove);
            }
        }
    }

    /// Lets the sandbox clean up and go.
    async fn dismiss(&mut self) {
        if let Some(link) = self.link.take() {
            let dismissed = tokio::time::timeout(ANSWER_PATIENCE, link.client.dismiss()).await;
            if !matches!(dismissed, Ok(Ok(()))) {
                tracing::warn!(pod = full_name(&self.pod), "could not dismiss a sandbox");
            }
        }
        if let Some(mut handle) = self.handle.take() {
            let gone = tokio::time::timeout(DISMISSAL_PATIENCE, handle.exited()).await;
            if gone.is_err() {
                handle.kill();
            }
        }
    }
}

async fn next_state(link: &mut Option<Link>) -> Option<PodState> {
    match link {
        Some(link) => link.states.next().await,
        None => std::future::pending().await,
    }
}

async fn exit(handle: &mut Option<Box<dyn Handle>>) -> String {
    match handle {
        Some(handle) => handle.exited().await,
        None => std::future::pending().await,
    }
}

async fn ring(alarm: Option<(Instant, Alarm)>) -> Alarm {
    match alarm {
        Some((at, alarm)) => {
            tokio::time::sleep_until(at).await;
            alarm
        }
        None => std::future::pending().await,
    }
}

/// An error with all that led to it.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
