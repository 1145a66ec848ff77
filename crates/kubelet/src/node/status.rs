//! Keeps the Node's status current: conditions, and allocatable resources that other programs have added.

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

use super::conditions::{Readiness, are_reported, conditions};
use super::extended_resources::allocatable_patch;
use super::{Pressures, resources};
use crate::NodeConfig;
use crate::api_call::{ApiCallError, call};
use crate::backoff::ExponentialBackoff;

/// Interval between measurements of this machine. The Node itself is watched, not polled.
const MEASURE_INTERVAL: Duration = Duration::from_secs(10);
/// Interval between heartbeats when nothing changes, as in upstream.
const REPORT_INTERVAL: Duration = Duration::from_secs(300);
const MAX_NODE_RETRY_DELAY: Duration = Duration::from_secs(2);

/// Reports this machine's conditions: when one changes here, when one was changed on the API server (the controller-manager
/// does that while the node is unreachable), and every five minutes. Never returns.
///
/// Publishes the Node in `node_sender` whenever it changes, and its uid in `uid_sender`, which is `None` while the Node is
/// deleted. Like upstream's kubelet, this one does not create a deleted Node again until it is restarted.
pub(crate) async fn sync_node_status(
    client: &Client,
    config: &NodeConfig,
    uid_sender: watch::Sender<Option<String>>,
    node_sender: watch::Sender<Option<Arc<Node>>>,
) {
    let nodes: Api<Node> = Api::all(client.clone());
    let events = watcher::watch_object(nodes.clone(), &config.name)
        .backoff(ExponentialBackoff::up_to(MAX_NODE_RETRY_DELAY));
    tokio::pin!(events);

    let mut measure = tokio::time::interval(MEASURE_INTERVAL);
    measure.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut retry_backoff = ExponentialBackoff::up_to(MAX_NODE_RETRY_DELAY);
    let mut retry_at: Option<Instant> = None;
    let mut reported_at = Instant::now();
    let mut pressures = Pressures::read(config.scratch_dir());
    // The API server's conditions; `None` if the Node is deleted or not read yet.
    let mut server: Option<Vec<NodeCondition>> = None;
    let own = resources(&config.capacity);
    // The pending patch of allocatable resources.
    let mut allocatable: Option<Value> = None;

    loop {
        tokio::select! {
            _ = measure.tick() => pressures = Pressures::read(config.scratch_dir()),
            () = tokio::time::sleep_until(retry_at.unwrap_or_else(Instant::now)), if retry_at.is_some() => retry_at = None,
            event = events.try_next() => match event {
                Ok(Some(node)) => {
                    let node = node.map(Arc::new);
                    allocatable = node.as_deref().and_then(|node| allocatable_patch(node, &own));
                    node_sender.send_replace(node.clone());
                    server = observe(&config.name, node.as_deref(), &uid_sender);
                }
                // The watcher's stream never ends; it reconnects after errors.
                Ok(None) => return,
                Err(error) => {
                    tracing::debug!(node = config.name, error = &error as &dyn std::error::Error, "cannot watch the Node");
                }
            },
        }

        if let Some(patch) = &allocatable {
            match patch_status(&nodes, &config.name, patch).await {
                Ok(()) => allocatable = None,
                // Retried after the next event.
                Err(error) => tracing::warn!(
                    node = config.name,
                    error = &error as &dyn std::error::Error,
                    "cannot update allocatable resources"
                ),
            }
        }
        let Some(current) = &server else { continue };
        let wanted = conditions(pressures, Readiness::Ready, current, Timestamp::now());
        let due = !are_reported(current, &wanted) || reported_at.elapsed() >= REPORT_INTERVAL;
        if !due || retry_at.is_some() {
            continue;
        }
        match patch_conditions(&nodes, &config.name, &wanted).await {
            Ok(()) => {
                reported_at = Instant::now();
                retry_backoff.reset();
                // The watch shows it later; without this the next measurement would report the same again.
                server = Some(wanted);
            }
            Err(error) => {
                tracing::warn!(
                    node = config.name,
                    error = &error as &dyn std::error::Error,
                    "cannot report node status"
                );
                retry_at = Some(Instant::now() + retry_backoff.next_delay());
            }
        }
    }
}

/// Publishes the uid of the API server's Node and returns its conditions.
fn observe(
    name: &str,
    node: Option<&Node>,
    uid_sender: &watch::Sender<Option<String>>,
) -> Option<Vec<NodeCondition>> {
    let uid = node.as_ref().and_then(|node| node.metadata.uid.clone());
    if uid.is_none() && uid_sender.borrow().is_some() {
        tracing::warn!(
            node = name,
            "the Node was deleted (hint: restart the agent to register it again)"
        );
    }
    uid_sender.send_if_modified(|known| {
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

/// Writes conditions and no other part of the status.
pub(super) async fn patch_conditions(
    nodes: &Api<Node>,
    name: &str,
    wanted: &[NodeCondition],
) -> Result<(), ApiCallError> {
    patch_status(nodes, name, &conditions_patch(wanted)).await
}

async fn patch_status(nodes: &Api<Node>, name: &str, patch: &Value) -> Result<(), ApiCallError> {
    call(nodes.patch_status(name, &PatchParams::default(), &Patch::Strategic(patch)))
        .await
        .map(|_| ())
}

/// A strategic merge patch: conditions are merged by type, so conditions of other components stay.
fn conditions_patch(wanted: &[NodeCondition]) -> Value {
    json!({ "status": { "conditions": wanted } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patch_contains_only_conditions() {
        let wanted = conditions(
            Pressures::default(),
            Readiness::Ready,
            &[],
            Timestamp::UNIX_EPOCH,
        );
        insta::assert_json_snapshot!(conditions_patch(&wanted[3..]));
    }

    #[test]
    fn uid_is_none_while_node_is_deleted() {
        let (sender, uid) = watch::channel(Some("a".to_owned()));
        assert_eq!(observe("node1", None, &sender), None);
        assert_eq!(*uid.borrow(), None);

        let mut node = Node::default();
        node.metadata.uid = Some("b".to_owned());
        assert_eq!(observe("node1", Some(&node), &sender), Some(Vec::new()));
        assert_eq!(*uid.borrow(), Some("b".to_owned()));
    }
}
