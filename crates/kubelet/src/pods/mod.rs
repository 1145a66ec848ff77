//! The pods bound to this node: a worker for each ([`worker`]), and what all of them need.
//!
//! ```text
//!   API server ──watch──► manager ──► worker (one per pod) ──launch──► sandbox
//!        ▲                   ▲          │   ▲                             │
//!        │                   │          │   └── connection                │
//!        └── writer ◄── status ◄────────┘        ▲                        │
//!                            └──────── switchboard ◄──── dials kubelet.sock
//! ```
//!
//! What is decided is pure (`admission`, `status`); what is done is in `manager`, `worker` and `writer`.

mod admission;
mod bundles;
mod eviction;
mod known;
mod launch;
mod manager;
mod process;
mod resize;
mod runtime_class;
#[cfg(test)]
mod simulation;
mod spec;
mod status;
mod streams;
mod switchboard;
mod worker;
mod writer;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, Client};
use pod_protocol::Problem;
use tokio::net::UnixListener;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::Instant;

pub use known::{KnownPods, OwnLog};
pub use launch::{Handle, LAUNCHER_ANNOTATION, Launch, LaunchError, Launcher, Needs, NodeKey, Way};
pub use process::Process;
pub(crate) use runtime_class::HANDLER;
pub(crate) use spec::is_on_disk;

use self::admission::Space;
use self::spec::launcher;
use crate::api::call;
use crate::events::Recorder;
use crate::local_volumes;
use crate::resolve::Resolver;
use crate::{KubeletError, NodeConfig, Pressures};

/// How many statuses are written at once; each may cost a connection.
const AT_ONCE: usize = 16;

/// What all workers share.
struct Shared {
    client: Client,
    config: NodeConfig,
    launcher: Arc<dyn Launcher>,
    known: Arc<KnownPods>,
    recorder: Recorder,
    resolver: Arc<Resolver>,
    /// The own Node, as the API server last showed it.
    node: watch::Receiver<Option<Arc<Node>>>,
    /// By uid: the pods that have to go because the machine is short of something.
    evicted: watch::Sender<BTreeMap<String, Problem>>,
    /// How many may write at once.
    room: Arc<Semaphore>,
    /// One per family, as pods' statuses show them.
    host_ips: Vec<IpAddr>,
}

/// The kubelet's side of pods, ready to begin.
pub(crate) struct Pods {
    pub client: Client,
    pub config: NodeConfig,
    pub launcher: Arc<dyn Launcher>,
    pub known: Arc<KnownPods>,
    pub node: watch::Receiver<Option<Arc<Node>>>,
}

impl Pods {
    /// Opens the socket at which sandboxes report. Those that outlived an earlier agent dial at once.
    pub(crate) fn listen(&self) -> Result<UnixListener, KubeletError> {
        let path = self.config.node_dir.join("kubelet.sock");
        switchboard::open(&path).map_err(|source| KubeletError::Socket { path, source })
    }

    /// Looks after the pods of this node until `shutdown`, which says until when they have to be gone.
    pub(crate) async fn run(self, listener: UnixListener, shutdown: impl Future<Output = Instant>) {
        let (recorder, recording) = Recorder::new(self.client.clone(), self.config.name.clone());
        let _followed = self.known.follow();
        let (dialled, sandboxes) = mpsc::unbounded_channel();
        let key = self.config.node_key.clone();
        self.known.read_logs_with(Arc::clone(&self.launcher));
        let host_ips = one_per_family(&self.config.internal_ips);
        let resolver = Arc::new(Resolver::new(self.client.clone(), &self.config));
        let shared = Arc::new(Shared {
            client: self.client,
            config: self.config,
            launcher: self.launcher,
            known: self.known,
            recorder,
            resolver,
            node: self.node,
            evicted: watch::Sender::default(),
            room: Arc::new(Semaphore::new(AT_ONCE)),
            host_ips,
        });
        let removing = local_volumes::remove_listed(
            shared.client.clone(),
            shared.config.node_dir.clone(),
            shared.node.clone(),
            Arc::clone(&shared.launcher),
        );
        tokio::select! {
            () = removing => {}
            () = eviction::keep_room(Arc::clone(&shared)) => {}
            () = manager::manage(shared, sandboxes, shutdown) => {}
            () = switchboard::serve(listener, key, dialled) => {}
            () = recording => {}
        }
    }
}

impl Shared {
    /// How a pod is started: as it says, else as the node does it.
    fn way(&self, pod: &Pod) -> Way {
        let named = launcher(pod).and_then(Way::named);
        named.unwrap_or(self.config.way)
    }

    /// Removes what is left of a pod that has no sandbox any more.
    async fn remove_dir(&self, uid: &str) {
        let dir = self.config.node_dir.join("pods").join(uid);
        if dir.exists()
            && let Err(error) = self.launcher.remove(dir.clone()).await
        {
            tracing::warn!(dir = %dir.display(), %error, "cannot remove the pod's directory");
        }
    }

    /// A share of its own was measured when the pod was started, and can't grow.
    fn keeps_to_its_share(&self, pod: &Pod, has: &Pod) -> Result<(), Problem> {
        if self.way(pod) == Way::Fork || admission::needs(pod).fit_in(&admission::needs(has)) {
            return Ok(());
        }
        Err(Problem {
            reason: "OutOfShare".to_owned(),
            message: "the pod is a step of the job, and a step's share can't grow".to_owned(),
        })
    }

    /// Takes a pod, or says why not; `others` use the node already.
    fn admit(&self, pod: &Pod, others: &[Arc<Pod>]) -> Result<(), Problem> {
        let node = self.node.borrow().clone();
        let others: Vec<_> = others.iter().map(|pod| &**pod).collect();
        admission::admit(pod, &self.space(node.as_deref(), &others))
    }

    /// Whether what a pod asks for is free beside what `others` use.
    fn has_room(&self, pod: &Pod, others: &[Arc<Pod>]) -> Result<(), Problem> {
        let others: Vec<_> = others.iter().map(|pod| &**pod).collect();
        admission::has_room(pod, &self.space(None, &others))
    }

    /// Whether the pod's node selector fits the Node as it is now: its labels may have changed just before the pod came.
    async fn matches_by_now(&self, pod: &Pod) -> bool {
        let nodes: Api<Node> = Api::all(self.client.clone());
        match call(nodes.get(&self.config.name)).await {
            Ok(node) => admission::selects(pod, &self.space(Some(&node), &[])),
            Err(_) => false,
        }
    }

    fn space<'a>(&'a self, node: Option<&'a Node>, others: &'a [&'a Pod]) -> Space<'a> {
        let labels = node.and_then(|node| node.metadata.labels.as_ref());
        let taints = node
            .and_then(|node| node.spec.as_ref())
            .and_then(|spec| spec.taints.as_deref());
        Space {
            node: &self.config.name,
            labels: labels.unwrap_or(&self.config.labels),
            taints: taints.unwrap_or_default(),
            capacity: &self.config.capacity,
            pressures: Pressures::read(&self.config.scratch_dir),
            others,
        }
    }
}

/// The first address of each family, the first family first.
fn one_per_family(ips: &[IpAddr]) -> Vec<IpAddr> {
    let first = ips.first().copied();
    let other = first.and_then(|first| ips.iter().find(|ip| ip.is_ipv4() != first.is_ipv4()));
    first.into_iter().chain(other.copied()).collect()
}
