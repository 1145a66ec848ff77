//! Carries out the actions of a plan.

use pod_protocol::{Problem, go_duration};
use tokio::sync::watch;
use tokio::time::Instant;

use super::super::container_record::{
    ContainerRun, ContainerType, KillOrder, RunStage, WaitingState,
};
use super::super::container_run::{self, RunReporter, RunSpec};
use super::super::event_log::EventType;
use super::super::hooks::HookPod;
use super::super::plan::PlanAction;
use super::{LifecycleDriver, RunHandles};
use crate::container_runtime::ContainerRuntime;
use crate::lifecycle::probe::worker::ProbeKind;

impl<R: ContainerRuntime> LifecycleDriver<R> {
    pub(super) fn carry_out(&mut self, action: PlanAction) {
        match action {
            PlanAction::Start(index) => self.start(index),
            PlanAction::ShowCrashLoopBackOff(index) => self.show_crash_loop_back_off(index),
            PlanAction::ShowImagePullBackOff(index) => self.show_image_pull_back_off(index),
            PlanAction::Kill {
                index,
                order,
                message,
            } => self.kill(index, order, message),
            PlanAction::MarkStartedOnce(index) => self.records[index].started_once = true,
            PlanAction::BeginRestartAll => self.restarting_all = true,
            PlanAction::RestartAll => {
                self.restarting_all = false;
                for record in &mut self.records {
                    if record.container_type != ContainerType::Ephemeral {
                        record.prepare_restart_all();
                    }
                }
            }
            PlanAction::StopPod => self.begin_stop(self.grace_period()),
            // `carry_out_plans` returns before it carries this out.
            PlanAction::Finish => {}
        }
    }

    fn start(&mut self, index: usize) {
        let now = Instant::now();
        let pod = HookPod {
            full_name: self.pod_full_name(),
            ip: self.network.ips.first().copied(),
        };
        self.last_serial += 1;
        let serial = self.last_serial;
        let record = &mut self.records[index];
        if let Some(last_run) = &record.last_run {
            record.back_off.record_attempt(last_run.at, now);
        }
        record.retry_at = None;
        record.run = Some(ContainerRun {
            serial,
            image: record.spec.image.clone().unwrap_or_default(),
            resources: record.spec.resources.clone(),
            stage: RunStage::Preparing,
            container: None,
            kill: None,
            startup_succeeded: None,
            liveness_failed: false,
            ready: false,
        });
        let spec = RunSpec {
            container: record.spec.clone(),
            target: record.target.clone(),
            attempt: u32::try_from(record.next_attempt()).unwrap_or(0),
            input: self
                .bundle
                .containers
                .get(&record.spec.name)
                .cloned()
                .unwrap_or_default(),
            pod,
        };
        let (kill, kill_orders) = watch::channel(None);
        self.handles.insert(
            serial,
            RunHandles {
                kill,
                probes: Vec::new(),
            },
        );
        let reporter = RunReporter {
            serial,
            messages: self.messages.clone(),
        };
        let run = container_run::run_container(self.runtime.clone(), reporter, spec, kill_orders);
        tokio::task::spawn_local(run);
    }

    fn show_crash_loop_back_off(&mut self, index: usize) {
        let pod = self.pod_full_name();
        let record = &mut self.records[index];
        let name = record.name().to_owned();
        let delay = go_duration(record.back_off.delay());
        record.waiting = Some(WaitingState::CrashLoopBackOff(format!(
            "back-off {delay} restarting failed container={name} pod={pod}"
        )));
        let path = record.field_path();
        self.events.record(
            Some(path),
            EventType::Warning,
            "BackOff",
            format!("Back-off restarting failed container {name} in pod {pod}"),
        );
    }

    fn show_image_pull_back_off(&mut self, index: usize) {
        let record = &mut self.records[index];
        let path = record.field_path();
        let Some(failure) = &mut record.pull_failure else {
            return;
        };
        failure.back_off_shown = true;
        let message = format!("Back-off pulling image {:?}", failure.image);
        record.waiting = Some(WaitingState::Problem(Problem::new(
            "ImagePullBackOff",
            format!("{message}: {}", failure.message),
        )));
        self.events
            .record(Some(path.clone()), EventType::Normal, "BackOff", message);
        self.events.record(
            Some(path),
            EventType::Warning,
            "Failed",
            "Error: ImagePullBackOff",
        );
    }

    /// Stops a run, or changes how it is being stopped.
    pub(super) fn kill(&mut self, index: usize, order: KillOrder, message: String) {
        let record = &mut self.records[index];
        let path = record.field_path();
        let name = record.name().to_owned();
        let Some(run) = &mut record.run else { return };
        let is_first = run.kill.is_none();
        run.kill = Some(order);
        if let Some(handles) = self.handles.get_mut(&run.serial) {
            handles.kill.send_replace(Some(order));
            // Stop the startup and liveness probes. Readiness is reported until the container exits.
            handles.probes.retain(|(kind, task)| {
                let keep = *kind == ProbeKind::Readiness;
                if !keep {
                    task.abort();
                }
                keep
            });
        }
        if is_first && run.stage != RunStage::Preparing {
            let message = if message.is_empty() {
                format!("Stopping container {name}")
            } else {
                message
            };
            self.events
                .record(Some(path), EventType::Normal, "Killing", message);
        }
    }
}
