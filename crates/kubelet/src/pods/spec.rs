//! Accessors of pods and their specs.

use k8s_openapi::api::core::v1::{
    Container, ContainerRestartRule, ContainerRestartRuleOnExitCodes, Pod, PodSpec, PodStatus,
};

use super::launcher::LAUNCHER_ANNOTATION;

/// As in upstream, every pod has at least one second between SIGTERM and SIGKILL.
const MIN_GRACE_SECONDS: i64 = 1;
/// The API server accepts any number, but adding the largest ones to a clock would overflow.
const MAX_GRACE_SECONDS: i64 = 365 * 86_400;
/// The API server's default.
const DEFAULT_GRACE_SECONDS: i64 = 30;

/// `status.phase` of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PodPhase {
    Pending,
    Running,
    Succeeded,
    Failed,
    Unknown,
}

impl PodPhase {
    pub(crate) fn of(status: Option<&PodStatus>) -> Self {
        match status.and_then(|status| status.phase.as_deref()) {
            Some("Running") => Self::Running,
            Some("Succeeded") => Self::Succeeded,
            Some("Failed") => Self::Failed,
            Some("Unknown") => Self::Unknown,
            _ => Self::Pending,
        }
    }

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Running => "Running",
            Self::Succeeded => "Succeeded",
            Self::Failed => "Failed",
            Self::Unknown => "Unknown",
        }
    }

    /// Whether a pod never leaves this phase.
    pub(crate) fn is_terminal(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }
}

/// A container's effective restart policy.
#[derive(Clone, Copy)]
enum ContainerRestartPolicy {
    Always,
    OnFailure,
    Never,
}

impl ContainerRestartPolicy {
    fn parse(policy: Option<&str>) -> Self {
        match policy {
            Some("OnFailure") => Self::OnFailure,
            Some("Never") => Self::Never,
            _ => Self::Always,
        }
    }

    fn restarts(self, exit_code: i32) -> bool {
        match self {
            Self::Always => true,
            Self::OnFailure => exit_code != 0,
            Self::Never => false,
        }
    }
}

/// The action of a rule in `restartPolicyRules`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RestartRuleAction {
    Restart,
    RestartAllContainers,
}

impl RestartRuleAction {
    pub(super) fn of(rule: &ContainerRestartRule) -> Self {
        match rule.action.as_str() {
            "RestartAllContainers" => Self::RestartAllContainers,
            _ => Self::Restart,
        }
    }
}

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

/// Whether an init container is a sidecar, which keeps running.
pub(crate) fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
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

/// Whether a container that exited with `exit_code` is restarted: by its rules, else by its own policy, else by the pod's.
pub(crate) fn restarts(container: &Container, spec: &PodSpec, exit_code: i32) -> bool {
    let own = container.restart_policy.as_deref();
    // A container has rules only if it also has a policy of its own.
    if own.is_some() && matching_rule(container, exit_code).is_some() {
        return true;
    }
    let policy = own.or(spec.restart_policy.as_deref());
    ContainerRestartPolicy::parse(policy).restarts(exit_code)
}

/// Whether all containers of the pod are restarted after a container exited with `exit_code`.
pub(super) fn restarts_all(container: &Container, exit_code: i32) -> bool {
    matching_rule(container, exit_code) == Some(RestartRuleAction::RestartAllContainers)
}

/// The action of the first rule that matches.
fn matching_rule(container: &Container, exit_code: i32) -> Option<RestartRuleAction> {
    let rules = container.restart_policy_rules.as_deref();
    let matches = |codes: &ContainerRestartRuleOnExitCodes| {
        let listed = codes.values.iter().flatten().any(|code| *code == exit_code);
        match codes.operator.as_str() {
            "In" => listed,
            "NotIn" => !listed,
            _ => false,
        }
    };
    rules
        .unwrap_or_default()
        .iter()
        .find(|rule| rule.exit_codes.as_ref().is_some_and(matches))
        .map(RestartRuleAction::of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_override_container_policy_which_overrides_pod_policy() {
        let spec = |policy: &str| PodSpec {
            restart_policy: Some(policy.to_owned()),
            ..Default::default()
        };
        let plain = Container::default();
        assert!(restarts(&plain, &spec("Always"), 0));
        assert!(restarts(&plain, &spec("OnFailure"), 1));
        assert!(!restarts(&plain, &spec("OnFailure"), 0));
        assert!(!restarts(&plain, &spec("Never"), 1));

        let own = Container {
            restart_policy: Some("Never".to_owned()),
            restart_policy_rules: Some(vec![ContainerRestartRule {
                action: "Restart".to_owned(),
                exit_codes: Some(ContainerRestartRuleOnExitCodes {
                    operator: "In".to_owned(),
                    values: Some(vec![42]),
                }),
            }]),
            ..Default::default()
        };
        assert!(restarts(&own, &spec("Always"), 42));
        assert!(!restarts(&own, &spec("Always"), 1));
    }

    #[test]
    fn deletion_overrides_spec_grace_and_minimum_is_one_second() {
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
