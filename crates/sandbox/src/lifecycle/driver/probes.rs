//! Which probes run, and what they tell.

use tokio::time::Instant;

use super::super::Message;
use super::super::clock::instant_of;
use super::super::container_record::{ContainerType, RunStage};
use super::Driver;
use crate::probe::ProbedContainer;
use crate::probe::worker::{self, ProbeEvent, ProbeKind};
use crate::container_runtime::ContainerRuntime;

impl<R: ContainerRuntime> Driver<R> {
    pub(super) fn note_probe(&mut self, serial: u64, which: ProbeKind, word: ProbeEvent) {
        let Some(index) = self.index_of(serial) else {
            return;
        };
        let record = &mut self.records[index];
        let path = record.field_path();
        let Some(run) = &mut record.run else { return };
        match (which, word) {
            (_, ProbeEvent::Warning(reason, message)) => {
                self.events.record(Some(path), true, reason, message);
            }
            // Too late to matter.
            (ProbeKind::Startup | ProbeKind::Liveness, _) if run.kill.is_some() => {}
            (ProbeKind::Startup, ProbeEvent::ThresholdReached(well)) => {
                run.startup = Some(well);
                if well {
                    self.probe_on(index);
                }
            }
            (ProbeKind::Liveness, ProbeEvent::ThresholdReached(well)) => run.liveness_failed = !well,
            (ProbeKind::Readiness, ProbeEvent::ThresholdReached(well)) => run.ready = well,
        }
    }

    /// Begins to ask a container that has just come up.
    pub(super) fn probe_first(&mut self, index: usize) {
        let record = &self.records[index];
        if matches!(record.kind, ContainerType::Init | ContainerType::Ephemeral) {
            return;
        }
        if record.spec.startup_probe.is_some() {
            self.probe(index, ProbeKind::Startup);
        } else {
            self.probe_on(index);
        }
    }

    /// The container is up: what is asked from now on.
    fn probe_on(&mut self, index: usize) {
        self.probe(index, ProbeKind::Liveness);
        self.probe(index, ProbeKind::Readiness);
    }

    fn probe(&mut self, index: usize, which: ProbeKind) {
        let record = &self.records[index];
        let spec = match which {
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
            RunStage::Hook { at } | RunStage::Running { at } => instant_of(at),
            RunStage::Preparing => Instant::now(),
        };
        let messages = self.messages.clone();
        let tell = move |word| {
            let _ = messages.send(Message::Probe {
                serial,
                which,
                word,
            });
        };
        let work = worker::run(self.runtime.clone(), which, container, probe, since, tell);
        let task = tokio::task::spawn_local(work).abort_handle();
        if let Some(handles) = self.handles.get_mut(&serial) {
            handles.probes.push((which, task));
        } else {
            task.abort();
        }
    }
}
