//! Config maps and secrets, each watched for as long as a pod refers to it.
//!
//! The Node authorizer allows a node to list and watch only objects that its pods refer to, one at a time, with the selector
//! `metadata.name=…`. So there is one watch per object, shared by all pods. It may be forbidden for a moment after a pod was
//! bound, until the authorizer knows the pod, so errors are retried.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::TryStreamExt;
use k8s_openapi::NamespaceResourceScope;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::FIRST_SYNC_TIMEOUT;
use crate::backoff::ExponentialBackoff;

/// How long an unused object is still watched: the next pod of a workload often uses it again.
const UNWATCH_DELAY: Duration = Duration::from_secs(60);
const MAX_OBJECT_WATCH_RETRY_DELAY: Duration = Duration::from_secs(5);

/// The state of a watched object.
#[derive(Clone, Debug)]
pub(super) enum ObjectState<K> {
    Present(Arc<K>),
    Missing,
    /// Not received yet, with a message that says why.
    Unknown(String),
}

/// The objects that a pod refers to.
pub(super) struct PodObjects<K> {
    pub objects: BTreeMap<String, ObjectState<K>>,
    /// A change counter of each object.
    pub changes: Vec<watch::Receiver<u64>>,
}

/// All objects of one kind that pods of this node refer to.
pub(super) struct WatchedObjects<K> {
    client: Client,
    /// The kind's name in upstream's messages.
    kind: &'static str,
    entries: Arc<Mutex<HashMap<ObjectKey, WatchedObject<K>>>>,
}

/// Namespace and name.
type ObjectKey = (String, String);

struct WatchedObject<K> {
    state: Arc<Mutex<ObjectState<K>>>,
    /// Counts changes of the state.
    changes: watch::Receiver<u64>,
    /// The uids of the pods that refer to it.
    users: HashSet<String>,
    _watch: AbortOnDropHandle<()>,
}

impl<K> WatchedObjects<K>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    K: Clone + Debug + DeserializeOwned + PartialEq + Send + Sync + 'static,
{
    pub(super) fn new(client: Client, kind: &'static str) -> Self {
        Self {
            client,
            kind,
            entries: Arc::default(),
        }
    }

    /// The objects with these names. References of the pod to other objects are dropped.
    pub(super) async fn get(
        &self,
        uid: &str,
        namespace: &str,
        names: &BTreeSet<String>,
    ) -> PodObjects<K> {
        let watched: Vec<_> = {
            let mut entries = self.entries.lock().unwrap();
            for ((of, name), entry) in entries.iter_mut() {
                if of == namespace && !names.contains(name) {
                    entry.users.remove(uid);
                }
            }
            names
                .iter()
                .map(|name| {
                    let key = (namespace.to_owned(), name.clone());
                    let entry = entries
                        .entry(key)
                        .or_insert_with(|| self.watch(namespace, name));
                    entry.users.insert(uid.to_owned());
                    (
                        name.clone(),
                        Arc::clone(&entry.state),
                        entry.changes.clone(),
                    )
                })
                .collect()
        };
        let deadline = tokio::time::Instant::now() + FIRST_SYNC_TIMEOUT;
        let mut found = PodObjects {
            objects: BTreeMap::new(),
            changes: Vec::new(),
        };
        for (name, state, mut changes) in watched {
            // The first change is the first response.
            let _ =
                tokio::time::timeout_at(deadline, changes.wait_for(|&changes| changes > 0)).await;
            // Marked before reading, so that a later change is noticed.
            changes.mark_unchanged();
            found.objects.insert(name, state.lock().unwrap().clone());
            found.changes.push(changes);
        }
        found
    }

    /// Drops all references of a pod.
    pub(super) fn forget(&self, uid: &str) {
        let mut unused = false;
        for entry in self.entries.lock().unwrap().values_mut() {
            unused |= entry.users.remove(uid) && entry.users.is_empty();
        }
        if unused {
            let entries = Arc::clone(&self.entries);
            tokio::spawn(async move {
                tokio::time::sleep(UNWATCH_DELAY).await;
                entries
                    .lock()
                    .unwrap()
                    .retain(|_, entry| !entry.users.is_empty());
            });
        }
    }

    fn watch(&self, namespace: &str, name: &str) -> WatchedObject<K> {
        let unknown = format!(
            "failed to sync {} cache: timed out waiting for the condition",
            self.kind
        );
        let state = Arc::new(Mutex::new(ObjectState::Unknown(unknown)));
        let (count, changes) = watch::channel(0);
        let api: Api<K> = Api::namespaced(self.client.clone(), namespace);
        let events = watcher::watch_object(api, name)
            .backoff(ExponentialBackoff::up_to(MAX_OBJECT_WATCH_RETRY_DELAY));
        let watched = Arc::clone(&state);
        let label = format!("{} {namespace}/{name}", self.kind);
        let task = async move {
            tokio::pin!(events);
            loop {
                let new = match events.try_next().await {
                    Ok(Some(Some(mut object))) => {
                        // Half of an object's size, and not used here.
                        object.meta_mut().managed_fields = None;
                        ObjectState::Present(Arc::new(object))
                    }
                    Ok(Some(None)) => ObjectState::Missing,
                    Ok(None) => return,
                    Err(error) => {
                        tracing::debug!(
                            object = label,
                            error = &error as &dyn std::error::Error,
                            "cannot watch object"
                        );
                        continue;
                    }
                };
                let changed = !is_same(&watched.lock().unwrap(), &new);
                if changed {
                    *watched.lock().unwrap() = new;
                    count.send_modify(|count| *count += 1);
                }
            }
        };
        WatchedObject {
            state,
            changes,
            users: HashSet::new(),
            _watch: AbortOnDropHandle::new(tokio::spawn(task)),
        }
    }
}

fn is_same<K: Resource + PartialEq>(old: &ObjectState<K>, new: &ObjectState<K>) -> bool {
    match (old, new) {
        (ObjectState::Present(old), ObjectState::Present(new)) => {
            old.meta().uid == new.meta().uid
                && old.meta().resource_version == new.meta().resource_version
        }
        (ObjectState::Missing, ObjectState::Missing) => true,
        _ => false,
    }
}
