//! Why a container terminated. The sandbox writes it to the container's status, and the kubelet too if it lost the sandbox.

use k8s_openapi::api::core::v1::ContainerStateTerminated;

/// `reason` of a terminated container, as upstream's kubelet and containerd write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TerminationReason {
    /// The exit code is 0.
    Completed,
    /// The exit code is not 0.
    Error,
    /// The kernel killed a process of the container for lack of memory. The exit code can be 0 all the same.
    OomKilled,
    /// The container was created, but its program could not be executed.
    StartError,
    /// The exit was not observed.
    ContainerStatusUnknown,
}

impl TerminationReason {
    /// Its name in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "Completed",
            Self::Error => "Error",
            Self::OomKilled => "OOMKilled",
            Self::StartError => "StartError",
            Self::ContainerStatusUnknown => "ContainerStatusUnknown",
        }
    }

    /// Whether this is the reason of a terminated container.
    pub fn is_of(self, state: &ContainerStateTerminated) -> bool {
        state.reason.as_deref() == Some(self.as_str())
    }
}

/// The state of a container whose exit was not observed, with upstream's exit code.
pub fn unknown_termination(message: &str) -> ContainerStateTerminated {
    ContainerStateTerminated {
        exit_code: 137,
        reason: Some(
            TerminationReason::ContainerStatusUnknown
                .as_str()
                .to_owned(),
        ),
        message: Some(message.to_owned()),
        ..Default::default()
    }
}

/// The state of a container that its pod has lost when it ended.
pub fn lost_container() -> ContainerStateTerminated {
    unknown_termination("The container could not be located when the pod was terminated")
}
