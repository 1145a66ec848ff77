//! All pods of this node: each gets a worker, each worker hears what concerns its pod.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures::TryStreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::runtime::{WatchStreamExt, watcher};
use pod_protocol::connection::ConnectionError;
use pod_protocol::{Problem, Stop};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::Shared;
use super::admission::NODE_AFFINITY;
use super::bundles::{Following, resolve_all};
use super::resize;
use super::spec::{is_final, is_to_be_deleted, phase, uid};
use super::switchboard::Caller;
use super::worker::{Beginning, Ears, Seen, Worker, has_begun};
use crate::backoff::Doubling;

/// How long to wait at most between attempts to watch.
const RETRY_AT_MOST: Duration = Duration::from_secs(2);
/// What is kept of the time for a shutdown to write how pods ended.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// What a pod that nobody knows any more gets to end, as upstream.
const ORPHAN_GRACE_SECONDS: i64 = 1;
/// After this it is dismissed all the same.
const ORPHAN_PATIENCE: Duration = Duration::from_secs(10);

/// Follows the pods bound to this node until `shutdown` says until when they have to be gone, then sees them off.
pub(super) async fn manage(
    shared: Arc<Shared>,
    mut sandboxes: mpsc::UnboundedReceiver<Caller>,
    shutdown: impl Future<Output = Instant>,
) {
    // The Node authorizer lets a node list and watch pods with exactly this selector, in all namespaces.
    let bound_here =
        watcher::Config::default().fields(&format!("spec.nodeName={}", shared.config.name));
    let events = watcher(Api::<Pod>::all(shared.client.clone()), bound_here)
        .backoff(Doubling::up_to(RETRY_AT_MOST));
    let (tell_shutdown, shutdown_told) = watch::channel(None);
    let mut manager = Manager {
        shared,
        workers: HashMap::new(),
        tasks: JoinSet::new(),
        early: HashMap::new(),
        listed_once: false,
        shutdown: shutdown_told,
    };
    tokio::pin!(events, shutdown);
    // The pods of a new list, while it comes in: who is not in it at the end is gone.
    let mut list = vec![];
    let mut end = None;
    while end.is_none() || !manager.tasks.is_empty() {
        tokio::select! {
            until = &mut shutdown, if end.is_none() => {
                end = Some(until);
                // Their ends must still be written.
                let left = until.saturating_duration_since(Instant::now());
                tell_shutdown.send_replace(Some(until - (left / 5).min(LAST_WORDS)));
            }
            () = at(end) => return,
            Some(done) = manager.tasks.join_next() => manager.ended(done),
            Some(caller) = sandboxes.recv() => manager.dialled(caller),
            event = events.try_next() => match event {
                Ok(Some(watcher::Event::Init)) => list.clear(),
                Ok(Some(watcher::Event::InitApply(pod))) => list.push(pod),
                Ok(Some(watcher::Event::InitDone)) => manager.listed(std::mem::take(&mut list)),
                Ok(Some(watcher::Event::Apply(pod))) => manager.seen(pod),
                Ok(Some(watcher::Event::Delete(pod))) => manager.gone(pod),
                Ok(None) => return,
                Err(error) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "watching the node's pods");
                }
            },
        }
    }
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}

struct Manager {
    shared: Arc<Shared>,
    /// By uid.
    workers: HashMap<String, Mouths>,
    /// Each ends with the uid that it was for.
    tasks: JoinSet<String>,
    /// Sandboxes that dialled before their pod was seen.
    early: HashMap<String, Caller>,
    /// The API server has shown all pods, so that a sandbox of none of them is an orphan.
    listed_once: bool,
    shutdown: watch::Receiver<Option<Instant>>,
}

/// What a worker is told through.
struct Mouths {
    /// It counts among those who use the node.
    admitted: bool,
    seen: watch::Sender<Seen>,
    connections: mpsc::UnboundedSender<Caller>,
}

