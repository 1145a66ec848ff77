//! The kubelet: this machine as a Node of the cluster, and the pods bound to it.
//!
//! Responsible for: the Node object and its conditions, the node's lease, and the pods bound here: each is admitted,
//! given to a sandbox of its own, and its status is kept true until nothing of it is left.
//!
//! Deliberately does not know: Slurm (its facts arrive as plain numbers and labels in [`NodeConfig`]), how a sandbox is
//! started ([`Launcher`]) or runs containers (`sandbox`, of which only the protocol is used here), nor how the HTTPS
//! API is served (that is `kubelet-api`, which asks [`KnownPods`]).
//!
//! Start reading at [`run`], then `node.rs` (what a Node looks like), `status.rs` (how it stays true) and `pods/`.
//!
//! Everything here is done as `system:node:NAME` of group `system:nodes`, within what upstream's Node authorizer and
//! NodeRestriction allow such a user. The one thing they don't is removing the own Node: see `farewell.rs`.

mod advertised;
mod api;
mod authority;
mod backoff;
mod conditions;
mod config;
mod error;
mod events;
mod farewell;
mod image_list;
mod lease;
mod local_volumes;
mod measure;
mod node;
mod pods;
mod pressure;
mod register;
mod resolve;
mod status;
mod system;

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::Client;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

pub use api::CallError;
pub use authority::ApiAuthority;
pub use config::{Capacity, Members, NodeConfig};
pub use error::KubeletError;
pub use node::node_object;
pub use pods::{
    Handle, KnownPods, LAUNCHER_ANNOTATION, Launch, LaunchError, Launcher, Needs, NodeKey, OwnLog,
    Process, Way,
};
pub use pressure::Pressures;
pub use system::SystemFacts;

use self::pods::Pods;

/// Is this node until `shutdown`: registers it, says so through `registered`, keeps it true, looks after its pods, and
/// takes it away again.
///
/// `launcher` starts the sandboxes of pods. `pods` is filled with the pods bound here, for the kubelet's HTTPS API to
/// show. `shutdown` says how long pods have to end; what is left of them then is left to whoever ends the node.
/// An `Err` means that the cluster will never take this node; losing the API server for a while is no error.
/// When this is dropped, pods go on: their sandboxes wait for the next kubelet.
pub async fn run(
    client: Client,
    config: NodeConfig,
    launcher: Arc<dyn Launcher>,
    pods: Arc<KnownPods>,
    registered: oneshot::Sender<()>,
    shutdown: impl Future<Output = Duration>,
) -> Result<(), KubeletError> {
    tokio::pin!(shutdown);
    let facts = SystemFacts::read();
    let desired = || {
        node_object(
            &config,
            &facts,
            Pressures::read(&config.scratch_dir),
            Timestamp::now(),
        )
    };
    pods.measure_with(Arc::new(measure::Meter::new(&config, &facts, &pods)));
    let (show_node, node_shown) = watch::channel(None);
    let pods = Pods {
        client: client.clone(),
        config: config.clone(),
        launcher: Arc::clone(&launcher),
        known: pods,
        node: node_shown,
    };
    // Before all else: sandboxes that outlived an earlier agent are waiting for it.
    let listener = pods.listen()?;

    let node = tokio::select! {
        registered = register::register(&client, desired) => registered?,
        _ = &mut shutdown => return Ok(()),
    };
    // Nobody may be waiting any more; the node is registered all the same.
    let _ = registered.send(());
    tracing::info!(node = config.name, "node registered");

    // `status` watches the Node and tells `lease` which one to own: none while somebody has deleted it.
    let (present, presence) = watch::channel(node.metadata.uid.clone());
    show_node.send_replace(Some(Arc::new(node)));
    let (lister, node_listed) = (launcher, pods.node.clone());
    let duties = async {
        tokio::join!(
            status::keep_true(&client, &config, present, show_node),
            lease::keep_renewed(&client, &config.name, presence.clone()),
            image_list::keep_listed(&client, &config.name, lister, node_listed),
        )
    };
    let end = async {
        // Counted from the moment of the word, so asked for first.
        let grace = shutdown.await;
        Instant::now() + grace
    };
    // Dropped where they stand: each request is whole in itself, and the end of a job does not wait.
    tokio::select! {
        () = pods.run(listener, end) => {}
        _ = duties => {}
    }

    let uid = presence.borrow().clone();
    farewell::leave(&client, &config.name, uid).await;
    Ok(())
}
