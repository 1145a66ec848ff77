//! Applies the facts that runs report to the records.

use std::time::Duration;

use k8s_openapi::api::core::v1::ContainerStateTerminated;
use tokio::time::Instant;

use super::super::record::{Ended, Kill, PullFailure, Stage};
use super::super::run::Fact;
use super::Driver;
use crate::seams::Runtime;
use pod_protocol::Problem;

/// Retry interval after a container could not be created.
const RETRY: Duration = Duration::from_secs(10);

impl<R: Runtime> Driver<R> {
    pub(super) fn note_fact(&mut self, serial: u64, fact: Fact) {
        let grace = self.grace();
        let Some(index) = self.index_of(serial) else {
            return;
        };
        let now = Instant::now();
        let record = &mut self.records[index];
        let path = record.field_path();
        match fact {
            Fact::Event {
                warning,
                reason,
                message,
            } => self.journal.note(Some(path), warning, reason, message),
            Fact::Created {
                id,
                at,
                image,
                user,
            } => {
                record.pull_failure = None;
                record.pull_back_off.clear();
                if let Some(run) = &mut record.run {
                    run.stage = Stage::Hook { at };
                    run.container = Some((id, *image, *user));
                }
            }
            Fact::Running => {
                record.waiting = None;
                record.adopt();
                if let Some(run) = &mut record.run
                    && let Stage::Hook { at } = run.stage
                {
                    run.stage = Stage::Running { at };
                }
                self.probe_first(index);
            }
            Fact::HookFailed(message) => {
                record.waiting = Some(Problem {
                    reason: "PostStartHookError".to_owned(),
                    message,
                });
                let kill = Kill {
                    deadline: now + grace,
                    turn: true,
                    restart: false,
                };
                self.kill(index, kill, "FailedPostStartHook".to_owned());
            }
            Fact::NoImage { image, problem } => {
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
            Fact::NotCreated(problem) => {
                self.forget(index);
                let record = &mut self.records[index];
                record.held = self
                    .bundle
                    .containers
                    .get(record.name())
                    .is_some_and(|input| input.problem.is_some());
                record.retry = Some(now + RETRY).filter(|_| !record.held);
                record.pull_failure = None;
                record.waiting = Some(problem);
            }
            Fact::CalledOff => self.forget(index),
            Fact::Ended(state) => self.note_end(index, state, now),
        }
    }

    fn note_end(&mut self, index: usize, state: ContainerStateTerminated, now: Instant) {
        let record = &mut self.records[index];
        let run = record.run.as_ref();
        let restart = run
            .and_then(|run| run.kill)
            .is_some_and(|kill| kill.restart);
        // A run counts even if its program could not be started or its postStart hook did not finish.
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
        record.ended = Some(Ended {
            state,
            at: now,
            restart,
            stale: false,
        });
        self.forget(index);
    }

    /// Removes the run; its probes are aborted.
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
