//! The pods bound to this node: one worker per pod ([`worker`]), and their shared parts.
//!
//! ```text
//!   API server ──watch──► sync_loop ──► worker (one per pod) ──launcher──► sandbox
//!       ▲                      ▲             │                                │
//!       │                      │             ▼                                │
//!       └── status_manager ◄───┼────────── status                             │
//!                              └── sandbox_listener ◄── connects by Unix socket or TLS
//! ```
//!
//! Decisions are pure functions (`admission`, `eviction/ranking`, `resize`, `status`). Effects are in `sync_loop`, `worker` and
//! `status_manager`. `pod_manager` answers the kubelet's HTTPS API.

mod admission;
mod bundle;
mod eviction;
#[cfg(test)]
mod fake;
mod launcher;
mod log_reads;
mod network_state;
mod pod_manager;
mod resize;
mod runtime_class;
mod sandbox_auth;
mod sandbox_listener;
mod spec;
mod status;
mod status_manager;
mod streaming;
mod sync_loop;
mod worker;

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, Client};
use pod_protocol::PodFailure;
use pod_protocol::connection::TransportListener;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::Instant;

pub use launcher::{
    LAUNCHER_ANNOTATION, LaunchRequest, Launcher, LauncherKind, PodRecords, PodResources,
    SandboxControl, SandboxEnd, SandboxHandle, SandboxState, SandboxTimeouts,
};
pub use network_state::NetworkStateSender;
pub use pod_manager::{AgentLog, PodManager};
pub(crate) use runtime_class::RUNTIME_HANDLER;
pub use sandbox_auth::NodeKey;
pub(crate) use spec::{PodPhase, is_on_disk};

use self::admission::{AdmissionContext, PodRejection};
use self::sandbox_auth::SandboxAuthenticator;
use self::spec::launcher_annotation;
use crate::api_call::call;
use crate::events::EventRecorder;
use crate::local_volumes;
use crate::resolve::Resolver;
use crate::{NodeConfig, Pressures};

/// Maximum number of concurrent status updates: each may open a connection.
const MAX_STATUS_UPDATES: usize = 16;

/// State that all workers share.
struct Shared {
    client: Client,
    config: NodeConfig,
    launcher: Arc<dyn Launcher>,
    pod_manager: Arc<PodManager>,
    recorder: EventRecorder,
    resolver: Arc<Resolver>,
    /// This kubelet's Node, as last seen on the API server.
    node: watch::Receiver<Option<Arc<Node>>>,
    /// By uid: the pods to evict, and why.
    evictions: watch::Sender<BTreeMap<String, PodFailure>>,
    /// Limits concurrent status updates.
    status_updates: Arc<Semaphore>,
    /// Issues and checks the credentials of sandboxes.
    authenticator: Arc<SandboxAuthenticator>,
    /// The desired state of the network, for the hub.
    network: NetworkStateSender,
}

/// The part of the kubelet that runs pods, before it starts.
pub(crate) struct PodSubsystem {
    pub client: Client,
    pub config: NodeConfig,
    pub launcher: Arc<dyn Launcher>,
    pub pod_manager: Arc<PodManager>,
    pub node: watch::Receiver<Option<Arc<Node>>>,
    pub network: NetworkStateSender,
}

