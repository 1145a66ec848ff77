//! What happened lately.

use std::collections::VecDeque;

use crate::protocol::PodEvent;

/// So many are kept for a kubelet that is away.
const KEPT: usize = 64;

/// The pod's events, numbered.
#[derive(Debug, Default)]
pub struct Journal {
    events: VecDeque<PodEvent>,
    serial: u64,
}

impl Journal {
    /// Notes something, about a container if `field_path` names one.
    pub fn note(
        &mut self,
        field_path: Option<String>,
        warning: bool,
        reason: &str,
        message: impl Into<String>,
    ) {
        self.serial += 1;
        if self.events.len() == KEPT {
            self.events.pop_front();
        }
        self.events.push_back(PodEvent {
            serial: self.serial,
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
