//! The pod's namespaces, network and volumes: tried until they are there.

use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::super::Message;
use super::Driver;
use crate::container_runtime::{ContainerRuntime, PodNetwork};
use pod_protocol::Problem;

/// The shortest and the longest wait before the next try.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// The pod's namespaces, network and volumes.
pub(super) enum SetupState {
    Trying { task: AbortHandle, delay: Duration },
    Waiting { until: Instant, delay: Duration },
    Done,
    Over,
}

impl SetupState {
    /// Before the first try.
    pub(super) fn first(now: Instant) -> Self {
        Self::Waiting {
            until: now,
            delay: RETRY.0,
        }
    }
}

impl<R: ContainerRuntime> Driver<R> {
    /// Tries to bring the pod's namespaces up when it is time; tells when that will be.
    pub(super) fn check_up(&mut self) -> Option<Instant> {
        if self.stop_deadline.is_some() {
            if let SetupState::Trying { task, .. } = &self.up {
                task.abort();
                self.up = SetupState::Over;
            }
            return None;
        }
        let SetupState::Waiting { until, delay } = self.up else {
            return None;
        };
        if until > Instant::now() {
            return Some(until);
        }
        let (runtime, messages) = (self.runtime.clone(), self.messages.clone());
        let task = tokio::task::spawn_local(async move {
            let result = runtime.set_up().await;
            let _ = messages.send(Message::SetUp(result));
        });
        self.up = SetupState::Trying {
            task: task.abort_handle(),
            delay,
        };
        None
    }

    pub(super) fn came_up(&mut self, result: Result<PodNetwork, Problem>) {
        let SetupState::Trying { delay, .. } = self.up else {
            return;
        };
        match result {
            Ok(network) => {
                for words in &network.unsupported_host_ports {
                    self.events.record(None, true, "HostPortNotSupported", words.as_str());
                }
                self.network = network;
                self.up = SetupState::Done;
            }
            Err(problem) => {
                let volumes = matches!(
                    problem.reason.as_str(),
                    "FailedMount" | "FailedAttachVolume" | "FailedMapVolume" | "NetworkNotReady"
                );
                if volumes {
                    let (reason, message) = (problem.reason, problem.message);
                    self.events.record(None, true, &reason, message);
                } else {
                    let message = format!("Failed to create pod sandbox: {}", problem.message);
                    self.events.record(None, true, "FailedCreatePodSandBox", message);
                }
                self.up = SetupState::Waiting {
                    until: Instant::now() + delay,
                    delay: (delay * 2).min(RETRY.1),
                };
            }
        }
    }
}
