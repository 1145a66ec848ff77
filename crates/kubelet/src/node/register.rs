//! Registers the Node: creates it, or adopts an existing one of the same name.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Node;
use kube::api::PostParams;
use kube::{Api, Client};

use super::object::adopt;
use crate::KubeletError;
use crate::api_call::{ApiCallError, call};
use crate::backoff::startup_retry_delay;

/// How long 401 and 403 are retried: a starting API server answers requests before its authorizers are ready.
const FORBIDDEN_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval between warnings while registration fails.
const WARN_INTERVAL: Duration = Duration::from_secs(5);

/// How registration reacts to an error.
#[derive(Debug, PartialEq, Eq)]
enum RegistrationError {
    /// A Node of this name exists.
    AlreadyExists,
    /// The API server is not ready, or the error is temporary.
    Retry,
    /// Final after [`FORBIDDEN_TIMEOUT`].
    Forbidden,
    /// Final: the object is not valid.
    Invalid,
}

/// Registers the Node that `desired` returns. Returns the API server's object.
pub(crate) async fn register(
    client: &Client,
    desired: impl Fn() -> Node,
) -> Result<Node, KubeletError> {
    let nodes: Api<Node> = Api::all(client.clone());
    let started = Instant::now();
    let mut forbidden_since = None;
    let mut warn_at = WARN_INTERVAL;
    loop {
        let node = desired();
        let name = node.metadata.name.clone().unwrap_or_default();
        let error = match attempt(&nodes, &name, node).await {
            Ok(node) => return Ok(node),
            Err(error) => error,
        };

        match classify(&error) {
            RegistrationError::Invalid => {
                return Err(KubeletError::InvalidNode {
                    node: name,
                    source: error,
                });
            }
            RegistrationError::Forbidden => {
                let since = *forbidden_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= FORBIDDEN_TIMEOUT {
                    return Err(KubeletError::RegistrationForbidden {
                        node: name,
                        source: error,
                    });
                }
            }
            RegistrationError::AlreadyExists | RegistrationError::Retry => forbidden_since = None,
        }
        if started.elapsed() >= warn_at {
            warn_at = started.elapsed() + WARN_INTERVAL;
            tracing::warn!(
                node = name,
                error = &error as &dyn std::error::Error,
                "cannot register node yet; will retry"
            );
        }

        tokio::time::sleep(startup_retry_delay(started.elapsed())).await;
    }
}

/// Creates the Node with its status, which the API server accepts on creation: the Node is Ready at once.
async fn attempt(nodes: &Api<Node>, name: &str, node: Node) -> Result<Node, ApiCallError> {
    match call(nodes.create(&PostParams::default(), &node)).await {
        Err(error) if classify(&error) == RegistrationError::AlreadyExists => {}
        created => return created,
    }
    tracing::info!(node = name, "adopting the existing Node");
    let existing = call(nodes.get(name)).await?;
    // A conflict (409) here means that another client has changed the Node meanwhile; the next attempt reads it again.
    call(nodes.replace_status(name, &PostParams::default(), &adopt(existing, node))).await
}

fn classify(error: &ApiCallError) -> RegistrationError {
    match error.code() {
        Some(409) => RegistrationError::AlreadyExists,
        Some(401 | 403) => RegistrationError::Forbidden,
        Some(400 | 422) => RegistrationError::Invalid,
        _ => RegistrationError::Retry,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_classified_by_status_code() {
        let classified = |code| {
            classify(&ApiCallError::Status {
                code,
                message: String::new(),
            })
        };
        assert_eq!(classified(409), RegistrationError::AlreadyExists);
        assert_eq!(classified(403), RegistrationError::Forbidden);
        assert_eq!(classified(401), RegistrationError::Forbidden);
        assert_eq!(classified(422), RegistrationError::Invalid);
        assert_eq!(
            [429, 500, 503, 404].map(classified),
            [const { RegistrationError::Retry }; 4]
        );
        assert_eq!(classify(&ApiCallError::Timeout), RegistrationError::Retry);
    }
}
