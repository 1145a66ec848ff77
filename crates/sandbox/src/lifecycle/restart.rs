//! Whether a container that has ended is started again.

use k8s_openapi::api::core::v1::Container;

/// `Always`, `OnFailure` or `Never`, of a pod or a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RestartPolicy {
    /// Whatever its exit code was.
    #[default]
    Always,
    /// Only after a failure.
    OnFailure,
    /// Not at all.
    Never,
}

impl RestartPolicy {
    /// From the spec's word; what is unknown or missing is `Always`, the default of the API.
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

/// The container's own policy where it has one, else the pod's.
pub fn policy(container: &Container, pod: RestartPolicy) -> RestartPolicy {
    RestartPolicy::parse(container.restart_policy.as_deref()).unwrap_or(pod)
}

/// Whether a container is started again after it ended with this code.
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

/// Whether the end of this container with this code asks for a restart of all containers.
pub fn of_all(container: &Container, exit_code: i32) -> bool {
    rule(container, exit_code) == Some("RestartAllContainers")
}

/// The action of the first rule that fits.
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
    fn policies() {
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
    fn rules_with_not_in_and_of_all() {
        let spec = container(
            json!({"name": "c", "restartPolicy": "Never", "restartPolicyRules": [
            {"action": "RestartAllContainers", "exitCodes": {"operator": "NotIn", "values": [0, 1]}}]}),
        );
        assert!(of_all(&spec, 2));
        assert!(!of_all(&spec, 1));
    }
}
