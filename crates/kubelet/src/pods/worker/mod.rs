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

mod deadline;
mod news;
mod orders;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{BoxStream, StreamExt};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};
use k8s_openapi::jiff::Timestamp;
use pod_protocol::connection::SandboxClient;
use pod_protocol::{PodState, Problem, Stop};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::Shared;
use super::bundles::Offer;
use super::launch::Handle;
use super::spec::{is_final, is_to_be_deleted, phase, uid};
use super::status::{Known, lost_for_good, pod_status};
use super::switchboard::Caller;
use super::writer::Writer;
use crate::backoff::Doubling;

/// How long a sandbox that was there before this kubelet, and can't be found, has for dialling it; it tries every second.
const ADOPTION_PATIENCE: Duration = Duration::from_secs(3);
/// How long to wait at most before a sandbox that could not be started, or died, is started again.
const RELAUNCH_AT_MOST: Duration = Duration::from_secs(60);

/// What the API server says of a pod.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    /// The pod as it was last shown.
    pub pod: Arc<Pod>,
    /// It is not there any more.
    pub gone: bool,
    /// It wants other resources than those that it is shown with, and can't have them.
    pub resize: Option<Problem>,
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
    pub offers: watch::Receiver<Option<Arc<Offer>>>,
    pub connections: mpsc::UnboundedReceiver<Caller>,
    /// The node goes down, and pods have until then.
    pub shutdown: watch::Receiver<Option<Instant>>,
}

/// The connection to a sandbox.
struct Link {
    client: SandboxClient,
    states: BoxStream<'static, PodState>,
    /// The sandbox has been sent the bundle that is current.
    has_bundle: bool,
    /// What it was last told about its end.
    told: Option<Stop>,
    /// It was told to go and to leave the logs. It does once nobody reads them through it.
    retired: bool,
}

pub(super) struct Worker {
    shared: Arc<Shared>,
    pod: Arc<Pod>,
    gone: bool,
    /// Why it can't have other resources.
    resize: Option<Problem>,
    /// The status as last concluded.
    status: PodStatus,
    writer: Writer,
    handle: Option<Box<dyn Handle>>,
    /// The sandbox is no child of this kubelet, so that its end is known by that of its connection.
    must_be_asked: bool,
    link: Option<Link>,
    state: Option<PodState>,
    offer: Option<Arc<Offer>>,
    /// The sandbox has been sent a bundle. `None` if there is no sandbox, or one that has not said so yet.
    instructed: Option<bool>,
    /// How containers stood when an earlier sandbox was lost.
    before: Vec<ContainerStatus>,
    /// The serial of the last of the sandbox's events that was recorded.
    recorded: u64,
    /// The node goes down, and the pod has so many seconds.
    shutdown: Option<i64>,
    /// Since when the pod counts as active.
    active_since: Instant,
    /// Why this worker has ended it: the machine is short of something, or it was active for too long and had no sandbox
    /// that could have noticed.
    failed: Option<Problem>,
    evictions: watch::Receiver<BTreeMap<String, Problem>>,
    /// The pod object was deleted, as far as that is ours to do.
    removed: bool,
    /// When to look again, and what then has failed to happen.
    alarm: Option<(Instant, Alarm)>,
    launched_at: Instant,
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
        let Seen { pod, resize, .. } = ears.seen.borrow_and_update().clone();
        let mut worker = Self {
            writer: Writer::new(&shared.client, &pod, Arc::clone(&shared.room)),
            status: pod.status.clone().unwrap_or_default(),
            active_since: deadline::active_since(&pod),
            failed: None,
            evictions: shared.evicted.subscribe(),
            shared,
            pod,
            gone: false,
            resize,
            handle: None,
            must_be_asked: false,
            link: None,
            state: None,
            offer: None,
            instructed: None,
            before: vec![],
            recorded: 0,
            shutdown: None,
            removed: false,
            alarm: None,
            launched_at: Instant::now(),
            relaunch: Doubling::up_to(RELAUNCH_AT_MOST),
        };
        match beginning {
            Beginning::Admitted => worker.look_back().await,
            Beginning::Doubtful(problem) => {
                if !worker.shared.matches_by_now(&worker.pod).await {
                    worker.refuse(&problem);
                }
            }
            Beginning::Refused(problem) => worker.refuse(&problem),
            Beginning::Inherited => {
                if !worker.find() {
                    worker.set_alarm(ADOPTION_PATIENCE, Alarm::NoSandbox);
                }
            }
        }
        while worker.step().await {
            worker.listen(&mut ears).await;
        }
        worker.shared.known.disconnected(uid(&worker.pod));
        worker.clean_up().await;
    }

    /// Waits until something has changed, and takes note of it.
    async fn listen(&mut self, ears: &mut Ears) {
        let deadline = self.deadline();
        tokio::select! {
            Ok(()) = ears.seen.changed() => {
                let seen = ears.seen.borrow_and_update().clone();
                self.saw(seen);
            }
            Ok(()) = ears.offers.changed() => {
                self.offer = ears.offers.borrow_and_update().clone();
                if let Some(link) = &mut self.link {
                    link.has_bundle = false;
                }
            }
            Some(caller) = ears.connections.recv() => self.connected(caller).await,
            state = next_state(&mut self.link) => match state {
                Some(state) => self.heard(state),
                None => self.disconnected(),
            },
            how = exit(&mut self.handle), if !self.must_be_asked || self.link.is_none() => self.exited(&how).await,
            alarm = ring(self.alarm) => {
                self.alarm = None;
                self.rang(alarm).await;
            }
            () = self.writer.wrote() => {}
            () = deadline::passed(deadline) => {}
            Ok(()) = self.evictions.changed() => {
                let problem = self.evictions.borrow_and_update().get(uid(&self.pod)).cloned();
                self.failed = self.failed.take().or(problem);
            }
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
        self.check_deadline();
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
        // Its directory stays, for its logs.
        self.retire().await;
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
            resize: self.resize.as_ref(),
        }
    }

    /// It is to end, whatever its policy.
    fn is_ending(&self) -> bool {
        self.gone
            || self.shutdown.is_some()
            || self.failed.is_some()
            || is_to_be_deleted(&self.pod)
            || is_final(phase(&self.pod))
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
        let runs = self.has_sandbox() && !self.is_finished();
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

    /// Its sandbox says that it is over.
    fn is_finished(&self) -> bool {
        self.state.as_ref().is_some_and(|state| state.finished)
    }

    fn alarm_is(&self, kind: Alarm) -> bool {
        self.alarm.is_some_and(|(_, alarm)| alarm == kind)
    }

    fn set_alarm(&mut self, after: Duration, alarm: Alarm) {
        self.alarm = Some((Instant::now() + after, alarm));
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
}

/// Whether a sandbox has been sent a bundle: from then on it tells of containers.
pub(super) fn has_begun(state: &PodState) -> bool {
    !(state.containers.is_empty() && state.init_containers.is_empty()) || state.finished
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
