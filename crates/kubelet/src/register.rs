//! Becoming a Node: one POST when all is new, a take-over when a Node of this name is already there.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Node;
use kube::api::PostParams;
use kube::{Api, Client};

use crate::KubeletError;
use crate::api::{CallError, call};
use crate::backoff::startup_wait;
use crate::node::adopt;

/// How long "forbidden" is taken for an API server that is not done starting: it answers before its authorizers know
/// everything.
const REFUSAL_PATIENCE: Duration = Duration::from_secs(5);

/// How often a node that can't get through says so.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(5);

/// What an answer means for registration.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// A Node of this name is there.
    Exists,
    /// Nobody is there yet, or something passes: ask again.
    Later,
    /// No; final once it has been no for a while.
    Refused,
    /// The object is wrong and will stay wrong.
    Invalid,
}

/// Registers the Node that `desired` makes and returns it as the server has it.
pub(crate) async fn register(
    client: &Client,
    desired: impl Fn() -> Node,
) -> Result<Node, KubeletError> {
    let nodes: Api<Node> = Api::all(client.clone());
    let started = Instant::now();
    let mut refused_since = None;
    let mut complain_at = COMPLAINT_INTERVAL;
    loop {
        let node = desired();
        let name = node.metadata.name.clone().unwrap_or_default();
        let error = match attempt(&nodes, &name, node).await {
            Ok(node) => return Ok(node),
            Err(error) => error,
        };

        match verdict(&error) {
            Verdict::Invalid => {
                return Err(KubeletError::Invalid {
                    node: name,
                    source: error,
                });
            }
            Verdict::Refused => {
                let since = *refused_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= REFUSAL_PATIENCE {
                    return Err(KubeletError::Refused {
                        node: name,
                        source: error,
                    });
                }
            }
            Verdict::Exists | Verdict::Later => refused_since = None,
        }
        if started.elapsed() >= complain_at {
            complain_at = started.elapsed() + COMPLAINT_INTERVAL;
            tracing::warn!(
                node = name,
                error = &error as &dyn std::error::Error,
                "still trying to register the node"
            );
        }

        tokio::time::sleep(startup_wait(started.elapsed())).await;
    }
}

/// Creates the Node, status included: the API server takes a Node's status on creation, so it is Ready at once.
async fn attempt(nodes: &Api<Node>, name: &str, node: Node) -> Result<Node, CallError> {
    match call(nodes.create(&PostParams::default(), &node)).await {
        Err(error) if verdict(&error) == Verdict::Exists => {}
        created => return created,
    }
    tracing::info!(
        node = name,
        "a Node of this name exists already: taking it over"
    );
    let existing = call(nodes.get(name)).await?;
    // A conflict (409) here is somebody else's write in between; the next attempt starts from their version.
    call(nodes.replace_status(name, &PostParams::default(), &adopt(existing, node))).await
}

fn verdict(error: &CallError) -> Verdict {
    match error.code() {
        Some(409) => Verdict::Exists,
        Some(401 | 403) => Verdict::Refused,
        Some(400 | 422) => Verdict::Invalid,
        _ => Verdict::Later,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_understood() {
        let answer = |code| {
            verdict(&CallError::Answer {
                code,
                message: String::new(),
            })
        };
        assert_eq!(answer(409), Verdict::Exists);
        assert_eq!(answer(403), Verdict::Refused);
        assert_eq!(answer(401), Verdict::Refused);
        assert_eq!(answer(422), Verdict::Invalid);
        assert_eq!(
            [429, 500, 503, 404].map(answer),
            [const { Verdict::Later }; 4]
        );
        assert_eq!(verdict(&CallError::Timeout), Verdict::Later);
    }
}
