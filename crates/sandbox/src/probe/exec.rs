//! A command that succeeds.

use std::collections::HashMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{EnvVar, ExecAction};

use super::{Outcome, Subject};
use crate::life::go_duration;
use crate::runtime::expand;
use crate::seams::Runtime;

/// Asks once.
pub async fn check<R: Runtime>(
    runtime: &R,
    subject: &Subject,
    action: &ExecAction,
    limit: Duration,
) -> Outcome {
    let known = known(subject.container.env.as_deref().unwrap_or_default());
    let command: Vec<String> = action
        .command
        .iter()
        .flatten()
        .map(|word| expand(word, &known))
        .collect();
    match runtime.exec(&subject.id, &command, limit).await {
        Ok(result) => match result.code {
            Some(0) => Outcome::Success,
            Some(_) => Outcome::Failure(result.output),
            None => Outcome::Failure(format!(
                "command timed out: {:?} timed out after {}",
                command.join(" "),
                go_duration(limit)
            )),
        },
        Err(problem) => Outcome::Error(problem.message),
    }
}

/// The plain values of the spec's own variables, the last of a name; what has none there is empty.
fn known(env: &[EnvVar]) -> HashMap<String, String> {
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
    fn variables() {
        let variable = |name: &str, value: Option<&str>| EnvVar {
            name: name.to_owned(),
            value: value.map(str::to_owned),
            ..Default::default()
        };
        // What upstream's kubelet makes of a probe's command: only plain values of the spec, the last of a name.
        let env = [
            variable("A", Some("0")),
            variable("A", Some("1")),
            variable("FROM", None),
            variable("NESTED", Some("$(A)")),
        ];
        for (word, want) in [
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
            assert_eq!(expand(word, &known(&env)), want);
        }
    }
}
