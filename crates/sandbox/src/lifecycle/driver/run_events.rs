//! What runs tell.

use std::time::Duration;

use k8s_openapi::api::core::v1::ContainerStateTerminated;
use tokio::time::Instant;

use super::super::container_record::{TerminatedRun, KillOrder, PullFailure, RunStage};
use super::super::container_run::RunEvent;
use super::Driver;
use crate::container_runtime::ContainerRuntime;
use pod_protocol::Problem;

/// How long a container that could not be made waits for its next try.
const RETRY: Duration = Duration::from_secs(10);

impl<R: ContainerRuntime> Driver<R> {
    pub(super) fn note_fact(&mut self, serial: u64, fact: RunEvent) {
        let grace = self.grace();
        let Some(index) = self.index_of(serial) else {
            return;
        };
        let now = Instant::now();
        let record = &mut self.records[index];
        let path = record.field_path();
        match fact {
            RunEvent::Event {
                warning,
                reason,
                message,
            } => self.events.record(Some(path), warning, reason, message),
            RunEvent::Created {
                id,
                at,
                image,
                user,
            } => {
                record.pull_failure = None;
                record.pull_back_off.clear();
                if let Some(run) = &mut record.run {
                    run.stage = RunStage::Hook { at };
                    run.container = Some((id, *image, *user));
                }
            }
            RunEvent::Running => {
                record.waiting = None;
                record.adopt();
                if let Some(run) = &mut record.run
                    && let RunStage::Hook { at } = run.stage
                {
                    run.stage = RunStage::Running { at };
                }
                self.probe_first(index);
            }
            RunEvent::HookFailed(message) => {
                record.waiting = Some(Problem {
                    reason: "PostStartHookError".to_owned(),
                    message,
                });
                let kill = KillOrder {
                    deadline: now + grace,
                    may_signal: true,
                    restart: false,
                };
                self.kill(index, kill, "FailedPostStartHook".to_owned());
            }
            RunEvent::NoImage { image, problem } => {
                self.forget(index);
                let record = &mut self.records[index];
                if matches!(
                    problem.reason.as_str(),
                    "InvalidImageName" | "ErrImageNeverPull" | "ImageInspectError"
                ) {
                    record.retry = Some(now + RETRY);
                } else {
                    record.pull_back_off.step(now, now);
                    record.retry = record.pull_back_off.until(now);
                    record.pull_failure = Some(PullFailure {
                        image,
                        message: format!("{}: {}", problem.reason, problem.message),
                        at: now,
                        shown: false,
                    });
                }
                record.waiting = Some(problem);
            }
            RunEvent::NotCreated(problem) => {
                self.forget(index);
                let record = &mut self.records[index];
                record.blocked = self
                    .bundle
                    .containers
                    .get(record.name())
                    .is_some_and(|input| input.problem.is_some());
                record.retry = Some(now + RETRY).filter(|_| !record.blocked);
                record.pull_failure = None;
                record.waiting = Some(problem);
            }
            RunEvent::CalledOff => self.forget(index),
            RunEvent::Exited(state) => self.note_end(index, state, now),
        }
    }

    fn note_end(&mut self, index: usize, state: ContainerStateTerminated, now: Instant) {
        let record = &mut self.records[index];
        let run = record.run.as_ref();
        let restart = run
            .and_then(|run| run.kill)
            .is_some_and(|kill| kill.restart);
        // One that could not be run, or never got past its hook, was a run all the same.
        if !record.running() {
            record.adopt();
        }
        let hook_failed = record
            .waiting
            .as_ref()
            .is_some_and(|waiting| waiting.reason == "PostStartHookError");
        if !hook_failed {
            record.waiting = None;
        }
        record.ended = Some(TerminatedRun {
            state,
            at: now,
            restart,
            before_restart: false,
        });
        self.forget(index);
    }

    /// A run is over.
    fn forget(&mut self, index: usize) {
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
