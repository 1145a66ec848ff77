//! The kubelet: registers this machine as a Node and runs the pods bound to it.
//!
//! Responsible for: the Node object and its conditions, the node's lease, and the pods bound to the node. The kubelet admits
//! a pod, starts a sandbox for it, writes its status to the API server, and deletes the pod object when the pod has ended.
//!
//! Deliberately does not know: Slurm (its facts are plain numbers and labels in [`NodeConfig`]), how a sandbox is
//! started ([`Launcher`]) or runs containers (crate `sandbox`; only `pod-protocol` is used here), nor how the HTTPS
//! API is served (crate `kubelet-api`, which reads [`PodManager`]).
//!
//! Where things happen:
//!
//! ```text
//!   registering the Node, heartbeats     node/
//!   receiving pods                       pods/sync_loop/
//!   admitting a pod                      pods/admission/
//!   config maps, secrets, volumes        resolve/
//!   starting a pod                       pods/worker/start.rs
//!   a pod's status                       pods/status/, pods/status_manager.rs
//!   ending a pod                         pods/worker/terminate.rs, pods/eviction/
//!   exec, attach, port-forward, logs     pods/pod_manager.rs, pods/streaming.rs
//!   statistics                           stats/
//! ```
//!
//! Containers are started, probed and logged by the pod's sandbox (crate `sandbox`). Start reading at [`run`].
//!
//! All requests are sent as user `system:node:NAME` of group `system:nodes`. Upstream's Node authorizer and NodeRestriction
//! allow all of them but one: deleting the node's own Node, see `node/deregister.rs`.

#![warn(unused_crate_dependencies)]

mod api_call;
mod backoff;
mod config;
mod error;
mod events;
mod local_volumes;
mod node;
mod pods;
mod resolve;
mod stats;
mod webhook_auth;

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::Client;
use pod_protocol::connection::TransportListener;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

pub use api_call::ApiCallError;
pub use config::{HostDirs, NodeCapacity, NodeConfig, NodeProcesses};
pub use error::KubeletError;
pub use node::{Pressures, SystemInfo, node_object};
pub use pods::{
    AgentLog, LAUNCHER_ANNOTATION, LaunchRequest, Launcher, LauncherKind, NetworkStateSender,
    NodeKey, PodManager, PodRecords, PodResources, SandboxControl, SandboxEnd, SandboxHandle,
    SandboxState, SandboxTimeouts,
};
pub use webhook_auth::WebhookAuth;

use self::node::{deregister, images, lease, register, status};
use self::pods::PodSubsystem;

/// The parts of a kubelet.
pub struct Kubelet {
    /// Requests are sent as user `system:node:NAME`.
    pub client: Client,
    /// The node's configuration.
    pub config: NodeConfig,
    /// Starts sandboxes.
    pub launcher: Arc<dyn Launcher>,
    /// Accepts the connections of sandboxes.
    pub listener: TransportListener,
    /// Gets the desired state of the node's network.
    pub network: NetworkStateSender,
    /// Gets the pods bound to this node, for the kubelet's HTTPS API.
    pub pod_manager: Arc<PodManager>,
}

/// Runs the kubelet until `shutdown`: registers the Node, signals `registered`, runs the pods, and deletes the Node.
///
/// `shutdown` returns the time in which pods have to end; the caller kills pods that remain.
/// An `Err` means that registration failed for good. An unreachable API server is no error: requests are retried.
/// When the future is dropped, pods go on: their sandboxes wait for the next kubelet.
pub async fn run(
    kubelet: Kubelet,
    registered: oneshot::Sender<()>,
    shutdown: impl Future<Output = Duration>,
) -> Result<(), KubeletError> {
    let Kubelet {
        client,
        config,
        launcher,
        listener,
        network,
        pod_manager,
    } = kubelet;
    tokio::pin!(shutdown);
    let system = SystemInfo::read();
    let desired = || {
        node_object(
            &config,
            &system,
            Pressures::read(config.scratch_dir()),
            Timestamp::now(),
        )
    };
    let stats = stats::StatsProvider::new(&config, &system, &pod_manager);
    pod_manager.set_node_source(Arc::new(stats));
    let (node_sender, node_receiver) = watch::channel(None);
    let pods = PodSubsystem {
        client: client.clone(),
        config: config.clone(),
        launcher: Arc::clone(&launcher),
        pod_manager,
        node: node_receiver,
        network,
    };
    let node = tokio::select! {
        registered = register::register(&client, desired) => registered?,
        _ = &mut shutdown => return Ok(()),
    };
    // An error means that the receiver was dropped; the node is registered nevertheless.
    let _ = registered.send(());
    tracing::info!(node = config.name, "node registered");

    // `status` watches the Node and publishes its uid, which `lease` needs; `None` while the Node is deleted.
    let (uid_sender, uid) = watch::channel(node.metadata.uid.clone());
    node_sender.send_replace(Some(Arc::new(node)));
    let node = pods.node.clone();
    let node_tasks = async {
        tokio::join!(
            status::sync_node_status(&client, &config, uid_sender, node_sender),
            lease::keep_renewed(&client, &config.name, uid.clone()),
            images::sync_images(&client, &config.name, launcher, node),
        )
    };
    let deadline = async {
        // The grace period starts when `shutdown` returns, so await it before reading the clock.
        let grace = shutdown.await;
        Instant::now() + grace
    };
    // The other tasks are dropped at once: each of their requests is complete in itself.
    tokio::select! {
        () = pods.run(listener, deadline) => {}
        _ = node_tasks => {}
    }

    let uid = uid.borrow().clone();
    deregister::deregister(&client, &config.name, uid).await;
    Ok(())
}
