//! Sets up the pod's namespaces, network and volumes, with retries.

use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::super::Message;
use super::Driver;
use crate::seams::{PodNetwork, Runtime};
use pod_protocol::Problem;

/// Minimum and maximum retry interval.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// Progress of the setup of the pod's namespaces, network and volumes.
pub(super) enum Up {
    Trying { task: AbortHandle, delay: Duration },
    Waiting { until: Instant, delay: Duration },
    Done,
    Over,
}

impl Up {
    /// The first attempt is due at `now`.
    pub(super) fn first(now: Instant) -> Self {
        Self::Waiting {
            until: now,
            delay: RETRY.0,
        }
    }
}

impl<R: Runtime> Driver<R> {
    /// Starts an attempt if one is due; otherwise returns when the next one is.
    pub(super) fn check_up(&mut self) -> Option<Instant> {
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

    pub(super) fn came_up(&mut self, result: Result<PodNetwork, Problem>) {
        let Up::Trying { delay, .. } = self.up else {
            return;
        };
        match result {
            Ok(network) => {
                for words in &network.closed_ports {
                    self.journal
                        .note(None, true, "HostPortNotSupported", words.as_str());
                }
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
                    delay: (delay * 2).min(RETRY.1),
                };
            }
        }
    }
}
