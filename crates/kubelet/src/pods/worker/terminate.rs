//! How a worker ends a pod: stop request, deletion of the pod object, end of the sandbox, removal of its records.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, Preconditions};
use pod_protocol::{FailureCause, PodFailure, Stop};

use super::{SandboxHandle, TimerKind, Worker};
use crate::api_call::call;
use crate::pods::spec::{full_name, grace_seconds, is_being_deleted, name, namespace, phase, uid};
use crate::pods::status_manager::is_pod_deleted;

/// A dismissed sandbox that has not ended after this time is killed.
const DISMISS_TIMEOUT: Duration = Duration::from_secs(10);

impl Worker {
    /// The stop request for the sandbox, if the pod is terminating and the sandbox has not finished.
    pub(super) fn stop_request(&self) -> Option<Stop> {
        (self.is_terminating() && !self.sandbox_finished()).then(|| {
            // Pods that are evicted, or past their deadline, get no grace period.
            let failure_grace = self.failure.is_some().then_some(0);
            let max = self.shutdown_seconds.into_iter().chain(failure_grace).min();
            let max = max.unwrap_or(i64::MAX);
            Stop {
                grace_seconds: grace_seconds(&self.pod).min(max).max(1),
                failure: self.termination_failure(),
            }
        })
    }

    /// The pod's failure if this node ends it; `None` if the pod is deleted.
    pub(super) fn termination_failure(&self) -> Option<PodFailure> {
        if self.deleted || is_being_deleted(&self.pod) {
            return None;
        }
        if self.failure.is_some() {
            return self.failure.clone();
        }
        self.shutdown_seconds.map(|_| {
            let message = "Pod was terminated in response to imminent node shutdown.";
            PodFailure::new(FailureCause::NodeShutdown, message)
        })
    }

    /// Kills the sandbox. The worker goes on when it has ended, or at once if there is none.
    pub(super) async fn kill_sandbox(&mut self) {
        self.connection = None;
        self.timer = None;
        match &self.sandbox {
            Some(sandbox) => {
                self.killed = true;
                sandbox.kill();
            }
            None => self.sandbox_lost().await,
        }
    }

    /// Deletes the pod object. Called when the terminal status is written and no container runs.
    pub(super) async fn delete_object(&mut self) {
        // Already deleted: the API server waits for finalizers.
        if self.pod.metadata.deletion_grace_period_seconds == Some(0)
            && phase(&self.pod).is_terminal()
        {
            self.object_deleted = true;
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
            Ok(_) => self.object_deleted = true,
            Err(error) if is_pod_deleted(&error) => self.object_deleted = true,
            Err(error) => {
                tracing::warn!(
                    pod = full_name(&self.pod),
                    error = &error as &dyn std::error::Error,
                    "cannot delete pod object; will retry"
                );
                let delay = self.relaunch_backoff.next_delay();
                self.set_timer(delay, TimerKind::RetryDelete);
            }
        }
    }

    /// Asks the sandbox of a terminated pod to exit, but to keep the logs. The pods of a Job remain until the Job is deleted, and
    /// each sandbox holds a process, descriptors, and maybe resources of a job step.
    pub(super) async fn retire_sandbox(&mut self) {
        let connection = self.connection.as_mut();
        let Some(connection) = connection.filter(|connection| !connection.retired) else {
            return;
        };
        // From now on logs are read from the pod's records.
        self.shared.pod_manager.clear_sandbox(uid(&self.pod));
        connection.retired = true;
        if let Err(error) = connection.client.retire().await {
            tracing::warn!(
                pod = full_name(&self.pod),
                error = &error as &dyn std::error::Error,
                "cannot retire the sandbox of a terminated pod"
            );
            self.sandbox_disconnected();
        }
    }

    /// Asks the sandbox to clean up and exit, and kills it if it does not.
    pub(super) async fn dismiss_sandbox(&mut self) {
        self.timer = None;
        let asked = match self.connection.take() {
            Some(connection) => connection.client.dismiss().await.is_ok(),
            // A finished sandbox was retired before, and has disconnected.
            None => self.sandbox_finished(),
        };
        let Some(mut sandbox) = self.sandbox.take() else {
            return;
        };
        if asked && ends_in_time(&mut sandbox).await {
            return;
        }
        sandbox.kill();
        if ends_in_time(&mut sandbox).await {
            return;
        }
        tracing::warn!(pod = full_name(&self.pod), "sandbox does not end");
        // Its records cannot be removed before, and it may still be starting: a launcher does not interrupt that. When the node shuts down,
        // the launcher kills all of its sandboxes.
        tokio::select! {
            _ = sandbox.ended() => {}
            _ = self.shutdown.wait_for(Option::is_some) => {}
        }
    }

    /// Removes the pod's records.
    pub(super) async fn remove_records(self) {
        // When the node shuts down, its whole directory is removed.
        if self.shutdown.borrow().is_none() {
            self.shared.remove_records(uid(&self.pod)).await;
        }
    }
}

async fn ends_in_time(sandbox: &mut SandboxHandle) -> bool {
    let ended = tokio::time::timeout(DISMISS_TIMEOUT, sandbox.ended());
    ended.await.is_ok()
}
