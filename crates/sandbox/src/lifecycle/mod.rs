//! The life of a pod: what is started, restarted, asked, waited for and ended, and when.
//!
//! ```text
//!   plan     decides what to do next, from records alone; the place to start reading
//!   record   what is known about a container
//!   restart, back_off, clock    small rules
//!   driver   keeps the records, carries out plans, publishes the state
//!   run      one run of one container, a task that reports to the driver (image, hooks)
//!   status   records as the API shows them
//! ```
//!
//! Everything is on one thread and generic over [`ContainerRuntime`], so that a whole life can be tried in a moment with a
//! simulated runtime and clock.

mod back_off;
mod clock;
mod driver;
mod hooks;
mod image;
mod event_log;
mod plan;
mod container_record;
mod restart;
mod container_run;
mod status;

#[cfg(test)]
mod plan_tests;
#[cfg(test)]
mod simulated_runtime;
#[cfg(test)]
mod tests;

use std::rc::Rc;

use tokio::sync::{mpsc, watch};

use crate::probe::worker::{ProbeEvent, ProbeKind};
use crate::container_runtime::{ContainerRuntime, PodNetwork};
use pod_protocol::{Bundle, PodState, Problem, Stop};

pub(crate) use back_off::go_duration;
pub(crate) use image::default_policy;
pub(crate) use plan::restarts_to_resize;

/// Begins the life of a pod. Must be called within a `LocalSet`; its tasks stay on this thread.
pub fn start<R: ContainerRuntime>(runtime: Rc<R>, bundle: Bundle) -> LifecycleHandle {
    let (messages, inbox) = mpsc::unbounded_channel();
    let (publish, state) = watch::channel(PodState::default());
    let driver = driver::Driver::new(runtime, bundle, messages.clone(), publish);
    tokio::task::spawn_local(driver.live(inbox));
    LifecycleHandle { messages, state }
}

/// How the rest of the sandbox speaks with the life of its pod.
#[derive(Clone, Debug)]
pub struct LifecycleHandle {
    messages: mpsc::UnboundedSender<Message>,
    state: watch::Receiver<PodState>,
}

impl LifecycleHandle {
    /// The pod has changed. The runtime must have been told before.
    pub fn put_bundle(&self, bundle: Bundle) {
        // A pod that is over does not listen, and need not.
        let _ = self.messages.send(Message::Bundle(Box::new(bundle)));
    }

    /// The pod is to end. A later call can only shorten the time that it is given.
    pub fn stop(&self, stop: Stop) {
        let _ = self.messages.send(Message::Stop(stop));
    }

    /// The sandbox can't go on, though its pod could: ends the containers, within the pod's grace period, and leaves all else as it
    /// is for the sandbox that replaces this one. Returns whether it came to that: not if the pod ends anyway.
    pub async fn abandon(&self) -> bool {
        let _ = self.messages.send(Message::Abandon);
        let mut state = self.state.clone();
        // The driver drops its end when it has nothing more to say.
        while state.changed().await.is_ok() {}
        !state.borrow().finished
    }

    /// The pod's whole state; it changes only when there is something new.
    pub fn state(&self) -> watch::Receiver<PodState> {
        self.state.clone()
    }

    /// Waits until nothing of the pod runs and nothing will, and the runtime is down.
    pub async fn finished(&self) {
        let mut state = self.state.clone();
        // The driver ends without this word only if its thread does.
        let _ = state.wait_for(|state| state.finished).await;
    }
}

/// What the driver hears.
#[derive(Debug)]
enum Message {
    Bundle(Box<Bundle>),
    Stop(Stop),
    Abandon,
    SetUp(Result<PodNetwork, Problem>),
    RunEvent {
        serial: u64,
        fact: run::RunEvent,
    },
    Probe {
        serial: u64,
        which: ProbeKind,
        word: ProbeEvent,
    },
}
