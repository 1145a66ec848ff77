//! The phase of a pod.

use k8s_openapi::api::core::v1::PodStatus;

/// `status.phase` of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodPhase {
    /// Not all init containers have completed, or no container was started yet.
    Pending,
    /// At least one container runs or will be restarted.
    Running,
    /// All containers have succeeded, and none will be restarted.
    Succeeded,
    /// All containers have terminated, and one has failed.
    Failed,
    /// No longer set by upstream's kubelet.
    Unknown,
}

impl PodPhase {
    /// `Pending` without a phase.
    pub fn of(status: Option<&PodStatus>) -> Self {
        match status.and_then(|status| status.phase.as_deref()) {
            Some("Running") => Self::Running,
            Some("Succeeded") => Self::Succeeded,
            Some("Failed") => Self::Failed,
            Some("Unknown") => Self::Unknown,
            _ => Self::Pending,
        }
    }

    /// Its name in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Running => "Running",
            Self::Succeeded => "Succeeded",
            Self::Failed => "Failed",
            Self::Unknown => "Unknown",
        }
    }

    /// Whether a pod never leaves this phase.
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }
}
