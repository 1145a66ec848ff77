//! The sync loop: watches the pods bound to this node, admits them, and gives each a worker.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures::TryStreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::runtime::{WatchStreamExt, watcher};
use pod_protocol::Stop;
use pod_protocol::connection::ConnectionError;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::Shared;
use super::admission::{PodRejection, RejectionReason};
use super::bundle::{ResolverGuard, sync_bundle};
use super::resize::{self, Neighbors};
use super::sandbox_listener::IncomingSandbox;
use super::spec::{is_being_deleted, phase, uid};
use super::worker::{PodUpdate, Worker, WorkerInputs, WorkerStart, has_started};
use crate::backoff::ExponentialBackoff;

const MAX_POD_WATCH_RETRY_DELAY: Duration = Duration::from_secs(2);
/// The part of the shutdown time that is reserved for writing the pods' last statuses.
const LAST_STATUS_TIME: Duration = Duration::from_secs(2);
/// The grace period of a pod that the API server has deleted, as in upstream.
const ORPHAN_GRACE_SECONDS: i64 = 1;
/// An orphaned sandbox is dismissed after this time at the latest.
const ORPHAN_STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs the pods bound to this node until `shutdown` returns the deadline for their end, then waits for their end.
pub(super) async fn run(
    shared: Arc<Shared>,
    mut sandboxes: mpsc::UnboundedReceiver<IncomingSandbox>,
    shutdown: impl Future<Output = Instant>,
) {
    // The Node authorizer allows list and watch of pods in all namespaces only with this selector.
    let bound_here =
        watcher::Config::default().fields(&format!("spec.nodeName={}", shared.config.name));
    let events = watcher(Api::<Pod>::all(shared.client.clone()), bound_here)
        .backoff(ExponentialBackoff::up_to(MAX_POD_WATCH_RETRY_DELAY));
    let (shutdown_sender, shutdown_receiver) = watch::channel(None);
    let mut sync_loop = SyncLoop {
        shared,
        workers: HashMap::new(),
        tasks: JoinSet::new(),
        early_sandboxes: HashMap::new(),
        synced: false,
        shutdown: shutdown_receiver,
    };
    tokio::pin!(events, shutdown);
    // The pods of a list that is being received. Pods that are not in the complete list are deleted.
    let mut list = vec![];
    let mut deadline = None;
    while deadline.is_none() || !sync_loop.tasks.is_empty() {
        tokio::select! {
            until = &mut shutdown, if deadline.is_none() => {
                deadline = Some(until);
                // Pods have to end earlier, because their last statuses must be written.
                let left = until.saturating_duration_since(Instant::now());
                shutdown_sender.send_replace(Some(until - (left / 5).min(LAST_STATUS_TIME)));
            }
            () = sleep_until(deadline) => return,
            Some(result) = sync_loop.tasks.join_next() => sync_loop.task_ended(result),
            Some(sandbox) = sandboxes.recv() => sync_loop.sandbox_connected(sandbox),
            event = events.try_next() => match event {
                Ok(Some(watcher::Event::Init)) => list.clear(),
                Ok(Some(watcher::Event::InitApply(pod))) => list.push(pod),
                Ok(Some(watcher::Event::InitDone)) => sync_loop.pods_listed(std::mem::take(&mut list)),
                Ok(Some(watcher::Event::Apply(pod))) => sync_loop.pod_updated(pod),
                Ok(Some(watcher::Event::Delete(pod))) => sync_loop.pod_deleted(pod),
                Ok(None) => return,
                Err(error) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "cannot watch pods");
                }
            },
        }
    }
}

async fn sleep_until(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}

struct SyncLoop {
    shared: Arc<Shared>,
    /// By uid.
    workers: HashMap<String, WorkerHandle>,
    /// Each returns the uid of its pod, if it was that of a pod.
    tasks: JoinSet<Option<String>>,
    /// Sandboxes that connected before their pod was received.
    early_sandboxes: HashMap<String, IncomingSandbox>,
    /// All pods were received once, so that a sandbox without a pod is an orphan.
    synced: bool,
    shutdown: watch::Receiver<Option<Instant>>,
}

/// The channels to a worker.
struct WorkerHandle {
    /// The pod is admitted, and so uses resources of the node.
    admitted: bool,
    pods: watch::Sender<PodUpdate>,
    sandboxes: mpsc::UnboundedSender<IncomingSandbox>,
}

impl SyncLoop {
    /// Takes the complete list of pods, after the start or an interruption of the watch.
    fn pods_listed(&mut self, mut pods: Vec<Pod>) {
        let listed: HashSet<_> = pods.iter().map(|pod| uid(pod).to_owned()).collect();
        // Pods that were admitted before go first, then new ones by age: they may compete for resources.
        pods.sort_by_key(|pod| {
            let is_new = !was_admitted_before(pod);
            (is_new, pod.metadata.creation_timestamp.clone())
        });
        for pod in pods {
            self.pod_updated(pod);
        }
        let missing: Vec<_> = self
            .workers
            .iter()
            .filter(|(uid, _)| !listed.contains(*uid))
            .map(|(_, worker)| Pod::clone(&worker.pods.borrow().pod))
            .collect();
        for pod in missing {
            self.pod_deleted(pod);
        }
        // Also removes pods whose worker has ended.
        self.shared.pod_manager.retain(&listed);
        if !self.synced {
            let shared = Arc::clone(&self.shared);
            let known = self.workers.keys().chain(self.early_sandboxes.keys());
            let known = known.cloned().collect();
            self.tasks.spawn(remove_orphaned_records(shared, known));
        }
        self.synced = true;
        for (_, sandbox) in std::mem::take(&mut self.early_sandboxes) {
            self.sandbox_connected(sandbox);
        }
    }

