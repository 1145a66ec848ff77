//! What happened lately.

use std::collections::VecDeque;

use k8s_openapi::jiff::{SignedDuration, Timestamp};

use pod_protocol::PodEvent;

/// So many are kept for a kubelet that is away.
const KEPT: usize = 64;

/// The pod's events, numbered.
#[derive(Debug, Default)]
pub struct EventLog {
    events: VecDeque<PodEvent>,
    serial: u64,
}

impl EventLog {
    /// Notes something, about a container if `field_path` names one.
    pub fn note(
        &mut self,
        field_path: Option<String>,
        warning: bool,
        reason: &str,
        message: impl Into<String>,
    ) {
        self.serial += 1;
        let now = Timestamp::now();
        let after = |last: &PodEvent| last.at.checked_add(SignedDuration::from_nanos(1));
        let earliest = self.events.back().and_then(|last| after(last).ok());
        if self.events.len() == KEPT {
            self.events.pop_front();
        }
        self.events.push_back(PodEvent {
            serial: self.serial,
            at: earliest.map_or(now, |earliest| earliest.max(now)),
            warning,
            reason: reason.to_owned(),
            message: message.into(),
            field_path,
        });
    }

    /// All that is kept, oldest first.
    pub fn events(&self) -> Vec<PodEvent> {
        self.events.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_events_have_later_times() {
        let mut journal = EventLog::default();
        for _ in 0..KEPT * 2 {
            journal.note(None, false, "Started", "Started container");
        }
        let events = journal.events();
        assert_eq!(events.len(), KEPT);
        assert!(events.is_sorted_by(|a, b| a.at < b.at && a.serial < b.serial));
    }
}
