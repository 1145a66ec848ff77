//! The kubelet: this machine as a Node of the cluster, and the pods bound to it.
//!
//! Responsible for: the Node object and its conditions, the node's lease, and the status of pods bound here. Running
//! containers comes later; until then a pod bound here is refused in the way upstream's kubelet refuses pods that it
//! can't admit (`pods.rs`).
//!
//! Deliberately does not know: Slurm (its facts arrive as plain numbers and labels in [`NodeConfig`]), namespaces, nor
//! how the HTTPS API is served (that is `kubelet-api`, which asks [`KnownPods`]).
//!
//! Start reading at [`run`], then `node.rs` (what a Node looks like) and `status.rs` (how it stays true).
//!
//! Everything here is done as `system:node:NAME` of group `system:nodes`, within what upstream's Node authorizer and
//! NodeRestriction allow such a user. The one thing they don't is removing the own Node: see `farewell.rs`.

mod api;
mod backoff;
mod conditions;
mod config;
mod error;
mod events;
mod farewell;
mod lease;
mod node;
mod pods;
mod pressure;
mod quantity;
mod register;
mod status;
mod system;

use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use kube::Client;
use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;

pub use api::CallError;
pub use config::{Capacity, NodeConfig};
pub use error::KubeletError;
pub use node::node_object;
pub use pods::KnownPods;
pub use pressure::Pressures;
pub use system::SystemFacts;

/// Is this node until `shutdown`: registers it, says so through `registered`, keeps it true, and takes it away again.
///
/// `pods` is filled with the pods bound here, for the kubelet's HTTPS API to show. An `Err` means that the cluster will
/// never take this node; losing the API server for a while is no error.
pub async fn run(
    client: Client,
    config: NodeConfig,
    pods: Arc<KnownPods>,
    registered: oneshot::Sender<()>,
    shutdown: CancellationToken,
) -> Result<(), KubeletError> {
    let facts = SystemFacts::read();
    let desired = || {
        node_object(
            &config,
            &facts,
            Pressures::read(&config.scratch_dir),
            Timestamp::now(),
        )
    };

    let Some(node) = register::register(&client, desired, &shutdown).await? else {
        return Ok(());
    };
    // Nobody may be waiting any more; the node is registered all the same.
    let _ = registered.send(());
    tracing::info!(node = config.name, "node registered");

    // `status` watches the Node and tells `lease` which one to own: none while somebody has deleted it.
    let (present, presence) = watch::channel(node.metadata.uid);
    let duties = async {
        tokio::join!(
            status::keep_true(&client, &config, present),
            lease::keep_renewed(&client, &config.name, presence.clone()),
            pods::watch(&client, &config.name, &pods),
        )
    };
    // Dropped where they stand: each request is whole in itself, and the end of a job does not wait.
    tokio::select! {
        () = shutdown.cancelled() => {}
        _ = duties => {}
    }

    let uid = presence.borrow().clone();
    farewell::leave(&client, &config.name, uid).await;
    Ok(())
}