    fn pod_updated(&mut self, mut pod: Pod) {
        // Half of a pod's size, and not used here.
        pod.metadata.managed_fields = None;
        let pod = Arc::new(pod);
        let uid = uid(&pod).to_owned();
        self.shared.pod_manager.update_pod(&uid, Arc::clone(&pod));
        match self.workers.get(&uid) {
            Some(worker) => {
                let current = Arc::clone(&worker.pods.borrow().pod);
                let update = self.allocate(&pod, &current);
                worker.pods.send_replace(update);
                let ended = phase(&pod).is_terminal() && !phase(&current).is_terminal();
                // A changed spec may request fewer resources.
                let changed = pod.metadata.generation != current.metadata.generation;
                if ended || changed {
                    self.retry_pending_resizes();
                }
            }
            // The API server only waits for finalizers.
            None if is_fully_terminated(&pod) => {}
            None => self.spawn_worker(uid, pod),
        }
    }

    fn spawn_worker(&mut self, uid: String, pod: Arc<Pod>) {
        let start = if was_admitted_before(&pod) {
            WorkerStart::Adopted
        } else if is_being_deleted(&pod) {
            // It was never started, and will not be: the worker only deletes the object.
            WorkerStart::Admitted
        } else {
            self.admit(&pod)
        };
        self.shared.network.set_pod(&uid, pod.status.as_ref());
        let resolver_guard = ResolverGuard::of(&self.shared, &pod);
        // The allocated resources of an adopted pod are in its status.
        let (pods, pods_receiver) = watch::channel(match start {
            WorkerStart::Adopted => self.allocate(&pod, &resize::with_allocated_resources(&pod)),
            _ => PodUpdate {
                pod,
                deleted: false,
                pending_resize: None,
            },
        });
        let (sandboxes, sandboxes_receiver) = mpsc::unbounded_channel();
        if let Some(early) = self.early_sandboxes.remove(&uid) {
            let _ = sandboxes.send(early);
        }
        let (bundles, bundles_receiver) = watch::channel(None);
        let inputs = WorkerInputs {
            pods: pods_receiver,
            bundles: bundles_receiver,
            sandboxes: sandboxes_receiver,
            shutdown: self.shutdown.clone(),
        };
        let admitted = !matches!(start, WorkerStart::Rejected(_));
        let bundle_task = sync_bundle(Arc::clone(&self.shared), pods.subscribe(), bundles);
        let worker_task = Worker::run(Arc::clone(&self.shared), inputs, start);
        self.workers.insert(
            uid.clone(),
            WorkerHandle {
                admitted,
                pods,
                sandboxes,
            },
        );
        self.tasks.spawn(async move {
            let _resolver_guard = resolver_guard;
            tokio::select! {
                () = worker_task => {}
                () = bundle_task => {}
            }
            Some(uid)
        });
    }

    /// Decides whether to admit a new pod.
    fn admit(&self, pod: &Pod) -> WorkerStart {
        if self.shutdown.borrow().is_some() {
            let message = "Pod was rejected as the node is shutting down.";
            let rejection = PodRejection::new(RejectionReason::NodeShutdown, message);
            return WorkerStart::Rejected(rejection.into());
        }
        match self.shared.admit(pod, &self.others(pod)) {
            Ok(()) => WorkerStart::Admitted,
            Err(rejection) if rejection.reason == RejectionReason::NodeAffinity => {
                WorkerStart::RecheckNodeAffinity(rejection.into())
            }
            Err(rejection) => WorkerStart::Rejected(rejection.into()),
        }
    }

    /// The pods that use the node besides this one. Deleted pods do not count, even if their worker is still cleaning up: the
    /// scheduler may already have assigned their resources to other pods.
    fn others(&self, pod: &Pod) -> Vec<Arc<Pod>> {
        let counts = |worker: &&WorkerHandle| worker.admitted && !worker.pods.borrow().deleted;
        let admitted = self.workers.values().filter(counts);
        admitted
            .map(|worker| Arc::clone(&worker.pods.borrow().pod))
            .filter(|other| !phase(other).is_terminal() && uid(other) != uid(pod))
            .collect()
    }

    /// The update for a worker: the pod with the resources that it gets, which are those of `current` if a resize has to wait.
    fn allocate(&self, pod: &Arc<Pod>, current: &Pod) -> PodUpdate {
        let (pod, pending_resize) = resize::allocate(pod, current, |pod, neighbors| {
            self.shared.check_step_resize(pod, current)?;
            let others = match neighbors {
                Neighbors::None => vec![],
                Neighbors::Current => self.others(pod),
            };
            let checked = self.shared.check_resources(pod, &others);
            checked.map_err(|rejection| rejection.message)
        });
        PodUpdate {
            pod,
            deleted: false,
            pending_resize,
        }
    }

