//! A command that succeeds.

use std::time::Duration;

use k8s_openapi::api::core::v1::{EnvVar, ExecAction};

use super::{Outcome, Subject};
use crate::life::go_duration;
use crate::seams::Runtime;

/// Asks once.
pub async fn check<R: Runtime>(
    runtime: &R,
    subject: &Subject,
    action: &ExecAction,
    limit: Duration,
) -> Outcome {
    let env = subject.container.env.as_deref().unwrap_or_default();
    let command: Vec<String> = action
        .command
        .iter()
        .flatten()
        .map(|word| expand(word, env))
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

/// Puts the values of the spec's own variables in; what has no plain value there is empty, what isn't there stays.
fn expand(word: &str, env: &[EnvVar]) -> String {
    let mut result = String::with_capacity(word.len());
    let mut rest = word;
    while let Some(place) = rest.find('$') {
        result.push_str(&rest[..place]);
        rest = &rest[place + 1..];
        if let Some(after) = rest.strip_prefix('$') {
            result.push('$');
            rest = after;
        } else if let Some((name, after)) =
            rest.strip_prefix('(').and_then(|rest| rest.split_once(')'))
        {
            match env.iter().rev().find(|variable| variable.name == name) {
                Some(variable) => result.push_str(variable.value.as_deref().unwrap_or_default()),
                None => {
                    result.push_str("$(");
                    result.push_str(name);
                    result.push(')');
                }
            }
            rest = after;
        } else {
            result.push('$');
        }
    }
    result.push_str(rest);
    result
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
            assert_eq!(expand(word, &env), want);
        }
    }
}
