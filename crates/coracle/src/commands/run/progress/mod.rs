//! Observes a workload of manifests while it runs: logs, progress, warnings, and the summary at its end.
//!
//! All decisions are pure functions of watched objects (`state.rs`, `summary.rs`, `give_up.rs`, `warnings.rs`, `replicas.rs`). One task
//! ([`observer`]) feeds them, prints, and passes pods on to [`super::pod_logs`]. It runs until the nodes have ended, so that logs of
//! terminating pods are shown.

mod failure;
mod give_up;
mod observer;
mod replicas;
mod state;
mod summary;
mod tracked;
mod warnings;

use std::time::Duration;

use console::print_stderr;
use kube::Client;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use self::observer::{Observer, ObserverRequest};
use super::object_ref::ObjectRef;
use super::pod_logs::LogStyle;

/// Time for the observer to end after its last request.
const END_TIMEOUT: Duration = Duration::from_secs(4);

/// How a workload is observed.
#[derive(Debug, Clone)]
pub struct ProgressOptions {
    pub logs: LogStyle,
    /// How long pods may be unable to run; `None` for any time.
    pub give_up_after: Option<Duration>,
}

/// How a workload ended by itself.
#[derive(Debug)]
pub enum WorkloadOutcome {
    /// All Jobs and Pods have ended.
    Done { succeeded: bool },
    /// These pods can never run.
    GaveUp { reason: String },
}

/// A workload that is being observed.
pub struct ObservedWorkload {
    outcome: oneshot::Receiver<WorkloadOutcome>,
    requests: mpsc::Sender<ObserverRequest>,
    task: JoinHandle<()>,
}

impl ObservedWorkload {
    /// Starts to observe these objects.
    pub fn start(client: Client, applied: Vec<ObjectRef>, options: ProgressOptions) -> Self {
        let (outcome_sender, outcome) = oneshot::channel();
        let (requests, receiver) = mpsc::channel(2);
        let observer = Observer::new(client, applied, options);
        let task = tokio::spawn(observer.run(outcome_sender, receiver));
        Self {
            outcome,
            requests,
            task,
        }
    }

    /// Waits until the workload ends by itself.
    pub async fn outcome(&mut self) -> WorkloadOutcome {
        match (&mut self.outcome).await {
            Ok(outcome) => outcome,
            // The task was cancelled, because the whole process ends.
            Err(_) => std::future::pending().await,
        }
    }

    /// The nodes will now stop their pods, within `timeout`. Results are those of this moment.
    pub async fn begin_stop(&self, timeout: Duration) {
        let _ = self
            .requests
            .send(ObserverRequest::BeginStop(timeout))
            .await;
    }

    /// Writes the last lines of logs and the summary, after the nodes have ended. `reason` says why the cluster ended.
    pub async fn finish(mut self, reason: String) {
        let _ = self.requests.send(ObserverRequest::Finish(reason)).await;
        if tokio::time::timeout(END_TIMEOUT, &mut self.task)
            .await
            .is_err()
        {
            self.task.abort();
            print_stderr(format_args!(
                "coracle: the summary is incomplete: standard output is blocked"
            ));
        }
    }
}
