//! What a pod's spec says, in the questions that a kubelet asks of it.

use k8s_openapi::api::core::v1::{Container, ContainerRestartRuleOnExitCodes, Pod, PodSpec};

use super::launch::LAUNCHER_ANNOTATION;

/// No pod is killed without a moment to react, as upstream.
const LEAST_GRACE: i64 = 1;
/// Longer is for ever. The API server lets any number pass, and no clock goes as far as the largest.
const MOST_GRACE: i64 = 365 * 86_400;
/// What the API server fills in for pods that don't say.
const DEFAULT_GRACE: i64 = 30;

pub(crate) fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

pub(crate) fn namespace(pod: &Pod) -> &str {
    pod.metadata.namespace.as_deref().unwrap_or_default()
}

pub(crate) fn uid(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or_default()
}

/// The pod as people name it.
pub(crate) fn full_name(pod: &Pod) -> String {
    format!("{}/{}", namespace(pod), name(pod))
}

pub(crate) fn phase(pod: &Pod) -> &str {
    pod.status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or_default()
}

/// A phase that a pod never leaves.
pub(crate) fn is_final(phase: &str) -> bool {
    matches!(phase, "Succeeded" | "Failed")
}

pub(crate) fn is_to_be_deleted(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

/// One without which the cluster is none.
pub(crate) fn is_critical(pod: &Pod) -> bool {
    const SYSTEM: i32 = 2_000_000_000;
    let spec = pod.spec.as_ref();
    spec.and_then(|spec| spec.priority)
        .is_some_and(|priority| priority >= SYSTEM)
}

pub(crate) fn uses_host_network(pod: &Pod) -> bool {
    pod.spec
        .as_ref()
        .and_then(|spec| spec.host_network)
        .unwrap_or(false)
}

/// Whether a volume of this name is an emptyDir on disk: gone with the pod, and counted as written by it.
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

/// How the pod wants to be started, in its own words.
pub(crate) fn launcher(pod: &Pod) -> Option<&str> {
    let annotations = pod.metadata.annotations.as_ref()?;
    annotations.get(LAUNCHER_ANNOTATION).map(String::as_str)
}

/// Containers that run before the others: init containers and native sidecars.
pub(crate) fn init_containers(spec: &PodSpec) -> &[Container] {
    spec.init_containers.as_deref().unwrap_or_default()
}

/// A native sidecar: an init container that stays.
pub(crate) fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

/// Seconds between being asked to end and being killed: the API server's word when the pod is deleted, else the spec's.
pub(crate) fn grace_seconds(pod: &Pod) -> i64 {
    let asked = pod.metadata.deletion_grace_period_seconds;
    let spec = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.termination_grace_period_seconds);
    asked
        .or(spec)
        .unwrap_or(DEFAULT_GRACE)
        .clamp(LEAST_GRACE, MOST_GRACE)
}

/// Whether a container that ended with `exit_code` is to run again: its rules, else its own policy, else the pod's.
pub(crate) fn restarts(container: &Container, spec: &PodSpec, exit_code: i32) -> bool {
    let by = |policy: &str| match policy {
        "OnFailure" => exit_code != 0,
        "Never" => false,
        _ => true,
    };
    match container.restart_policy.as_deref() {
        // Rules are allowed only beside a policy of the container's own.
        Some(own) => rule_restarts(container, exit_code) || by(own),
        None => by(spec.restart_policy.as_deref().unwrap_or("Always")),
    }
}

/// Whether the end of a container with this code makes all containers of the pod start over.
pub(super) fn restarts_all(container: &Container, exit_code: i32) -> bool {
    rule(container, exit_code) == Some("RestartAllContainers")
}

fn rule_restarts(container: &Container, exit_code: i32) -> bool {
    rule(container, exit_code).is_some()
}

/// The action of the first rule that fits; each restarts something.
fn rule(container: &Container, exit_code: i32) -> Option<&str> {
    let rules = container.restart_policy_rules.as_deref();
    let fits = |codes: &ContainerRestartRuleOnExitCodes| {
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
        .find(|rule| rule.exit_codes.as_ref().is_some_and(fits))
        .map(|rule| rule.action.as_str())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ContainerRestartRule;

    use super::*;

    #[test]
    fn restarts_follow_rules_then_the_container_then_the_pod() {
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
    fn grace_is_the_api_servers_then_the_specs_and_never_nothing() {
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
