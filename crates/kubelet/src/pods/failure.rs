//! The failures with which a kubelet ends a pod: `status.reason` and `status.message`, as in upstream.

use pod_protocol::Problem;

/// The first words of the message of a pod that is evicted because the node is short of a resource. A pod that is evicted
/// because it exceeds its own limits has another message.
pub(super) const NODE_PRESSURE_PREFIX: &str = "The node was low on resource: ";

/// `status.reason` of a pod that was ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailureReason {
    /// `activeDeadlineSeconds` has passed.
    DeadlineExceeded,
    /// The node is short of a resource, or the pod exceeds a limit of its own.
    Evicted,
    /// The node is shutting down.
    Terminated,
    /// A reason of the sandbox that the kubelet does not interpret.
    Other,
}

impl FailureReason {
    pub(super) fn of(problem: &Problem) -> Self {
        let known = [Self::DeadlineExceeded, Self::Evicted, Self::Terminated];
        let found = known
            .into_iter()
            .find(|reason| reason.as_str() == problem.reason);
        found.unwrap_or(Self::Other)
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::DeadlineExceeded => "DeadlineExceeded",
            Self::Evicted => "Evicted",
            Self::Terminated => "Terminated",
            Self::Other => "Error",
        }
    }

    fn problem(self, message: impl Into<String>) -> Problem {
        Problem {
            reason: self.as_str().to_owned(),
            message: message.into(),
        }
    }
}

/// The failure of a pod that was active for longer than `activeDeadlineSeconds`.
pub(super) fn deadline_exceeded() -> Problem {
    FailureReason::DeadlineExceeded
        .problem("Pod was active on the node longer than the specified deadline")
}

/// The failure of an evicted pod.
pub(super) fn evicted(message: String) -> Problem {
    FailureReason::Evicted.problem(message)
}

/// The failure of a pod that is ended because the node shuts down.
pub(super) fn node_shutdown() -> Problem {
    FailureReason::Terminated.problem("Pod was terminated in response to imminent node shutdown.")
}

/// Whether the node, and not the pod, caused the failure. Such pods get the condition `DisruptionTarget`.
pub(super) fn is_disruption(problem: &Problem) -> bool {
    FailureReason::of(problem) == FailureReason::Terminated
        || problem.message.starts_with(NODE_PRESSURE_PREFIX)
}