impl PodSubsystem {
    /// Runs the pods of this node until `shutdown`, which returns the deadline for their end. Sandboxes that outlived an earlier agent
    /// connect to `listener` at once.
    pub(crate) async fn run(
        self,
        listener: TransportListener,
        shutdown: impl Future<Output = Instant>,
    ) {
        let (recorder, recording) =
            EventRecorder::new(self.client.clone(), self.config.name.clone());
        let _running = self.pod_manager.start_sync_loop();
        let (connected, sandboxes) = mpsc::unbounded_channel();
        let authenticator = Arc::new(SandboxAuthenticator::new(&self.config.node_key));
        self.pod_manager.set_records(self.launcher.records());
        let resolver = Arc::new(Resolver::new(self.client.clone(), &self.config));
        let shared = Arc::new(Shared {
            client: self.client,
            config: self.config,
            launcher: self.launcher,
            pod_manager: self.pod_manager,
            recorder,
            resolver,
            node: self.node,
            evictions: watch::Sender::default(),
            status_updates: Arc::new(Semaphore::new(MAX_STATUS_UPDATES)),
            authenticator: Arc::clone(&authenticator),
            network: self.network,
        });
        let local_volumes = local_volumes::remove_listed(
            shared.client.clone(),
            shared.node.clone(),
            Arc::clone(&shared.launcher),
        );
        tokio::select! {
            () = local_volumes => {}
            () = eviction::run(Arc::clone(&shared)) => {}
            () = sync_loop::run(shared, sandboxes, shutdown) => {}
            () = sandbox_listener::serve(listener, authenticator, connected) => {}
            () = recording => {}
        }
    }
}

impl Shared {
    /// The launcher of a pod: by its annotation, else the node's default.
    fn launcher_kind(&self, pod: &Pod) -> LauncherKind {
        let annotated = launcher_annotation(pod).and_then(LauncherKind::parse);
        annotated.unwrap_or(self.config.launcher)
    }

    /// Removes what the sandbox of a pod has left, after it has exited.
    async fn remove_records(&self, uid: &str) {
        if let Err(error) = self.launcher.records().remove(uid).await {
            tracing::warn!(uid, %error, "cannot remove the pod's records");
        }
    }

    /// Checks a resize of a pod that is a job step. Slurm allocated the step's resources when it started, and cannot add more.
    fn check_step_resize(&self, pod: &Pod, allocated: &Pod) -> Result<(), String> {
        let is_step = self.launcher_kind(pod) == LauncherKind::Step;
        let fits = admission::pod_resources(pod).fit_in(&admission::pod_resources(allocated));
        if is_step && !fits {
            return Err(
                "the pod is a job step, and a job step cannot get more resources".to_owned(),
            );
        }
        Ok(())
    }

    /// Decides whether to admit a pod; `others` are the pods that use the node already.
    fn admit(&self, pod: &Pod, others: &[Arc<Pod>]) -> Result<(), PodRejection> {
        let node = self.node.borrow().clone();
        let others: Vec<_> = others.iter().map(|pod| &**pod).collect();
        admission::admit(pod, &self.admission_context(node.as_deref(), &others))
    }

    /// Checks that the resources that a pod requests are free beside `others`.
    fn check_resources(&self, pod: &Pod, others: &[Arc<Pod>]) -> Result<(), PodRejection> {
        let others: Vec<_> = others.iter().map(|pod| &**pod).collect();
        admission::check_resources(pod, &self.admission_context(None, &others))
    }

    /// Reads the Node and matches the pod's node selector again: its labels may have changed just before the pod was bound.
    async fn matches_current_node(&self, pod: &Pod) -> bool {
        let nodes: Api<Node> = Api::all(self.client.clone());
        match call(nodes.get(&self.config.name)).await {
            Ok(node) => {
                admission::matches_node_affinity(pod, &self.admission_context(Some(&node), &[]))
            }
            Err(_) => false,
        }
    }

    fn admission_context<'a>(
        &'a self,
        node: Option<&'a Node>,
        others: &'a [&'a Pod],
    ) -> AdmissionContext<'a> {
        let labels = node.and_then(|node| node.metadata.labels.as_ref());
        let taints = node
            .and_then(|node| node.spec.as_ref())
            .and_then(|spec| spec.taints.as_deref());
        AdmissionContext {
            node: &self.config.name,
            labels: labels.unwrap_or(&self.config.labels),
            taints: taints.unwrap_or_default(),
            capacity: &self.config.capacity,
            pressures: Pressures::read(self.config.scratch_dir()),
            others,
        }
    }
}
