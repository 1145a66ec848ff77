//! Starts probes and applies their results.

use tokio::time::Instant;

use super::super::Message;
use super::super::clock::instant_of;
use super::super::record::{Kind, Stage};
use super::Driver;
use crate::probe::ProbedContainer;
use crate::probe::worker::{self, ProbeEvent, ProbeKind};
use crate::seams::Runtime;

impl<R: Runtime> Driver<R> {
    pub(super) fn note_probe(&mut self, serial: u64, which: ProbeKind, word: ProbeEvent) {
        let Some(index) = self.index_of(serial) else {
            return;
        };
        let record = &mut self.records[index];
        let path = record.field_path();
        let Some(run) = &mut record.run else { return };
        match (which, word) {
            (_, ProbeEvent::Warning(reason, message)) => {
                self.journal.note(Some(path), true, reason, message);
            }
            // The container is being killed already.
            (ProbeKind::Startup | ProbeKind::Liveness, _) if run.kill.is_some() => {}
            (ProbeKind::Startup, ProbeEvent::ThresholdReached(well)) => {
                run.startup = Some(well);
                if well {
                    self.probe_on(index);
                }
            }
            (ProbeKind::Liveness, ProbeEvent::ThresholdReached(well)) => run.dead = !well,
            (ProbeKind::Readiness, ProbeEvent::ThresholdReached(well)) => run.ready = well,
        }
    }

    /// Starts to probe a running container: first with its startup probe, if it has one.
    pub(super) fn probe_first(&mut self, index: usize) {
        let record = &self.records[index];
        if matches!(record.kind, Kind::Init | Kind::Ephemeral) {
            return;
        }
        if record.spec.startup_probe.is_some() {
            self.probe(index, ProbeKind::Startup);
        } else {
            self.probe_on(index);
        }
    }

    /// Starts the probes that wait for the startup probe.
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
            Stage::Hook { at } | Stage::Running { at } => instant_of(at),
            Stage::Preparing => Instant::now(),
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
