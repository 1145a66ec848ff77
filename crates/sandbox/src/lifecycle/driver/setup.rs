//! Sets up the pod's namespaces, network and volumes, with retries.

use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::super::DriverMessage;
use super::super::event_log::EventType;
use super::LifecycleDriver;
use crate::container_runtime::{ContainerRuntime, PodNetwork};
use pod_protocol::Problem;

const MIN_RETRY_INTERVAL: Duration = Duration::from_secs(1);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// Progress of the setup of the pod's namespaces, network and volumes.
pub(super) enum SetupState {
    /// An attempt runs.
    Running {
        task: AbortHandle,
        /// Retry interval if it fails.
        interval: Duration,
    },
    /// The next attempt is due at `retry_at`.
    Waiting {
        retry_at: Instant,
        interval: Duration,
    },
    Done,
    /// The pod is being stopped: no further attempts.
    Ended,
}

impl SetupState {
    /// The first attempt is due at `now`.
    pub(super) fn due_at(now: Instant) -> Self {
        Self::Waiting {
            retry_at: now,
            interval: MIN_RETRY_INTERVAL,
        }
    }
}

impl<R: ContainerRuntime> LifecycleDriver<R> {
    /// Starts an attempt if one is due; otherwise returns when the next one is.
    pub(super) fn check_setup(&mut self) -> Option<Instant> {
        if self.stop_deadline.is_some() {
            if let SetupState::Running { task, .. } = &self.setup {
                task.abort();
                self.setup = SetupState::Ended;
            }
            return None;
        }
        let SetupState::Waiting { retry_at, interval } = self.setup else {
            return None;
        };
        if retry_at > Instant::now() {
            return Some(retry_at);
        }
        let (runtime, messages) = (self.runtime.clone(), self.messages.clone());
        let task = tokio::task::spawn_local(async move {
            let result = runtime.set_up().await;
            let _ = messages.send(DriverMessage::SetupResult(result));
        });
        self.setup = SetupState::Running {
            task: task.abort_handle(),
            interval,
        };
        None
    }

    pub(super) fn apply_setup_result(&mut self, result: Result<PodNetwork, Problem>) {
        let SetupState::Running { interval, .. } = self.setup else {
            return;
        };
        match result {
            Ok(network) => {
                for message in &network.unsupported_host_ports {
                    self.events.record(
                        None,
                        EventType::Warning,
                        "HostPortNotSupported",
                        message.as_str(),
                    );
                }
                self.network = network;
                self.setup = SetupState::Done;
            }
            Err(problem) => {
                let Problem { reason, message } = problem;
                self.events
                    .record(None, EventType::Warning, &reason, message);
                self.setup = SetupState::Waiting {
                    retry_at: Instant::now() + interval,
                    interval: (interval * 2).min(MAX_RETRY_INTERVAL),
                };
            }
        }
    }
}
