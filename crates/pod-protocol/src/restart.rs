//! Restart policies and restart rules. The kubelet and the sandbox must decide alike: the sandbox restarts containers, and the
//! kubelet derives the pod's phase from whether they will be restarted.

use k8s_openapi::api::core::v1::{Container, ContainerRestartRule};

use crate::SelectorOperator;

/// The reason of a container that waits because a rule restarts all containers of its pod.
pub const RESTARTING_ALL_CONTAINERS: &str = "RestartingAllContainers";

/// The restart policy of a pod or container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RestartPolicy {
    /// After every exit.
    #[default]
    Always,
    /// After an exit with a code other than 0.
    OnFailure,
    /// After no exit.
    Never,
}

impl RestartPolicy {
    /// Parses the policy of a pod. Unknown or missing is `Always`, the API's default.
    pub fn of_pod(policy: Option<&str>) -> Self {
        Self::parse(policy).unwrap_or_default()
    }

    fn parse(policy: Option<&str>) -> Option<Self> {
        match policy? {
            "Always" => Some(Self::Always),
            "OnFailure" => Some(Self::OnFailure),
            "Never" => Some(Self::Never),
            _ => None,
        }
    }

    fn restarts_after(self, exit_code: i32) -> bool {
        match self {
            Self::Always => true,
            Self::OnFailure => exit_code != 0,
            Self::Never => false,
        }
    }
}

/// The action of a container's restart rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RestartRuleAction {
    Restart,
    RestartAllContainers,
}

impl RestartRuleAction {
    fn of(rule: &ContainerRestartRule) -> Option<Self> {
        match rule.action.as_str() {
            "Restart" => Some(Self::Restart),
            "RestartAllContainers" => Some(Self::RestartAllContainers),
            _ => None,
        }
    }
}

/// Whether an init container is a sidecar: a restartable init container.
pub fn is_sidecar(init_container: &Container) -> bool {
    RestartPolicy::parse(init_container.restart_policy.as_deref()) == Some(RestartPolicy::Always)
}

/// The container's own policy if it has one, else the pod's.
pub fn effective_policy(container: &Container, pod_policy: RestartPolicy) -> RestartPolicy {
    RestartPolicy::parse(container.restart_policy.as_deref()).unwrap_or(pod_policy)
}

/// Whether a container is restarted after it exited with this code.
pub fn should_restart(container: &Container, pod_policy: RestartPolicy, exit_code: i32) -> bool {
    if container.restart_policy.is_some() && rule_action(container, exit_code).is_some() {
        return true;
    }
    effective_policy(container, pod_policy).restarts_after(exit_code)
}

/// Whether a container's exit with this code restarts all containers.
pub fn restarts_all(container: &Container, exit_code: i32) -> bool {
    rule_action(container, exit_code) == Some(RestartRuleAction::RestartAllContainers)
}

/// Whether some exit code of a container restarts all containers.
pub fn may_restart_all(container: &Container) -> bool {
    let mut rules = container.restart_policy_rules.iter().flatten();
    rules.any(|rule| RestartRuleAction::of(rule) == Some(RestartRuleAction::RestartAllContainers))
}

/// The action of the first matching rule.
fn rule_action(container: &Container, exit_code: i32) -> Option<RestartRuleAction> {
    let mut rules = container.restart_policy_rules.iter().flatten();
    rules
        .find(|rule| {
            rule.exit_codes.as_ref().is_some_and(|codes| {
                let listed = codes.values.iter().flatten().any(|code| *code == exit_code);
                match SelectorOperator::parse(&codes.operator) {
                    Some(SelectorOperator::In) => listed,
                    Some(SelectorOperator::NotIn) => !listed,
                    _ => false,
                }
            })
        })
        .and_then(RestartRuleAction::of)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{from_value, json};

    fn container(value: serde_json::Value) -> Container {
        let mut container: Container = from_value(value).expect("a container");
        container.name = "c".to_owned();
        container
    }

    #[test]
    fn restart_follows_policies_and_rules() {
        use RestartPolicy::{Always, Never, OnFailure};
        let plain = json!({"name": "c"});
        let never = json!({"name": "c", "restartPolicy": "Never"});
        let rules = json!({"name": "c", "restartPolicy": "Never", "restartPolicyRules":
            [{"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}]});
        for (spec, pod, code, want) in [
            (&plain, Always, 0, true),
            (&plain, OnFailure, 0, false),
            (&plain, OnFailure, 1, true),
            (&plain, Never, 1, false),
            (&never, Always, 1, false),
            (&rules, Always, 42, true),
            (&rules, Always, 41, false),
        ] {
            assert_eq!(
                should_restart(&container(spec.clone()), pod, code),
                want,
                "{spec} {pod:?} {code}"
            );
        }
    }

    #[test]
    fn not_in_rule_restarts_all_containers() {
        let spec = container(
            json!({"name": "c", "restartPolicy": "Never", "restartPolicyRules": [
            {"action": "RestartAllContainers", "exitCodes": {"operator": "NotIn", "values": [0, 1]}}]}),
        );
        assert!(restarts_all(&spec, 2));
        assert!(!restarts_all(&spec, 1));
    }
}
