//! Starts probes and applies their results.

use tokio::time::Instant;

use super::super::DriverMessage;
use super::super::clock::instant_of;
use super::super::container_record::{ContainerType, RunStage};
use super::super::event_log::EventType;
use super::LifecycleDriver;
use crate::container_runtime::ContainerRuntime;
use crate::lifecycle::probe::ProbedContainer;
use crate::lifecycle::probe::worker::{self, ProbeEvent, ProbeKind};

impl<R: ContainerRuntime> LifecycleDriver<R> {
    pub(super) fn apply_probe_event(&mut self, serial: u64, kind: ProbeKind, event: ProbeEvent) {
        let Some(index) = self.index_of(serial) else {
            return;
        };
        let record = &mut self.records[index];
        let path = record.field_path();
        let Some(run) = &mut record.run else { return };
        match (kind, event) {
            (_, ProbeEvent::Warning(reason, message)) => {
                self.events
                    .record(Some(path), EventType::Warning, reason, message);
            }
            // The container is being killed already.
            (ProbeKind::Startup | ProbeKind::Liveness, _) if run.kill.is_some() => {}
            (ProbeKind::Startup, ProbeEvent::ThresholdReached(success)) => {
                run.startup_succeeded = Some(success);
                if success {
                    self.start_liveness_and_readiness(index);
                }
            }
            (ProbeKind::Liveness, ProbeEvent::ThresholdReached(success)) => {
                run.liveness_failed = !success
            }
            (ProbeKind::Readiness, ProbeEvent::ThresholdReached(success)) => run.ready = success,
        }
    }

    /// Starts to probe a running container: first with its startup probe, if it has one.
    pub(super) fn start_probing(&mut self, index: usize) {
        let record = &self.records[index];
        if matches!(
            record.container_type,
            ContainerType::Init | ContainerType::Ephemeral
        ) {
            return;
        }
        if record.spec.startup_probe.is_some() {
            self.start_probe(index, ProbeKind::Startup);
        } else {
            self.start_liveness_and_readiness(index);
        }
    }

    /// Starts the probes that wait for the startup probe.
    fn start_liveness_and_readiness(&mut self, index: usize) {
        self.start_probe(index, ProbeKind::Liveness);
        self.start_probe(index, ProbeKind::Readiness);
    }

    fn start_probe(&mut self, index: usize, kind: ProbeKind) {
        let record = &self.records[index];
        let spec = match kind {
            ProbeKind::Startup => &record.spec.startup_probe,
            ProbeKind::Liveness => &record.spec.liveness_probe,
            ProbeKind::Readiness => &record.spec.readiness_probe,
        };
        let (Some(probe), Some(run), Some(id)) = (spec.clone(), &record.run, &record.id) else {
            return;
        };
        if run.kill.is_some() {
            return;
        }
        let container = ProbedContainer {
            spec: record.spec.clone(),
            id: id.clone(),
            ip: self.network.ips.first().copied(),
        };
        let serial = run.serial;
        let since = match run.stage {
            RunStage::PostStart { started_at } | RunStage::Running { started_at } => {
                instant_of(started_at)
            }
            RunStage::Preparing => Instant::now(),
        };
        let messages = self.messages.clone();
        let send = move |event| {
            let _ = messages.send(DriverMessage::ProbeEvent {
                serial,
                kind,
                event,
            });
        };
        let work = worker::run(self.runtime.clone(), kind, container, probe, since, send);
        let task = tokio::task::spawn_local(work).abort_handle();
        if let Some(handles) = self.handles.get_mut(&serial) {
            handles.probes.push((kind, task));
        } else {
            task.abort();
        }
    }
}
