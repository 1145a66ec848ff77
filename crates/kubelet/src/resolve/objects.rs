//! Config maps and secrets, each watched for as long as a pod names it.
//!
//! The Node authorizer lets a node see only objects that its pods name, one at a time: `list` and `watch` with the selector
//! `metadata.name=…`. So there is one watch per object, shared by all pods. It may be refused for a moment after a pod was
//! bound, until the authorizer has heard of it, which is why a refusal is only waited out.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::TryStreamExt;
use k8s_openapi::NamespaceResourceScope;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::PATIENCE;
use crate::backoff::Doubling;

/// How long an object that no pod names any more is still followed: the next pod of a series names it again.
const LINGER: Duration = Duration::from_secs(60);
/// How long to wait at most between attempts to watch.
const RETRY_AT_MOST: Duration = Duration::from_secs(5);

/// What is known of an object.
#[derive(Clone, Debug)]
pub(super) enum Known<K> {
    /// It exists.
    There(Arc<K>),
    /// It does not.
    Missing,
    /// The API server has not said anything yet, for this reason.
    Unknown(String),
}

/// Several objects, and signals that one of them has changed since.
pub(super) struct Answer<K> {
    pub objects: BTreeMap<String, Known<K>>,
    pub signals: Vec<watch::Receiver<u64>>,
}

/// All objects of one kind that pods of this node name.
pub(super) struct Objects<K> {
    client: Client,
    /// As upstream's errors call it.
    kind: &'static str,
    entries: Arc<Mutex<HashMap<Key, Entry<K>>>>,
}

/// Namespace and name.
type Key = (String, String);

struct Entry<K> {
    state: Arc<Mutex<Known<K>>>,
    /// Counts changes of the state.
    changes: watch::Receiver<u64>,
    /// The uids of the pods that name it.
    users: HashSet<String>,
    _watch: AbortOnDropHandle<()>,
}

impl<K> Objects<K>
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

    /// The objects of these names; the pod is taken to name no others from now on.
    pub(super) async fn get(
        &self,
        uid: &str,
        namespace: &str,
        names: &BTreeSet<String>,
    ) -> Answer<K> {
        let followed: Vec<_> = {
            let mut entries = lock(&self.entries);
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
                        .or_insert_with(|| self.follow(namespace, name));
                    entry.users.insert(uid.to_owned());
                    (
                        name.clone(),
                        Arc::clone(&entry.state),
                        entry.changes.clone(),
                    )
                })
                .collect()
        };
        let deadline = tokio::time::Instant::now() + PATIENCE;
        let mut answer = Answer {
            objects: BTreeMap::new(),
            signals: Vec::new(),
        };
        for (name, state, mut changes) in followed {
            // The first change is the first answer.
            let _ =
                tokio::time::timeout_at(deadline, changes.wait_for(|&changes| changes > 0)).await;
            // Seen before it is read, so that a change in between is noticed.
            changes.mark_unchanged();
            answer.objects.insert(name, lock(&state).clone());
            answer.signals.push(changes);
        }
        answer
    }

    /// The pod is gone.
    pub(super) fn forget(&self, uid: &str) {
        let mut unused = false;
        for entry in lock(&self.entries).values_mut() {
            unused |= entry.users.remove(uid) && entry.users.is_empty();
        }
        if unused {
            let entries = Arc::clone(&self.entries);
            tokio::spawn(async move {
                tokio::time::sleep(LINGER).await;
                lock(&entries).retain(|_, entry| !entry.users.is_empty());
            });
        }
    }

    fn follow(&self, namespace: &str, name: &str) -> Entry<K> {
        let unknown = format!(
            "failed to sync {} cache: timed out waiting for the condition",
            self.kind
        );
        let state = Arc::new(Mutex::new(Known::Unknown(unknown)));
        let (count, changes) = watch::channel(0);
        let api: Api<K> = Api::namespaced(self.client.clone(), namespace);
        let events = watcher::watch_object(api, name).backoff(Doubling::up_to(RETRY_AT_MOST));
        let shown = Arc::clone(&state);
        let label = format!("{} {namespace}/{name}", self.kind);
        let task = async move {
            tokio::pin!(events);
            loop {
                let new = match events.try_next().await {
                    Ok(Some(Some(mut object))) => {
                        // Half of an object's bytes, and of no use here.
                        object.meta_mut().managed_fields = None;
                        Known::There(Arc::new(object))
                    }
                    Ok(Some(None)) => Known::Missing,
                    Ok(None) => return,
                    Err(error) => {
                        tracing::debug!(
                            object = label,
                            error = &error as &dyn std::error::Error,
                            "watching"
                        );
                        continue;
                    }
                };
                let changed = !same(&lock(&shown), &new);
                if changed {
                    *lock(&shown) = new;
                    count.send_modify(|count| *count += 1);
                }
            }
        };
        Entry {
            state,
            changes,
            users: HashSet::new(),
            _watch: AbortOnDropHandle::new(tokio::spawn(task)),
        }
    }
}

fn same<K: Resource + PartialEq>(old: &Known<K>, new: &Known<K>) -> bool {
    match (old, new) {
        (Known::There(old), Known::There(new)) => {
            old.meta().uid == new.meta().uid
                && old.meta().resource_version == new.meta().resource_version
        }
        (Known::Missing, Known::Missing) => true,
        _ => false,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is held is whole after every statement, so a panic elsewhere can't have left it half-written.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
