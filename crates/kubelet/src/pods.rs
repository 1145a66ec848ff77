//! The pods bound to this node: known, judged, and acted upon.
//!
//! Containers can't be run yet, so what is done to a pod is small: a new one is refused, one that is to be deleted is
//! removed. [`action`] decides, [`act`] does it; running pods will replace the refusal by a worker per pod, and leave
//! the watch and the removal as they are.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::TryStreamExt;
use k8s_openapi::api::core::v1::{Event, Pod, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use kubelet_api::PodSource;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::api::{CallError, call};
use crate::backoff::Doubling;
use crate::events::pod_warning;

/// Why pods fail here, in the manner of upstream's `PodOSNotSupported`.
const REFUSAL_REASON: &str = "ContainersNotSupported";
/// The same for people.
const REFUSAL_MESSAGE: &str = concat!(
    "Coracle ",
    env!("CARGO_PKG_VERSION"),
    " can't run containers yet"
);
/// How many pods are acted upon at once; each may cost a connection.
const AT_ONCE: usize = 8;
/// How long to wait at most between attempts to watch, or on one pod.
const RETRY_AT_MOST: Duration = Duration::from_secs(2);

/// The pods bound to this node, as the API server last showed them.
#[derive(Debug, Default)]
pub struct KnownPods(Mutex<HashMap<String, Arc<Pod>>>);

impl KnownPods {
    /// No pods yet.
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Pod>>> {
        // The map is whole after every statement, so a panic elsewhere can't have left it half-written.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, uid: &str) -> Option<Arc<Pod>> {
        self.lock().get(uid).cloned()
    }
}

impl PodSource for KnownPods {
    fn pods(&self) -> Vec<Value> {
        let pods: Vec<_> = self.lock().values().cloned().collect();
        // A Pod that came from JSON goes back into it.
        pods.iter()
            .filter_map(|pod| serde_json::to_value(&**pod).ok())
            .collect()
    }
}

/// What a pod needs of this node now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    /// Nothing.
    Leave,
    /// To be told that it can't run here.
    Refuse,
    /// To be brought to an end, so that it can then be removed.
    End,
    /// To be removed from the API: it is to be deleted, and nothing of it is left.
    Remove,
}

/// Judges a pod by what the API server says of it alone.
fn action(pod: &Pod) -> Action {
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    let over = matches!(phase, Some("Failed" | "Succeeded"));
    match (&pod.metadata.deletion_timestamp, over) {
        (None, true) => Action::Leave,
        (None, false) => Action::Refuse,
        // As upstream: the phase is final before the pod goes, for Jobs count by it.
        (Some(_), false) => Action::End,
        // Asked for already; what holds it now is somebody's finalizer.
        (Some(_), true) if pod.metadata.deletion_grace_period_seconds == Some(0) => Action::Leave,
        (Some(_), true) => Action::Remove,
    }
}

/// Follows the pods bound to `node` for ever, keeps `known` current and acts on each.
pub(crate) async fn watch(client: &Client, node: &str, known: &Arc<KnownPods>) {
    // The Node authorizer lets a node list and watch pods with exactly this selector, in all namespaces.
    let bound_here = watcher::Config::default().fields(&format!("spec.nodeName={node}"));
    let events = watcher(Api::<Pod>::all(client.clone()), bound_here)
        .backoff(Doubling::up_to(RETRY_AT_MOST));
    tokio::pin!(events);

    let mut workers = Workers {
        client: client.clone(),
        node: node.to_owned(),
        known: Arc::clone(known),
        room: Arc::new(Semaphore::new(AT_ONCE)),
        busy: HashSet::new(),
        tasks: JoinSet::new(),
    };
    // The pods of a new list, while it comes in: who is not in it at the end is gone.
    let mut listed = HashSet::new();
    loop {
        tokio::select! {
            Some(done) = workers.tasks.join_next() => if let Ok((uid, version)) = done {
                workers.finished(&uid, version.as_deref());
            },
            event = events.try_next() => match event {
                Ok(Some(watcher::Event::Init)) => listed.clear(),
                Ok(Some(watcher::Event::InitApply(pod))) => {
                    listed.extend(pod.metadata.uid.clone());
                    workers.pod_changed(pod);
                }
                Ok(Some(watcher::Event::InitDone)) => known.lock().retain(|uid, _| listed.contains(uid)),
                Ok(Some(watcher::Event::Apply(pod))) => workers.pod_changed(pod),
                Ok(Some(watcher::Event::Delete(pod))) => {
                    known.lock().remove(&pod.metadata.uid.unwrap_or_default());
                }
                Ok(None) => return,
                Err(error) => {
                    tracing::debug!(node, error = &error as &dyn std::error::Error, "watching the node's pods");
                }
            },
        }
    }
}

