//! Restart policies and restart rules.

use k8s_openapi::api::core::v1::Container;

/// The restart policy of a pod or container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RestartPolicy {
    #[default]
    Always,
    OnFailure,
    Never,
}

impl RestartPolicy {
    /// Parses the policy of a pod. Unknown or missing is `Always`, the API's default.
    pub fn of_pod(word: Option<&str>) -> Self {
        Self::parse(word).unwrap_or_default()
    }

    fn parse(word: Option<&str>) -> Option<Self> {
        match word? {
            "Always" => Some(Self::Always),
            "OnFailure" => Some(Self::OnFailure),
            "Never" => Some(Self::Never),
            _ => None,
        }
    }

    fn after(self, exit_code: i32) -> bool {
        match self {
            Self::Always => true,
            Self::OnFailure => exit_code != 0,
            Self::Never => false,
        }
    }
}

/// The container's own policy if it has one, else the pod's.
pub fn policy(container: &Container, pod: RestartPolicy) -> RestartPolicy {
    RestartPolicy::parse(container.restart_policy.as_deref()).unwrap_or(pod)
}

/// Whether a container is restarted after it exited with this code.
pub fn wanted(container: &Container, pod: RestartPolicy, exit_code: i32) -> bool {
    if container.restart_policy.is_some()
        && matches!(
            rule(container, exit_code),
            Some("Restart" | "RestartAllContainers")
        )
    {
        return true;
    }
    policy(container, pod).after(exit_code)
}

/// Whether a container's exit with this code restarts all containers.
pub fn of_all(container: &Container, exit_code: i32) -> bool {
    rule(container, exit_code) == Some("RestartAllContainers")
}

/// The action of the first matching rule.
fn rule(container: &Container, exit_code: i32) -> Option<&str> {
    container
        .restart_policy_rules
        .iter()
        .flatten()
        .find(|rule| {
            rule.exit_codes.as_ref().is_some_and(|codes| {
                let listed = codes.values.iter().flatten().any(|code| *code == exit_code);
                match codes.operator.as_str() {
                    "In" => listed,
                    "NotIn" => !listed,
                    _ => false,
                }
            })
        })
        .map(|rule| rule.action.as_str())
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
                wanted(&container(spec.clone()), pod, code),
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
        assert!(of_all(&spec, 2));
        assert!(!of_all(&spec, 1));
    }
}
