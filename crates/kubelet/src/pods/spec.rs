//! Accessors of pods and their specs.

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};
pub(crate) use kubelet_api::PodPhase;
use pod_protocol::restart::{self, RestartPolicy};

use super::launcher::LAUNCHER_ANNOTATION;

/// As in upstream, every pod has at least one second between SIGTERM and SIGKILL.
const MIN_GRACE_SECONDS: i64 = 1;
/// The API server accepts any number, but adding the largest ones to an instant would overflow.
const MAX_GRACE_SECONDS: i64 = 365 * 86_400;
/// The default of `terminationGracePeriodSeconds`.
const DEFAULT_GRACE_SECONDS: i64 = 30;

pub(crate) fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

pub(crate) fn namespace(pod: &Pod) -> &str {
    pod.metadata.namespace.as_deref().unwrap_or_default()
}

pub(crate) fn uid(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or_default()
}

/// `NAMESPACE/NAME`.
pub(crate) fn full_name(pod: &Pod) -> String {
    format!("{}/{}", namespace(pod), name(pod))
}

pub(crate) fn phase(pod: &Pod) -> PodPhase {
    PodPhase::of(pod.status.as_ref())
}

pub(crate) fn is_being_deleted(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

/// Whether a pod is critical: it has the priority of a system pod.
pub(crate) fn is_critical(pod: &Pod) -> bool {
    const SYSTEM_PRIORITY: i32 = 2_000_000_000;
    let spec = pod.spec.as_ref();
    spec.and_then(|spec| spec.priority)
        .is_some_and(|priority| priority >= SYSTEM_PRIORITY)
}

pub(crate) fn uses_host_network(pod: &Pod) -> bool {
    pod.spec
        .as_ref()
        .and_then(|spec| spec.host_network)
        .unwrap_or(false)
}

/// Whether a volume is an emptyDir on disk. Such volumes count as the pod's ephemeral storage.
pub(crate) fn is_on_disk(pod: &Pod, volume: &str) -> bool {
    let spec = pod.spec.as_ref();
    let mut volumes = spec
        .and_then(|spec| spec.volumes.as_ref())
        .into_iter()
        .flatten();
    volumes
        .find(|own| own.name == volume)
        .and_then(|own| own.empty_dir.as_ref())
        .is_some_and(|own| own.medium.as_deref() != Some("Memory"))
}

/// The value of the launcher annotation.
pub(crate) fn launcher_annotation(pod: &Pod) -> Option<&str> {
    let annotations = pod.metadata.annotations.as_ref()?;
    annotations.get(LAUNCHER_ANNOTATION).map(String::as_str)
}

/// Init containers, including sidecars.
pub(crate) fn init_containers(spec: &PodSpec) -> &[Container] {
    spec.init_containers.as_deref().unwrap_or_default()
}

/// The grace period: that of the deletion if the pod is being deleted, else that of the spec.
pub(crate) fn grace_seconds(pod: &Pod) -> i64 {
    let deletion = pod.metadata.deletion_grace_period_seconds;
    let spec = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.termination_grace_period_seconds);
    deletion
        .or(spec)
        .unwrap_or(DEFAULT_GRACE_SECONDS)
        .clamp(MIN_GRACE_SECONDS, MAX_GRACE_SECONDS)
}

/// Whether a container that exited with `exit_code` is restarted.
pub(crate) fn restarts(container: &Container, spec: &PodSpec, exit_code: i32) -> bool {
    let policy = RestartPolicy::of_pod(spec.restart_policy.as_deref());
    restart::should_restart(container, policy, exit_code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deletion_overrides_grace_period_down_to_one_second() {
        let mut pod = Pod::default();
        assert_eq!(grace_seconds(&pod), 30);
        pod.spec = Some(PodSpec {
            termination_grace_period_seconds: Some(5),
            ..Default::default()
        });
        assert_eq!(grace_seconds(&pod), 5);
        pod.metadata.deletion_grace_period_seconds = Some(0);
        assert_eq!(grace_seconds(&pod), 1);
    }
}
