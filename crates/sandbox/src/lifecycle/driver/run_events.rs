//! Applies the events that runs report to the records.

use std::time::Duration;

use k8s_openapi::api::core::v1::ContainerStateTerminated;
use tokio::time::Instant;

use super::super::container_record::{
    KillOrder, PullFailure, RunStage, TerminatedRun, WaitingState,
};
use super::super::container_run::RunEvent;
use super::LifecycleDriver;
use crate::container_runtime::{ContainerRuntime, ImageProblem, ImageProblemReason};

/// Retry interval after a container could not be created.
const CREATE_RETRY_INTERVAL: Duration = Duration::from_secs(10);

impl<R: ContainerRuntime> LifecycleDriver<R> {
    pub(super) fn apply_run_event(&mut self, serial: u64, event: RunEvent) {
        let grace_period = self.grace_period();
        let Some(index) = self.index_of(serial) else {
            return;
        };
        let now = Instant::now();
        let record = &mut self.records[index];
        let path = record.field_path();
        match event {
            RunEvent::PodEvent {
                event_type,
                reason,
                message,
            } => self.events.record(Some(path), event_type, reason, message),
            RunEvent::Created {
                started_at,
                container,
            } => {
                record.pull_failure = None;
                record.pull_back_off.reset();
                if let Some(run) = &mut record.run {
                    run.stage = RunStage::PostStart { started_at };
                    run.container = Some(*container);
                }
            }
            RunEvent::Running => {
                record.waiting = None;
                record.show_current_run();
                if let Some(run) = &mut record.run
                    && let RunStage::PostStart { started_at } = run.stage
                {
                    run.stage = RunStage::Running { started_at };
                }
                self.start_probing(index);
            }
            RunEvent::PostStartFailed(message) => {
                record.waiting = Some(WaitingState::PostStartHookError(message));
                let order = KillOrder {
                    deadline: now + grace_period,
                    may_signal: true,
                    force_restart: false,
                };
                self.kill(index, order, "FailedPostStartHook".to_owned());
            }
            RunEvent::ImageFailed { image, problem } => {
                self.apply_image_failure(index, image, problem, now);
            }
            RunEvent::CreateFailed(problem) => {
                self.remove_run(index);
                let record = &mut self.records[index];
                record.waits_for_bundle = self
                    .bundle
                    .containers
                    .get(record.name())
                    .is_some_and(|input| input.problem.is_some());
                record.retry_at =
                    Some(now + CREATE_RETRY_INTERVAL).filter(|_| !record.waits_for_bundle);
                record.pull_failure = None;
                record.waiting = Some(WaitingState::Problem(problem));
            }
            RunEvent::Cancelled => self.remove_run(index),
            RunEvent::Terminated(state) => self.apply_termination(index, state, now),
        }
    }

    fn apply_image_failure(
        &mut self,
        index: usize,
        image: String,
        problem: ImageProblem,
        now: Instant,
    ) {
        self.remove_run(index);
        let record = &mut self.records[index];
        let ImageProblem { reason, message } = &problem;
        if matches!(
            reason,
            ImageProblemReason::InvalidImageName
                | ImageProblemReason::ErrImageNeverPull
                | ImageProblemReason::ImageInspectError
        ) {
            record.retry_at = Some(now + CREATE_RETRY_INTERVAL);
        } else {
            record.pull_back_off.record_attempt(now, now);
            record.retry_at = record.pull_back_off.retry_at(now);
            record.pull_failure = Some(PullFailure {
                image,
                message: format!("{}: {message}", reason.as_str()),
                at: now,
                back_off_shown: false,
            });
        }
        record.waiting = Some(WaitingState::Problem(problem.into()));
    }

    fn apply_termination(&mut self, index: usize, state: ContainerStateTerminated, now: Instant) {
        let record = &mut self.records[index];
        let run = record.run.as_ref();
        let force_restart = run
            .and_then(|run| run.kill)
            .is_some_and(|order| order.force_restart);
        // A run counts even if its program could not be started or its postStart hook did not finish.
        if !record.is_running() {
            record.show_current_run();
        }
        if !matches!(record.waiting, Some(WaitingState::PostStartHookError(_))) {
            record.waiting = None;
        }
        record.last_run = Some(TerminatedRun {
            state,
            at: now,
            force_restart,
            stale: false,
        });
        self.remove_run(index);
    }

    /// Removes the run; its probes are aborted.
    fn remove_run(&mut self, index: usize) {
        if let Some(run) = self.records[index].run.take() {
            self.handles.remove(&run.serial);
        }
    }

    pub(super) fn index_of(&self, serial: u64) -> Option<usize> {
        self.records
            .iter()
            .position(|record| record.run.as_ref().is_some_and(|run| run.serial == serial))
    }
}
