//! What a worker does: to sandboxes, and to the pod object.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{DeleteParams, Preconditions};
use pod_protocol::connection::ConnectionError;
use pod_protocol::{Problem, Stop};
use tokio::time::Instant;

use super::{Alarm, Worker};
use crate::api::call;
use crate::pods::admission::needs;
use crate::pods::launch::Launch;
use crate::pods::runtime_class;
use crate::pods::spec::{
    full_name, grace_seconds, is_final, is_to_be_deleted, name, namespace, phase, uid,
};
use crate::pods::status::refusal;
use crate::pods::writer::is_of_another_pod;

/// How long a sandbox has for dialling the first time.
const LAUNCH_PATIENCE: Duration = Duration::from_secs(60);
/// A sandbox that was told to clean up and exit is killed after this.
const DISMISSAL_PATIENCE: Duration = Duration::from_secs(10);
/// A sandbox that was told to end is killed so long after the pod's grace.
const OVERDUE_PATIENCE: Duration = Duration::from_secs(60);

/// What a sandbox was just told.
enum Told {
    Nothing,
    Bundle,
    /// To end, in so many seconds.
    Stop(i64),
}

impl Worker {
    pub(super) fn refuse(&mut self, problem: &Problem) {
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

    pub(super) fn kill(&mut self) {
        self.link = None;
        self.alarm = None;
        if let Some(mut handle) = self.handle.take() {
            handle.kill();
        }
    }

    /// Looks for a sandbox that an earlier kubelet has started and that has not dialled yet; whether there is one.
    pub(super) fn find(&mut self) -> bool {
        let Some(handle) = self.shared.launcher.find(uid(&self.pod)) else {
            return false;
        };
        self.must_be_asked = handle.must_be_asked();
        self.handle = Some(handle);
        self.set_alarm(LAUNCH_PATIENCE, Alarm::NoSandbox);
        true
    }

    pub(super) async fn launch(&mut self) {
        // That kubelet may not have lived to tell the API server of it.
        if self.find() {
            return;
        }
        if let Err(refusal) = runtime_class::check(&self.shared.client, &self.pod).await {
            return self.not_launched(&refusal);
        }
        let launch = Launch {
            uid: uid(&self.pod).to_owned(),
            namespace: namespace(&self.pod).to_owned(),
            name: name(&self.pod).to_owned(),
            host_pid: self.pod.spec.as_ref().and_then(|spec| spec.host_pid) == Some(true),
            way: self.shared.way(&self.pod),
            needs: needs(&self.pod),
            token: self.shared.config.node_key.token(uid(&self.pod)),
        };
        match self.shared.launcher.launch(launch).await {
            Ok(handle) => {
                self.must_be_asked = handle.must_be_asked();
                self.handle = Some(handle);
                self.instructed = Some(false);
                self.launched_at = Instant::now();
                self.set_alarm(LAUNCH_PATIENCE, Alarm::NoSandbox);
            }
            Err(error) => self.not_launched(&error),
        }
    }

    /// There is no sandbox; another attempt will be made.
    fn not_launched(&mut self, error: &dyn std::error::Error) {
        let message = format!("Failed to create pod sandbox: {}", chain(error));
        tracing::warn!(pod = full_name(&self.pod), message);
        self.shared
            .recorder
            .say(&self.pod, true, "FailedCreatePodSandBox", &message);
        let wait = self.relaunch.wait();
        self.set_alarm(wait, Alarm::Relaunch);
    }

    /// Tells the sandbox what it doesn't know yet: the pod, and that it is to end.
    pub(super) async fn instruct(&mut self) {
        let stop = self.stop_order();
        if stop.is_some() && self.instructed == Some(false) {
            // There is nothing to end but the sandbox itself.
            self.dismiss().await;
            self.lost().await;
            return;
        }
        let Some(link) = &mut self.link else { return };
        let instructed = async {
            match (&stop, &self.offer) {
                // One that we have found is asked first whether it has begun.
                (Some(order), _) if link.told != stop && self.instructed.is_some() => {
                    link.client.stop(order).await?;
                    link.told.clone_from(&stop);
                    Ok(Told::Stop(order.grace_seconds))
                }
                (None, Some(offer))
                    if !link.has_bundle && (offer.whole || self.instructed == Some(true)) =>
                {
                    let mut bundle = offer.bundle.clone();
                    bundle.before.clone_from(&self.before);
                    link.client.put_bundle(&bundle).await?;
                    link.has_bundle = true;
                    Ok(Told::Bundle)
                }
                _ => Ok::<_, ConnectionError>(Told::Nothing),
            }
        };
        match instructed.await {
            Ok(Told::Nothing) => {}
            Ok(Told::Bundle) => self.instructed = Some(true),
            Ok(Told::Stop(grace)) => {
                let grace = Duration::from_secs(grace.unsigned_abs());
                self.set_alarm(grace + OVERDUE_PATIENCE, Alarm::Overdue);
            }
            Err(error) => {
                tracing::warn!(
                    pod = full_name(&self.pod),
                    error = &error as &dyn std::error::Error,
                    "could not instruct a sandbox"
                );
                self.disconnected();
            }
        }
    }

    /// The order to end, if the pod is to end.
    pub(super) fn stop_order(&self) -> Option<Stop> {
        (self.is_ending() && !self.is_finished()).then(|| {
            // Who has to go because the machine is short has no time.
            let at_once = self.failed.is_some().then_some(0);
            let allowed = self.shutdown.into_iter().chain(at_once).min();
            let allowed = allowed.unwrap_or(i64::MAX);
            Stop {
                grace_seconds: grace_seconds(&self.pod).min(allowed).max(1),
                failure: self.verdict(),
            }
        })
    }

    /// What the pod fails by, if it is this node that ends it.
    pub(super) fn verdict(&self) -> Option<Problem> {
        if self.gone || is_to_be_deleted(&self.pod) {
            return None;
        }
        if self.failed.is_some() {
            return self.failed.clone();
        }
        self.shutdown.map(|_| Problem {
            reason: "Terminated".to_owned(),
            message: "Pod was terminated in response to imminent node shutdown.".to_owned(),
        })
    }

    /// Deletes the pod object: its end is recorded, and nothing of it runs.
    pub(super) async fn remove(&mut self) {
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

    /// Removes what a sandbox could not remove itself: the place where it lived, or everything if it was killed.
    pub(super) async fn clean_up(self) {
        // When the node goes down, all of its directory goes.
        if self.shutdown.is_none() {
            self.shared.remove_dir(uid(&self.pod)).await;
        }
    }

    /// Lets the sandbox of a pod that is over go before the pod does: nobody deletes the pods of a Job for as long as that is
    /// there, and each sandbox holds a process, descriptors, and maybe a share of the node. The pod's logs stay.
    pub(super) async fn retire(&mut self) {
        let Some(link) = self.link.as_mut().filter(|link| !link.retired) else {
            return;
        };
        // From now on logs are read from the pod's directory.
        self.shared.known.disconnected(uid(&self.pod));
        link.retired = true;
        if let Err(error) = link.client.retire().await {
            tracing::warn!(
                pod = full_name(&self.pod),
                error = &error as &dyn std::error::Error,
                "could not let a sandbox go whose pod is over"
            );
            self.disconnected();
        }
    }

    /// Lets the sandbox clean up and go; one that can't be asked is killed.
    pub(super) async fn dismiss(&mut self) {
        self.alarm = None;
        let asked = match self.link.take() {
            Some(link) => link.client.dismiss().await.is_ok(),
            // One whose pod is over was told to go, and has hung up.
            None => self.is_finished(),
        };
        if let Some(mut handle) = self.handle.take() {
            let went = asked
                && tokio::time::timeout(DISMISSAL_PATIENCE, handle.exited())
                    .await
                    .is_ok();
            if !went {
                tracing::warn!(
                    pod = full_name(&self.pod),
                    "a sandbox does not go by itself: killed"
                );
                handle.kill();
            }
        }
    }
}

/// An error with all that led to it.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
