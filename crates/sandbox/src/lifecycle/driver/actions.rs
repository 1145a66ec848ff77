//! Carries out what was planned.

use tokio::sync::watch;
use tokio::time::Instant;

use super::super::back_off::go_duration;
use super::super::hooks::HookContext;
use super::super::plan::Action;
use super::super::container_record::{KillOrder, ContainerType, ContainerRun, RunStage};
use super::super::container_run::{self, RunSpec, RunReporter};
use super::{Driver, RunHandles};
use crate::probe::worker::ProbeKind;
use crate::container_runtime::ContainerRuntime;
use pod_protocol::Problem;

impl<R: ContainerRuntime> Driver<R> {
    pub(super) fn carry_out(&mut self, action: Action) {
        match action {
            Action::Start(index) => self.start(index),
            Action::ShowCrashLoopBackOff(index) => self.crash_loop(index),
            Action::ShowImagePullBackOff(index) => self.pull_back_off(index),
            Action::Kill {
                index,
                kill,
                message,
            } => self.kill(index, kill, message),
            Action::MarkStarted(index) => self.records[index].started_once = true,
            Action::BeginRestartAll => self.restarting_all = true,
            Action::RestartAll => {
                self.restarting_all = false;
                for record in &mut self.records {
                    if record.kind != ContainerType::Ephemeral {
                        record.reset();
                    }
                }
            }
            Action::StopPod => self.end(self.grace()),
            // Ends the loop before it comes here.
            Action::Finish => {}
        }
    }

    fn start(&mut self, index: usize) {
        let now = Instant::now();
        let place = HookContext {
            pod: self.pod_name(),
            ip: self.network.ips.first().copied(),
        };
        self.last_serial += 1;
        let serial = self.last_serial;
        let record = &mut self.records[index];
        if let Some(ended) = &record.ended {
            record.back_off.step(ended.at, now);
        }
        record.retry = None;
        record.run = Some(ContainerRun {
            serial,
            image: record.spec.image.clone().unwrap_or_default(),
            resources: record.spec.resources.clone(),
            stage: RunStage::Preparing,
            container: None,
            kill: None,
            startup: None,
            liveness_failed: false,
            ready: false,
        });
        let order = RunSpec {
            container: record.spec.clone(),
            target: record.target.clone(),
            attempt: u32::try_from(record.next_attempt()).unwrap_or(0),
            input: self
                .bundle
                .containers
                .get(&record.spec.name)
                .cloned()
                .unwrap_or_default(),
            place,
        };
        let (kill, orders) = watch::channel(None);
        self.handles.insert(
            serial,
            RunHandles {
                kill,
                probes: Vec::new(),
            },
        );
        let report = RunReporter {
            serial,
            to: self.messages.clone(),
        };
        tokio::task::spawn_local(run::run(self.runtime.clone(), report, order, orders));
    }

    fn crash_loop(&mut self, index: usize) {
        let pod = self.pod_name();
        let record = &mut self.records[index];
        let name = record.name().to_owned();
        let delay = go_duration(record.back_off.delay());
        record.waiting = Some(Problem {
            reason: "CrashLoopBackOff".to_owned(),
            message: format!("back-off {delay} restarting failed container={name} pod={pod}"),
        });
        let path = record.field_path();
        self.events.record(
            Some(path),
            true,
            "BackOff",
            format!("Back-off restarting failed container {name} in pod {pod}"),
        );
    }

    fn pull_back_off(&mut self, index: usize) {
        let record = &mut self.records[index];
        let path = record.field_path();
        let Some(failure) = &mut record.pull_failure else {
            return;
        };
        failure.shown = true;
        let message = format!("Back-off pulling image {:?}", failure.image);
        record.waiting = Some(Problem {
            reason: "ImagePullBackOff".to_owned(),
            message: format!("{message}: {}", failure.message),
        });
        self.events.record(Some(path.clone()), false, "BackOff", message);
        self.events.record(Some(path), true, "Failed", "Error: ImagePullBackOff");
    }

    pub(super) fn kill(&mut self, index: usize, kill: KillOrder, message: String) {
        let record = &mut self.records[index];
        let path = record.field_path();
        let name = record.name().to_owned();
        let Some(run) = &mut record.run else { return };
        let first = run.kill.is_none();
        run.kill = Some(kill);
        if let Some(handles) = self.handles.get_mut(&run.serial) {
            handles.kill.send_replace(Some(kill));
            // Nobody asks any more whether it is alive; whether it takes work is still of interest.
            handles.probes.retain(|(which, task)| {
                let keep = *which == ProbeKind::Readiness;
                if !keep {
                    task.abort();
                }
                keep
            });
        }
        if first && run.stage != RunStage::Preparing {
            let message = if message.is_empty() {
                format!("Stopping container {name}")
            } else {
                message
            };
            self.events.record(Some(path), false, "Killing", message);
        }
    }
}