impl Manager {
    /// All pods, whole: after the start, and after the watch was interrupted.
    fn listed(&mut self, mut pods: Vec<Pod>) {
        let listed: HashSet<_> = pods.iter().map(|pod| uid(pod).to_owned()).collect();
        // Those that were here before have their place; the others get theirs in the order in which they came.
        pods.sort_by_key(|pod| {
            let is_new = !is_inherited(pod);
            (is_new, pod.metadata.creation_timestamp.clone())
        });
        for pod in pods {
            self.seen(pod);
        }
        let missing: Vec<_> = self
            .workers
            .iter()
            .filter(|(uid, _)| !listed.contains(*uid))
            .map(|(_, mouths)| Pod::clone(&mouths.seen.borrow().pod))
            .collect();
        for pod in missing {
            self.gone(pod);
        }
        // Also those whose worker was done with them.
        self.shared.known.retain(&listed);
        if !self.listed_once {
            self.remove_forgotten();
        }
        self.listed_once = true;
        for (_, caller) in std::mem::take(&mut self.early) {
            self.dialled(caller);
        }
    }

    /// Removes the directories of pods that vanished while there was no kubelet. Those with a sandbox are removed by it.
    fn remove_forgotten(&mut self) {
        let dir = self.shared.config.node_dir.join("pods");
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let uid = entry.file_name().to_string_lossy().into_owned();
            let is_known = self.workers.contains_key(&uid) || self.early.contains_key(&uid);
            if is_known || self.shared.launcher.find(&uid).is_some() {
                continue;
            }
            tracing::info!(uid, "what a pod has left that is no more is removed");
            let shared = Arc::clone(&self.shared);
            self.tasks.spawn(async move {
                shared.remove_dir(&uid).await;
                uid
            });
        }
    }

    fn seen(&mut self, mut pod: Pod) {
        // Half of a pod's bytes, and of no use to a node.
        pod.metadata.managed_fields = None;
        let pod = Arc::new(pod);
        let uid = uid(&pod).to_owned();
        self.shared.known.seen(&uid, Arc::clone(&pod));
        match self.workers.get(&uid) {
            Some(worker) => {
                let has = Arc::clone(&worker.seen.borrow().pod);
                let seen = self.settle(&pod, &has);
                worker.seen.send_replace(seen);
                let ended = is_final(phase(&pod)) && !is_final(phase(&has));
                // Its own resources may be what has changed.
                let changed = pod.metadata.generation != has.metadata.generation;
                if ended || changed {
                    self.settle_waiting();
                }
            }
            // What holds it is somebody's finalizer.
            None if is_removed(&pod) => {}
            None => self.hire(uid, pod),
        }
    }

    fn hire(&mut self, uid: String, pod: Arc<Pod>) {
        let beginning = if is_inherited(&pod) {
            Beginning::Inherited
        } else if is_to_be_deleted(&pod) {
            // Nothing of it was ever started here, and nothing will be.
            Beginning::Admitted
        } else {
            self.judge(&pod)
        };
        let following = Following::of(&self.shared, &pod);
        // Of one that was here before, its status says what it was given.
        let (seen, hear_seen) = watch::channel(match beginning {
            Beginning::Inherited => self.settle(&pod, &resize::as_given(&pod)),
            _ => Seen {
                pod,
                gone: false,
                resize: None,
            },
        });
        let (connections, hear_connections) = mpsc::unbounded_channel();
        if let Some(early) = self.early.remove(&uid) {
            let _ = connections.send(early);
        }
        let (offers, hear_offers) = watch::channel(None);
        let ears = Ears {
            seen: hear_seen,
            offers: hear_offers,
            connections: hear_connections,
            shutdown: self.shutdown.clone(),
        };
        let admitted = !matches!(beginning, Beginning::Refused(_));
        let resolving = resolve_all(Arc::clone(&self.shared), seen.subscribe(), offers);
        let working = Worker::run(Arc::clone(&self.shared), ears, beginning);
        self.workers.insert(
            uid.clone(),
            Mouths {
                admitted,
                seen,
                connections,
            },
        );
        self.tasks.spawn(async move {
            let _following = following;
            tokio::select! {
                () = working => {}
                () = resolving => {}
            }
            uid
        });
    }

    /// Whether a new pod can be taken.
    fn judge(&self, pod: &Pod) -> Beginning {
        if self.shutdown.borrow().is_some() {
            return Beginning::Refused(Problem {
                reason: "NodeShutdown".to_owned(),
                message: "Pod was rejected as the node is shutting down.".to_owned(),
            });
        }
        match self.shared.admit(pod, &self.others(pod)) {
            Ok(()) => Beginning::Admitted,
            Err(problem) if problem.reason == NODE_AFFINITY => Beginning::Doubtful(problem),
            Err(problem) => Beginning::Refused(problem),
        }
    }

    /// Who uses the node beside this pod. What the API server shows no longer has given its place back: the scheduler may have
    /// given it to another already, though we are still clearing up.
    fn others(&self, pod: &Pod) -> Vec<Arc<Pod>> {
        let counts = |mouths: &&Mouths| mouths.admitted && !mouths.seen.borrow().gone;
        let admitted = self.workers.values().filter(counts);
        admitted
            .map(|mouths| Arc::clone(&mouths.seen.borrow().pod))
            .filter(|other| !is_final(phase(other)) && uid(other) != uid(pod))
            .collect()
    }

    /// What a worker sees of a pod that may want other resources than those of `has`.
    fn settle(&self, pod: &Arc<Pod>, has: &Pod) -> Seen {
        let (settled, resize) = resize::settle(pod, has, |pod, beside| {
            self.shared.keeps_to_its_share(pod, has)?;
            let others = if beside { self.others(pod) } else { vec![] };
            self.shared.has_room(pod, &others)
        });
        Seen {
            pod: settled,
            gone: false,
            resize,
        }
    }

    /// Room may have come for those that wait for it.
    fn settle_waiting(&self) {
        for mouths in self.workers.values() {
            let seen = mouths.seen.borrow().clone();
            let waits = seen.resize.is_some() && !seen.gone;
            let wanted = self.shared.known.shown(uid(&seen.pod)).filter(|_| waits);
            if let Some(wanted) = wanted {
                let settled = self.settle(&wanted, &seen.pod);
                if settled.resize != seen.resize {
                    mouths.seen.send_replace(settled);
                }
            }
        }
    }

    fn gone(&mut self, pod: Pod) {
        let uid = uid(&pod).to_owned();
        self.shared.known.gone(&uid);
        if let Some(worker) = self.workers.get(&uid) {
            worker.seen.send_replace(Seen {
                pod: Arc::new(pod),
                gone: true,
                resize: None,
            });
        }
    }

    fn ended(&mut self, done: Result<String, tokio::task::JoinError>) {
        match done {
            Ok(uid) => {
                self.workers.remove(&uid);
                self.settle_waiting();
            }
            Err(error) => tracing::error!(
                error = &error as &dyn std::error::Error,
                "a pod's worker broke"
            ),
        }
    }

    fn dialled(&mut self, caller: Caller) {
        match self.workers.get(&caller.uid) {
            Some(worker) => {
                let _ = worker.connections.send(caller);
            }
            None if self.listed_once => {
                tracing::info!(uid = caller.uid, "a sandbox of a pod that is no more");
                let shared = Arc::clone(&self.shared);
                self.tasks.spawn(see_off(shared, caller));
            }
            None => {
                self.early.insert(caller.uid.clone(), caller);
            }
        }
    }
}

