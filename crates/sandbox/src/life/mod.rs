//! The lifecycle of a pod: when its containers are started, probed, restarted and stopped.
//!
//! ```text
//!   plan     decides what to do next, from records alone; start reading here
//!   record   the state of one container
//!   restart, back_off, clock    small rules
//!   driver   keeps the records, carries out plans, publishes the state
//!   run      one run of one container, a task that reports to the driver (image, hooks)
//!   status   converts records to API statuses
//! ```
//!
//! Everything runs on one thread and is generic over [`Runtime`], so that tests can run a whole lifecycle in an
//! instant, with a simulated runtime and clock.

mod back_off;
mod clock;
mod driver;
mod hooks;
mod image;
mod journal;
mod plan;
mod record;
mod restart;
mod run;
mod status;

#[cfg(test)]
mod plan_tests;
#[cfg(test)]
mod sim;
#[cfg(test)]
mod tests;

use std::rc::Rc;

use tokio::sync::{mpsc, watch};

use crate::probe::worker::{ProbeEvent, ProbeKind};
use crate::seams::{PodNetwork, Runtime};
use pod_protocol::{Bundle, PodState, Problem, Stop};

pub(crate) use back_off::go_duration;
pub(crate) use image::default_policy;
pub(crate) use plan::restarts_to_resize;

/// Starts the lifecycle of a pod. Must be called within a `LocalSet`; its tasks stay on this thread.
pub fn start<R: Runtime>(runtime: Rc<R>, bundle: Bundle) -> LifeHandle {
    let (messages, inbox) = mpsc::unbounded_channel();
    let (publish, state) = watch::channel(PodState::default());
    let driver = driver::Driver::new(runtime, bundle, messages.clone(), publish);
    tokio::task::spawn_local(driver.live(inbox));
    LifeHandle { messages, state }
}

/// Controls and observes the lifecycle of a pod from the rest of the sandbox.
#[derive(Clone, Debug)]
pub struct LifeHandle {
    messages: mpsc::UnboundedSender<Message>,
    state: watch::Receiver<PodState>,
}

impl LifeHandle {
    /// Applies a new bundle. The runtime must have received it before.
    pub fn put_bundle(&self, bundle: Bundle) {
        // The driver of a finished pod has exited: ignore.
        let _ = self.messages.send(Message::Bundle(Box::new(bundle)));
    }

    /// Stops the pod. A later call can only shorten the grace period.
    pub fn stop(&self, stop: Stop) {
        let _ = self.messages.send(Message::Stop(stop));
    }

    /// Stops the containers, because the sandbox can't go on though its pod could. The containers get the pod's grace
    /// period. Everything else is left as it is for the sandbox that replaces this one. The state continues to show
    /// these containers as running: the restart policy for lost containers decides whether they are started again, not
    /// their exit codes. Returns `false` if the pod ends anyway.
    pub async fn abandon(&self) -> bool {
        let _ = self.messages.send(Message::Abandon);
        let mut state = self.state.clone();
        // The driver drops its sender when it exits.
        while state.changed().await.is_ok() {}
        !state.borrow().finished
    }

    /// The pod's whole state. Receivers are notified only on change.
    pub fn state(&self) -> watch::Receiver<PodState> {
        self.state.clone()
    }

    /// Waits until no container runs or will run, and the runtime is down.
    pub async fn finished(&self) {
        let mut state = self.state.clone();
        // An error means that the driver exited first: the pod was abandoned, or the thread ends.
        let _ = state.wait_for(|state| state.finished).await;
    }
}

/// Input of the driver.
#[derive(Debug)]
enum Message {
    Bundle(Box<Bundle>),
    Stop(Stop),
    Abandon,
    Up(Result<PodNetwork, Problem>),
    Fact {
        serial: u64,
        fact: run::Fact,
    },
    Probe {
        serial: u64,
        which: ProbeKind,
        word: ProbeEvent,
    },
}
