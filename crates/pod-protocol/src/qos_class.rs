//! The quality of service class of a pod.

use k8s_openapi::api::core::v1::Pod;

/// `status.qosClass` of a pod, which the API server sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QosClass {
    /// No container has requests or limits.
    BestEffort,
    /// Some container has requests or limits, but the pod is not guaranteed.
    Burstable,
    /// All containers have limits of CPU and memory, equal to their requests.
    Guaranteed,
}

impl QosClass {
    /// `None` if the pod has no class or an unknown one.
    pub fn of(pod: &Pod) -> Option<Self> {
        match pod.status.as_ref()?.qos_class.as_deref()? {
            "BestEffort" => Some(Self::BestEffort),
            "Burstable" => Some(Self::Burstable),
            "Guaranteed" => Some(Self::Guaranteed),
            _ => None,
        }
    }
}
