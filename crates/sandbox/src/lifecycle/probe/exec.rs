//! Exec probes.

use std::collections::HashMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{EnvVar, ExecAction};
use pod_protocol::go_duration;

use super::{ProbeResult, ProbedContainer};
use crate::container_runtime::ContainerRuntime;
use crate::runtime::expand;

/// Runs the command; succeeds if its exit code is 0.
pub async fn probe<R: ContainerRuntime>(
    runtime: &R,
    container: &ProbedContainer,
    action: &ExecAction,
    limit: Duration,
) -> ProbeResult {
    let variables = plain_variables(container.spec.env.as_deref().unwrap_or_default());
    let command: Vec<String> = action
        .command
        .iter()
        .flatten()
        .map(|arg| expand(arg, &variables))
        .collect();
    match runtime.exec(&container.id, &command, limit).await {
        Ok(result) => match result.code {
            Some(0) => ProbeResult::Success,
            Some(_) => ProbeResult::Failure(result.output),
            None => ProbeResult::Failure(format!(
                "command timed out: {:?} timed out after {}",
                command.join(" "),
                go_duration(limit)
            )),
        },
        Err(problem) => ProbeResult::Unknown(problem.message),
    }
}

/// The plain values of the spec's variables; others are empty, and the last of a name wins. As upstream.
fn plain_variables(env: &[EnvVar]) -> HashMap<String, String> {
    let value = |variable: &EnvVar| variable.value.clone().unwrap_or_default();
    let all = env
        .iter()
        .map(|variable| (variable.name.clone(), value(variable)));
    all.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_refers_to_plain_variables() {
        let variable = |name: &str, value: Option<&str>| EnvVar {
            name: name.to_owned(),
            value: value.map(str::to_owned),
            ..Default::default()
        };
        let env = [
            variable("A", Some("0")),
            variable("A", Some("1")),
            variable("FROM", None),
            variable("NESTED", Some("$(A)")),
        ];
        for (arg, want) in [
            ("x$(A)y", "x1y"),
            ("$(B)", "$(B)"),
            ("$$(A)", "$(A)"),
            ("$A $", "$A $"),
            ("$(A", "$(A"),
            ("$$$(A)", "$1"),
            ("$$$$(A)", "$$(A)"),
            ("<$(FROM)>", "<>"),
            ("$(NESTED)", "$(A)"),
            ("$(A$(A))", "$(A$(A))"),
            ("$()", "$()"),
            ("echo $$ $HOME", "echo $ $HOME"),
        ] {
            assert_eq!(expand(arg, &plain_variables(&env)), want);
        }
    }
}
