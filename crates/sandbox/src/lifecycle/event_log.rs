//! The pod's recent Events.

use std::collections::VecDeque;

use k8s_openapi::jiff::{SignedDuration, Timestamp};

use pod_protocol::PodEvent;

/// Number of events that are kept, for a kubelet that connects later.
const MAX_EVENTS: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventType {
    Normal,
    Warning,
}

/// The pod's events, numbered.
#[derive(Debug, Default)]
pub struct EventLog {
    events: VecDeque<PodEvent>,
    last_serial: u64,
}

impl EventLog {
    /// Records an event, about a container if `field_path` names one.
    pub fn record(
        &mut self,
        field_path: Option<String>,
        event_type: EventType,
        reason: &str,
        message: impl Into<String>,
    ) {
        self.last_serial += 1;
        let now = Timestamp::now();
        let after = |last: &PodEvent| last.at.checked_add(SignedDuration::from_nanos(1));
        let earliest = self.events.back().and_then(|last| after(last).ok());
        if self.events.len() == MAX_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(PodEvent {
            serial: self.last_serial,
            at: earliest.map_or(now, |earliest| earliest.max(now)),
            warning: event_type == EventType::Warning,
            reason: reason.to_owned(),
            message: message.into(),
            field_path,
        });
    }

    /// All kept events, oldest first.
    pub fn events(&self) -> Vec<PodEvent> {
        self.events.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_events_have_later_times() {
        let mut log = EventLog::default();
        for _ in 0..MAX_EVENTS * 2 {
            log.record(None, EventType::Normal, "Started", "Started container");
        }
        let events = log.events();
        assert_eq!(events.len(), MAX_EVENTS);
        assert!(events.is_sorted_by(|a, b| a.at < b.at && a.serial < b.serial));
    }
}
