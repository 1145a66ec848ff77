//! The lifecycle of a pod: when its containers are started, probed, restarted and stopped.
//!
//! ```text
//!   plan               decides what to do next, from the records alone; start reading here
//!   container_record   the state of one container
//!   back_off, clock    rules that plans use, beside those of pod_protocol::restart
//!   driver             owns the records, carries out plans, publishes the pod's state
//!   container_run      one run of one container, a task that reports to the driver (image_pull, hooks)
//!   probe              startup, liveness and readiness probes
//!   eviction           ends the pod if it exceeds a storage limit
//!   status             converts records to API statuses
//!   event_log          the pod's recent Events
//!   checkpoint         the state on disk, for the kubelet if the sandbox is killed
//! ```
//!
//! Everything runs on one thread and is generic over [`ContainerRuntime`], so that tests can run a complete lifecycle in an
//! instant, with a simulated runtime and clock.

mod back_off;
pub mod checkpoint;
mod clock;
mod container_record;
mod container_run;
mod driver;
mod event_log;
pub(crate) mod eviction;
mod hooks;
mod image_pull;
mod plan;
pub mod probe;
mod status;

#[cfg(test)]
mod plan_tests;
#[cfg(test)]
mod simulated_runtime;
#[cfg(test)]
mod tests;

use std::rc::Rc;

use tokio::sync::{mpsc, watch};

use self::probe::worker::{ProbeEvent, ProbeKind};
use crate::container_runtime::{ContainerRuntime, PodNetwork};
use pod_protocol::{Bundle, PodState, Problem, Stop};

pub(crate) use plan::resize_requires_restart;

/// Starts the lifecycle of a pod. Must be called within a `LocalSet`; its tasks stay on this thread.
pub fn start<R: ContainerRuntime>(runtime: Rc<R>, bundle: Bundle) -> LifecycleHandle {
    let (messages, inbox) = mpsc::unbounded_channel();
    let (publish, state) = watch::channel(PodState::default());
    let driver = driver::LifecycleDriver::new(runtime, bundle, messages.clone(), publish);
    tokio::task::spawn_local(driver.run(inbox));
    LifecycleHandle { messages, state }
}

/// Controls and observes the lifecycle of a pod.
#[derive(Clone, Debug)]
pub struct LifecycleHandle {
    messages: mpsc::UnboundedSender<DriverMessage>,
    state: watch::Receiver<PodState>,
}

impl LifecycleHandle {
    /// Applies a new bundle. The runtime must have received it before.
    pub fn put_bundle(&self, bundle: Bundle) {
        // Fails if the driver has exited, because the pod is finished.
        let _ = self.messages.send(DriverMessage::Bundle(Box::new(bundle)));
    }

    /// Stops the pod. A later call can only shorten the grace period.
    pub fn stop(&self, stop: Stop) {
        let _ = self.messages.send(DriverMessage::Stop(stop));
    }

    /// Stops the containers, because the sandbox cannot go on though its pod could. The containers get the pod's grace
    /// period. Everything else is left as it is for the sandbox that replaces this one. The state continues to show
    /// these containers as running: the restart policy for lost containers decides whether they are started again, not
    /// their exit codes. Returns `false` if the pod ends anyway.
    pub async fn abandon(&self) -> bool {
        let _ = self.messages.send(DriverMessage::Abandon);
        let mut state = self.state.clone();
        // The driver drops its sender when it exits.
        while state.changed().await.is_ok() {}
        !state.borrow().finished
    }

    /// The pod's complete state. Receivers are notified only on change.
    pub fn state(&self) -> watch::Receiver<PodState> {
        self.state.clone()
    }

    /// Waits until no container runs or will run, and the runtime is torn down.
    pub async fn finished(&self) {
        let mut state = self.state.clone();
        // An error means that the driver exited first: the pod was abandoned, or the thread ends.
        let _ = state.wait_for(|state| state.finished).await;
    }
}

/// Input of the driver.
#[derive(Debug)]
enum DriverMessage {
    Bundle(Box<Bundle>),
    Stop(Stop),
    Abandon,
    SetupResult(Result<PodNetwork, Problem>),
    RunEvent {
        serial: u64,
        event: container_run::RunEvent,
    },
    ProbeEvent {
        serial: u64,
        kind: ProbeKind,
        event: ProbeEvent,
    },
}
