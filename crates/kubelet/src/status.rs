//! Keeping the Node's status true: what this machine says of itself, against what the server believes.

use std::sync::Arc;
use std::time::Duration;

use futures::TryStreamExt;
use k8s_openapi::api::core::v1::{Node, NodeCondition};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};

use crate::advertised;
use crate::api::{CallError, call};
use crate::backoff::Doubling;
use crate::conditions::{Readiness, conditions, says};
use crate::node::resources;
use crate::{NodeConfig, Pressures};

/// How often this machine is looked at. Local reads only: the server's side comes by watch.
const LOOK_INTERVAL: Duration = Duration::from_secs(10);
/// How old a heartbeat may get when nothing changes, as upstream.
const REPORT_INTERVAL: Duration = Duration::from_secs(300);
/// How long to be patient at most between attempts while the API server is away.
const RETRY_AT_MOST: Duration = Duration::from_secs(2);

/// Reports this machine's conditions for ever: when one changes here, when somebody (the controller-manager,
/// while we were away) changed one there, and every five minutes.
///
/// `shown` gets the Node whenever it changes, and `present` is told the Node's uid, or `None` while the Node is deleted. Like upstream's kubelet we don't create it
/// again then: somebody wanted it gone, and a restart brings it back.
pub(crate) async fn keep_true(
    client: &Client,
    config: &NodeConfig,
    present: watch::Sender<Option<String>>,
    shown: watch::Sender<Option<Arc<Node>>>,
) {
    let nodes: Api<Node> = Api::all(client.clone());
    let events =
        watcher::watch_object(nodes.clone(), &config.name).backoff(Doubling::up_to(RETRY_AT_MOST));
    tokio::pin!(events);

    let mut look = tokio::time::interval(LOOK_INTERVAL);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut retry = Doubling::up_to(RETRY_AT_MOST);
    let mut retry_at: Option<Instant> = None;
    let mut reported_at = Instant::now();
    let mut pressures = Pressures::read(&config.scratch_dir);
    // What the server says, once we know; `None` is no Node, or no watch yet.
    let mut server: Option<Vec<NodeCondition>> = None;
    let own = resources(&config.capacity);
    // What others have advertised, until it is allocatable.
    let mut advertised: Option<Value> = None;

    loop {
        tokio::select! {
            _ = look.tick() => pressures = Pressures::read(&config.scratch_dir),
            () = tokio::time::sleep_until(retry_at.unwrap_or_else(Instant::now)), if retry_at.is_some() => retry_at = None,
            event = events.try_next() => match event {
                Ok(Some(node)) => {
                    let node = node.map(Arc::new);
                    advertised = node.as_deref().and_then(|node| advertised::patch(node, &own));
                    shown.send_replace(node.clone());
                    server = seen(&config.name, node.as_deref(), &present);
                }
                // The stream of a watcher never ends; its errors it repairs itself.
                Ok(None) => return,
                Err(error) => {
                    tracing::debug!(node = config.name, error = &error as &dyn std::error::Error, "watching the own Node");
                }
            },
        }

        if let Some(patch) = &advertised {
            match patch_status(&nodes, &config.name, patch).await {
                Ok(()) => advertised = None,
                // The next look tries again.
                Err(error) => tracing::warn!(
                    node = config.name,
                    error = &error as &dyn std::error::Error,
                    "could not make allocatable what others advertise"
                ),
            }
        }
        let Some(believed) = &server else { continue };
        let wanted = conditions(pressures, Readiness::Ready, believed, Timestamp::now());
        let due = !says(believed, &wanted) || reported_at.elapsed() >= REPORT_INTERVAL;
        if !due || retry_at.is_some() {
            continue;
        }
        match report(&nodes, &config.name, &wanted).await {
            Ok(()) => {
                reported_at = Instant::now();
                retry.restart();
                // Until the watch shows it; else the next look would report the same again.
                server = Some(wanted);
            }
            Err(error) => {
                tracing::warn!(
                    node = config.name,
                    error = &error as &dyn std::error::Error,
                    "could not report status"
                );
                retry_at = Some(Instant::now() + retry.wait());
            }
        }
    }
}

/// Takes note of the Node as the server has it, and says what conditions it believes in.
fn seen(
    name: &str,
    node: Option<&Node>,
    present: &watch::Sender<Option<String>>,
) -> Option<Vec<NodeCondition>> {
    let uid = node.as_ref().and_then(|node| node.metadata.uid.clone());
    if uid.is_none() && present.borrow().is_some() {
        tracing::warn!(
            node = name,
            "the Node was deleted; restart the agent to register it again"
        );
    }
    present.send_if_modified(|known| {
        let changed = *known != uid;
        *known = uid;
        changed
    });
    node.map(|node| {
        let status = node.status.as_ref();
        status
            .and_then(|status| status.conditions.clone())
            .unwrap_or_default()
    })
}

/// Writes conditions, and nothing else of the status.
pub(crate) async fn report(
    nodes: &Api<Node>,
    name: &str,
    wanted: &[NodeCondition],
) -> Result<(), CallError> {
    patch_status(nodes, name, &conditions_patch(wanted)).await
}

async fn patch_status(nodes: &Api<Node>, name: &str, patch: &Value) -> Result<(), CallError> {
    call(nodes.patch_status(name, &PatchParams::default(), &Patch::Strategic(patch)))
        .await
        .map(|_| ())
}

/// A strategic merge patch: conditions are merged by type, so those of others stay.
fn conditions_patch(wanted: &[NodeCondition]) -> Value {
    json!({ "status": { "conditions": wanted } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_conditions_are_patched() {
        let wanted = conditions(
            Pressures::default(),
            Readiness::Ready,
            &[],
            Timestamp::UNIX_EPOCH,
        );
        insta::assert_json_snapshot!(conditions_patch(&wanted[3..]));
    }

    #[test]
    fn a_deleted_node_is_told_to_the_lease() {
        let (present, presence) = watch::channel(Some("a".to_owned()));
        assert_eq!(seen("node1", None, &present), None);
        assert_eq!(*presence.borrow(), None);

        let mut node = Node::default();
        node.metadata.uid = Some("b".to_owned());
        assert_eq!(seen("node1", Some(&node), &present), Some(Vec::new()));
        assert_eq!(*presence.borrow(), Some("b".to_owned()));
    }
}