    /// Checks pending resizes again, after resources may have become free.
    fn retry_pending_resizes(&self) {
        for worker in self.workers.values() {
            let current = worker.pods.borrow().clone();
            let is_pending = current.pending_resize.is_some() && !current.deleted;
            let wanted = self.shared.pod_manager.get(uid(&current.pod));
            if let Some(wanted) = wanted.filter(|_| is_pending) {
                let update = self.allocate(&wanted, &current.pod);
                if update.pending_resize != current.pending_resize {
                    worker.pods.send_replace(update);
                }
            }
        }
    }

    fn pod_deleted(&mut self, pod: Pod) {
        let uid = uid(&pod).to_owned();
        self.shared.pod_manager.remove_pod(&uid);
        if let Some(worker) = self.workers.get(&uid) {
            worker.pods.send_replace(PodUpdate {
                pod: Arc::new(pod),
                deleted: true,
                pending_resize: None,
            });
        }
    }

    fn task_ended(&mut self, result: Result<Option<String>, tokio::task::JoinError>) {
        match result {
            Ok(None) => {}
            Ok(Some(uid)) => {
                self.workers.remove(&uid);
                self.shared.network.remove_pod(&uid);
                self.shared.authenticator.forget(&uid);
                self.retry_pending_resizes();
            }
            Err(error) => tracing::error!(
                error = &error as &dyn std::error::Error,
                "pod worker panicked"
            ),
        }
    }

    fn sandbox_connected(&mut self, sandbox: IncomingSandbox) {
        let uid = sandbox.hello.uid.clone();
        match self.workers.get(&uid) {
            Some(worker) => {
                let _ = worker.sandboxes.send(sandbox);
            }
            None if self.synced => {
                tracing::info!(uid, "ending the sandbox of a deleted pod");
                let shared = Arc::clone(&self.shared);
                self.tasks.spawn(end_orphan(shared, sandbox));
            }
            None => {
                self.early_sandboxes.insert(uid, sandbox);
            }
        }
    }
}

/// Removes the records of pods that were deleted while no kubelet ran. A sandbox that is still running removes its own, when it has
/// connected.
async fn remove_orphaned_records(shared: Arc<Shared>, known: HashSet<String>) -> Option<String> {
    for uid in shared.launcher.records().uids().await {
        if known.contains(&uid) || shared.pod_manager.get(&uid).is_some() {
            continue;
        }
        match shared.launcher.find(&uid).await {
            Ok(None) => {
                tracing::info!(uid, "removing leftovers of deleted pod");
                shared.remove_records(&uid).await;
            }
            Ok(Some(_)) => shared.authenticator.await_adoption(&uid),
            Err(error) => {
                tracing::warn!(uid, %error, "cannot look for the sandbox of a deleted pod")
            }
        }
    }
    None
}

/// Ends the sandbox of a deleted pod. Returns the pod's uid.
async fn end_orphan(shared: Arc<Shared>, sandbox: IncomingSandbox) -> Option<String> {
    let IncomingSandbox {
        hello,
        client,
        authenticated,
    } = sandbox;
    let stop = Stop {
        grace_seconds: ORPHAN_GRACE_SECONDS,
        failure: None,
    };
    let stopped = async {
        client.stop(&stop).await?;
        authenticated.confirm();
        let mut states = std::pin::pin!(client.states().await?);
        while let Some(state) = states.try_next().await? {
            if state.finished || !has_started(&state) {
                break;
            }
        }
        Ok::<_, ConnectionError>(())
    };
    // Dismiss the sandbox even after an error: it then kills the remaining containers.
    let _ = tokio::time::timeout(ORPHAN_STOP_TIMEOUT, stopped).await;
    if let Err(error) = client.dismiss().await {
        tracing::warn!(
            error = &error as &dyn std::error::Error,
            "cannot dismiss the sandbox of a deleted pod: killing it"
        );
        if let Ok(Some(mut sandbox)) = shared.launcher.adopt(&hello.id).await {
            sandbox.kill();
            sandbox.ended().await;
            shared.remove_records(&hello.uid).await;
        }
    }
    Some(hello.uid)
}

/// Whether a kubelet has admitted the pod before: then its status has a condition that only kubelets set, also if no sandbox has
/// started yet.
fn was_admitted_before(pod: &Pod) -> bool {
    let Some(status) = &pod.status else {
        return false;
    };
    let mut conditions = status.conditions.iter().flatten();
    let is_admitted = conditions.any(|condition| condition.type_ == "Initialized");
    is_admitted || status.start_time.is_some() || phase(pod).is_terminal()
}

/// Whether the kubelet has nothing more to do for a deleted pod.
fn is_fully_terminated(pod: &Pod) -> bool {
    is_being_deleted(pod)
        && phase(pod).is_terminal()
        && pod.metadata.deletion_grace_period_seconds == Some(0)
}