/// The tasks that act on pods: at most one per pod.
struct Workers {
    client: Client,
    node: String,
    known: Arc<KnownPods>,
    room: Arc<Semaphore>,
    busy: HashSet<String>,
    /// Each ends with the uid and the version of the pod that it acted on.
    tasks: JoinSet<(String, Option<String>)>,
}

impl Workers {
    fn pod_changed(&mut self, mut pod: Pod) {
        let Some(uid) = pod.metadata.uid.clone() else {
            return;
        };
        // Half of a pod's bytes, and of no use to a node.
        pod.metadata.managed_fields = None;
        let pod = Arc::new(pod);
        self.known.lock().insert(uid.clone(), Arc::clone(&pod));
        self.start(uid, pod);
    }

    /// A task is done; if its pod has changed meanwhile, it is judged anew.
    fn finished(&mut self, uid: &str, version: Option<&str>) {
        self.busy.remove(uid);
        if let Some(pod) = self
            .known
            .get(uid)
            .filter(|pod| pod.metadata.resource_version.as_deref() != version)
        {
            self.start(uid.to_owned(), pod);
        }
    }

    fn start(&mut self, uid: String, pod: Arc<Pod>) {
        let action = action(&pod);
        if action == Action::Leave || !self.busy.insert(uid.clone()) {
            return;
        }
        let (client, node) = (self.client.clone(), self.node.clone());
        let (known, room) = (Arc::clone(&self.known), Arc::clone(&self.room));
        self.tasks.spawn(async move {
            let _room = room.acquire().await;
            let mut retry = Doubling::up_to(RETRY_AT_MOST);
            // Until it works, or the pod is gone: the watch shows a pod once, and will not remind us of it.
            while known.get(&uid).is_some() {
                match act(&client, &node, &pod, action).await {
                    Ok(()) => break,
                    Err(error) => {
                        let pod = format!("{}/{}", namespace(&pod), name(&pod));
                        tracing::warn!(
                            pod,
                            ?action,
                            error = &error as &dyn std::error::Error,
                            "will try again"
                        );
                        tokio::time::sleep(retry.wait()).await;
                    }
                }
            }
            (uid, pod.metadata.resource_version.clone())
        });
    }
}

async fn act(client: &Client, node: &str, pod: &Pod, action: Action) -> Result<(), CallError> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace(pod));
    let now = Timestamp::now();
    let done = match action {
        Action::Leave => Ok(()),
        Action::Refuse => refuse(client, &pods, node, pod, now).await,
        Action::End => {
            patch_status(
                &pods,
                pod,
                PodStatus {
                    phase: Some("Failed".to_owned()),
                    ..Default::default()
                },
            )
            .await
        }
        Action::Remove => call(pods.delete(name(pod), &removal(pod)))
            .await
            .map(|_| ()),
    };
    match done {
        // Gone already, or another pod of that name by now: nothing left to do for this one.
        Err(error) if matches!(error.code(), Some(404 | 409)) => Ok(()),
        done => done,
    }
}

