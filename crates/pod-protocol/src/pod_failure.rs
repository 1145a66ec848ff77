//! Why a pod as a whole failed.

use serde::{Deserialize, Serialize};

/// The failure with which a kubelet or a sandbox ends a pod: `status.reason` and `status.message`, as in upstream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodFailure {
    /// What ended the pod.
    pub cause: FailureCause,
    /// `status.message`.
    pub message: String,
}

/// What ended a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureCause {
    /// `activeDeadlineSeconds` has passed.
    DeadlineExceeded,
    /// Slurm ends the job that runs the pod.
    JobEnded,
    /// The node is short of a resource, so the kubelet evicts the pod.
    NodePressure,
    /// The node shuts down.
    NodeShutdown,
    /// The pod exceeds a limit of its own ephemeral storage, so it is evicted.
    StorageLimit,
}

impl PodFailure {
    /// A failure with this cause and message.
    pub fn new(cause: FailureCause, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { cause, message }
    }

    /// The failure of a pod that was active for longer than `activeDeadlineSeconds`.
    pub fn deadline_exceeded() -> Self {
        Self::new(
            FailureCause::DeadlineExceeded,
            "Pod was active on the node longer than the specified deadline",
        )
    }
}

impl FailureCause {
    /// `status.reason`.
    pub fn reason(self) -> &'static str {
        match self {
            Self::DeadlineExceeded => "DeadlineExceeded",
            Self::NodePressure | Self::StorageLimit => "Evicted",
            Self::JobEnded | Self::NodeShutdown => "Terminated",
        }
    }

    /// Whether the pod is evicted, by its kubelet or by its sandbox.
    pub fn is_eviction(self) -> bool {
        matches!(self, Self::NodePressure | Self::StorageLimit)
    }

    /// Whether the node, and not the pod, caused the failure. Such pods get the condition `DisruptionTarget`.
    pub fn is_disruption(self) -> bool {
        match self {
            Self::JobEnded | Self::NodePressure | Self::NodeShutdown => true,
            Self::DeadlineExceeded | Self::StorageLimit => false,
        }
    }
}