/// Ends a sandbox whose pod is not there any more; the pod's uid.
async fn see_off(shared: Arc<Shared>, caller: Caller) -> String {
    let Caller {
        uid,
        client,
        process,
    } = caller;
    let stop = Stop {
        grace_seconds: ORPHAN_GRACE_SECONDS,
        failure: None,
    };
    let end = async {
        client.stop(&stop).await?;
        let mut states = std::pin::pin!(client.states().await?);
        while let Some(state) = states.try_next().await? {
            if state.finished || !has_begun(&state) {
                break;
            }
        }
        Ok::<_, ConnectionError>(())
    };
    // Whatever came of it: who is dismissed ends what is left at once.
    let _ = tokio::time::timeout(ORPHAN_PATIENCE, end).await;
    if let Err(error) = client.dismiss().await {
        tracing::warn!(
            error = &error as &dyn std::error::Error,
            "could not end a sandbox of a pod that is no more"
        );
        if let Some(mut process) = process {
            process.kill();
            process.exited().await;
            shared.remove_dir(&uid).await;
        }
    }
    uid
}

/// A kubelet has taken it before: its status says when.
fn is_inherited(pod: &Pod) -> bool {
    let started = pod.status.as_ref().and_then(|s| s.start_time.as_ref());
    started.is_some() || is_final(phase(pod))
}

/// All that a kubelet does for the end of a pod is done.
fn is_removed(pod: &Pod) -> bool {
    is_to_be_deleted(pod)
        && is_final(phase(pod))
        && pod.metadata.deletion_grace_period_seconds == Some(0)
}
