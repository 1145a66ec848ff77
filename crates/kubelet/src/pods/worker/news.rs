//! What a worker hears: of the pod, of its sandbox, and that time has passed.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::jiff::Timestamp;
use pod_protocol::PodState;

use super::{Alarm, Link, Seen, Worker, has_begun};
use crate::pods::launch::Handle;
use crate::pods::spec::{full_name, is_final, phase, uid};
use crate::pods::status::{lost, lost_for_good, recall, survives};
use crate::pods::switchboard::Caller;

/// How long a sandbox has for dialling again when its connection breaks and its process is there.
const REDIAL_PATIENCE: Duration = Duration::from_secs(30);
/// The same, if its process can't be seen.
const UNSEEN_PATIENCE: Duration = Duration::from_secs(5);
/// A sandbox that lived so long was not broken from the start.
const STABLE: Duration = Duration::from_secs(60);

impl Worker {
    pub(super) fn saw(&mut self, seen: Seen) {
        (self.pod, self.gone, self.resize) = (seen.pod, seen.gone, seen.resize);
        // Somebody else has declared it over, and that is final for us too.
        if let Some(theirs) = &self.pod.status
            && is_final(phase(&self.pod))
            && !is_final(self.phase())
        {
            self.status.phase.clone_from(&theirs.phase);
            self.status.reason.clone_from(&theirs.reason);
            self.status.message.clone_from(&theirs.message);
        }
    }

    pub(super) async fn connected(&mut self, caller: Caller) {
        let client = caller.client;
        let states = match client.states().await {
            Ok(states) => states,
            Err(error) => {
                tracing::warn!(
                    pod = full_name(&self.pod),
                    error = &error as &dyn std::error::Error,
                    "a sandbox dialled and did not say how its pod is"
                );
                return;
            }
        };
        self.alarm = None;
        let id = |handle: &Option<Box<dyn Handle>>| handle.as_ref().and_then(|handle| handle.id());
        if let (Some(ours), Some(theirs)) = (id(&self.handle), id(&caller.process))
            && ours != theirs
        {
            // A pod has one sandbox. Who dials holds its lock, and the other one waits for that in vain.
            tracing::warn!(
                pod = full_name(&self.pod),
                ours,
                theirs,
                "the pod has two sandboxes"
            );
            self.kill();
            (self.state, self.instructed, self.recorded) = (None, None, 0);
        }
        // One that we have launched we know better: we are its parent.
        if self.handle.is_none() {
            self.must_be_asked = caller.process.as_ref().is_some_and(|p| p.must_be_asked());
            self.handle = caller.process;
        }
        self.shared.known.connected(uid(&self.pod), client.clone());
        self.link = Some(Link {
            client,
            states: states.filter_map(|state| async { state.ok() }).boxed(),
            has_bundle: false,
            told: None,
            retired: false,
        });
    }

    pub(super) fn heard(&mut self, state: PodState) {
        for event in &state.events {
            if event.serial > self.recorded {
                self.recorded = event.serial;
                self.shared.recorder.record(&self.pod, event.clone());
            }
        }
        let said = self.state.as_ref().and_then(|state| state.failure.as_ref());
        if let Some(problem) = &state.failure
            && problem.reason == "Evicted"
            && said != Some(problem)
            && !is_final(self.phase())
        {
            let (reason, message) = (&problem.reason, &problem.message);
            self.shared.recorder.say(&self.pod, true, reason, message);
        }
        self.instructed.get_or_insert_with(|| has_begun(&state));
        self.state = Some(state);
    }

    pub(super) fn disconnected(&mut self) {
        self.link = None;
        self.shared.known.disconnected(uid(&self.pod));
        let patience = match self.handle {
            Some(_) => REDIAL_PATIENCE,
            None => UNSEEN_PATIENCE,
        };
        self.set_alarm(patience, Alarm::NoSandbox);
    }

    pub(super) async fn exited(&mut self, how: &str) {
        tracing::info!(pod = full_name(&self.pod), how, "the pod's sandbox is gone");
        self.handle = None;
        self.link = None;
        self.alarm = None;
        self.lost().await;
    }

    pub(super) async fn rang(&mut self, alarm: Alarm) {
        if matches!(alarm, Alarm::NoSandbox | Alarm::Overdue) {
            // That of a pod that is over has usually gone before.
            if !is_final(self.phase()) {
                tracing::warn!(
                    pod = full_name(&self.pod),
                    ?alarm,
                    "the pod's sandbox does not answer"
                );
            }
            self.kill();
            self.lost().await;
        }
    }

    /// The sandbox is gone, and with it every container that ran.
    pub(super) async fn lost(&mut self) {
        self.shared.known.disconnected(uid(&self.pod));
        self.instructed = None;
        self.recorded = 0;
        // How it ended stays true.
        if self.is_finished() {
            return;
        }
        self.state = None;
        if is_final(self.phase()) {
            return;
        }
        self.recall().await;
        if self.is_finished() {
            return;
        }
        if !survives(&self.pod, &self.status) {
            self.status = lost_for_good(&self.known(), None, Timestamp::now());
            return;
        }
        for statuses in [
            &mut self.status.init_container_statuses,
            &mut self.status.container_statuses,
            &mut self.status.ephemeral_container_statuses,
        ] {
            *statuses = statuses.as_deref().map(lost);
        }
        self.before = [
            &self.status.init_container_statuses,
            &self.status.container_statuses,
            &self.status.ephemeral_container_statuses,
        ]
        .into_iter()
        .flatten()
        .flatten()
        .cloned()
        .collect();
        // One that is to end is not started again.
        if self.is_ending() {
            return;
        }
        self.shared.recorder.say(
            &self.pod,
            false,
            "SandboxChanged",
            "Pod sandbox changed, it will be killed and re-created.",
        );
        if self.launched_at.elapsed() >= STABLE {
            self.relaunch.restart();
        }
        let wait = self.relaunch.wait();
        self.set_alarm(wait, Alarm::Relaunch);
    }

    /// Takes over what the lost sandbox wrote down and may not have told: above all, how its containers ended.
    async fn recall(&mut self) {
        let checkpoint = self.shared.launcher.checkpoint(uid(&self.pod)).await;
        let Some(state) = checkpoint else { return };
        if state.finished {
            self.state = Some(state);
            self.conclude();
            return;
        }
        for (statuses, left) in [
            (
                &mut self.status.init_container_statuses,
                &state.init_containers,
            ),
            (&mut self.status.container_statuses, &state.containers),
            (
                &mut self.status.ephemeral_container_statuses,
                &state.ephemeral_containers,
            ),
        ] {
            recall(statuses.get_or_insert_default(), left);
        }
    }

    /// The sandbox of a pod that is new to the API server may have come and gone: an earlier kubelet started it and could not say so.
    pub(super) async fn look_back(&mut self) {
        let launcher = Arc::clone(&self.shared.launcher);
        let uid = uid(&self.pod);
        if launcher.find(uid).is_none() && launcher.checkpoint(uid).await.is_some() {
            self.lost().await;
        }
    }
}