async fn refuse(
    client: &Client,
    pods: &Api<Pod>,
    node: &str,
    pod: &Pod,
    now: Timestamp,
) -> Result<(), CallError> {
    patch_status(pods, pod, refusal(pod, now)).await?;
    // The status says it all; an event that gets lost is not worth another attempt.
    let event = pod_warning(pod, node, REFUSAL_REASON, REFUSAL_MESSAGE, now);
    let events: Api<Event> = Api::namespaced(client.clone(), namespace(pod));
    if let Err(error) = call(events.create(&PostParams::default(), &event)).await {
        tracing::debug!(
            pod = name(pod),
            error = &error as &dyn std::error::Error,
            "could not record an event"
        );
    }
    Ok(())
}

/// The status of a pod that this node can't admit, as upstream's kubelet sets it.
fn refusal(pod: &Pod, now: Timestamp) -> PodStatus {
    PodStatus {
        phase: Some("Failed".to_owned()),
        reason: Some(REFUSAL_REASON.to_owned()),
        message: Some(format!("Pod was rejected: {REFUSAL_MESSAGE}")),
        start_time: Some(Time(now)),
        observed_generation: pod.metadata.generation,
        ..Default::default()
    }
}

async fn patch_status(pods: &Api<Pod>, pod: &Pod, status: PodStatus) -> Result<(), CallError> {
    // The uid makes it a precondition: a new pod of the same name is not this pod.
    let patch = json!({ "metadata": { "uid": pod.metadata.uid }, "status": status });
    call(pods.patch_status(name(pod), &PatchParams::default(), &Patch::Strategic(patch)))
        .await
        .map(|_| ())
}

/// Delete this very pod, now: its grace is over, as nothing of it runs.
fn removal(pod: &Pod) -> DeleteParams {
    DeleteParams {
        grace_period_seconds: Some(0),
        preconditions: Some(Preconditions {
            uid: pod.metadata.uid.clone(),
            resource_version: None,
        }),
        ..Default::default()
    }
}

fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

fn namespace(pod: &Pod) -> &str {
    pod.metadata.namespace.as_deref().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(phase: Option<&str>, deleted_with_grace: Option<i64>) -> Pod {
        let mut pod = Pod::default();
        pod.metadata.uid = Some("1234".to_owned());
        pod.metadata.generation = Some(1);
        pod.metadata.deletion_timestamp = deleted_with_grace.map(|_| Time(Timestamp::UNIX_EPOCH));
        pod.metadata.deletion_grace_period_seconds = deleted_with_grace;
        pod.status = Some(PodStatus {
            phase: phase.map(str::to_owned),
            ..Default::default()
        });
        pod
    }

    #[test]
    fn pods_are_judged() {
        assert_eq!(action(&Pod::default()), Action::Refuse);
        assert_eq!(action(&pod(Some("Pending"), None)), Action::Refuse);
        assert_eq!(action(&pod(Some("Running"), None)), Action::Refuse);
        assert_eq!(action(&pod(Some("Failed"), None)), Action::Leave);
        assert_eq!(action(&pod(Some("Succeeded"), None)), Action::Leave);
        assert_eq!(action(&pod(Some("Pending"), Some(30))), Action::End);
        assert_eq!(action(&pod(Some("Failed"), Some(30))), Action::Remove);
        assert_eq!(action(&pod(Some("Succeeded"), Some(30))), Action::Remove);
        assert_eq!(action(&pod(Some("Succeeded"), Some(0))), Action::Leave);
    }

    #[test]
    fn a_refused_pod_says_why() {
        insta::assert_json_snapshot!(refusal(&pod(Some("Pending"), None), Timestamp::UNIX_EPOCH));
    }

    #[test]
    fn known_pods_are_shown_as_objects() {
        let known = KnownPods::new();
        assert!(known.pods().is_empty());
        known
            .lock()
            .insert("1234".to_owned(), Arc::new(pod(Some("Pending"), None)));
        assert_eq!(known.pods()[0]["kind"], "Pod");
    }
}
