//! The objects of a watch.

use std::collections::{BTreeMap, BTreeSet};

use kube::ResourceExt;
use kube::runtime::watcher::Event;

/// Namespace and name.
type Key = (String, String);

/// The current objects of one kind, kept by the events of a watch.
#[derive(Debug)]
pub struct Tracked<K> {
    objects: BTreeMap<Key, K>,
    /// The objects of a list that is being received. Objects that are not in the complete list were deleted.
    listed: BTreeSet<Key>,
    /// Whether a complete list was received.
    pub is_synced: bool,
}

/// A change of one object.
#[derive(Debug, Clone, PartialEq)]
pub enum ObjectChange<K> {
    Applied(K),
    Deleted(K),
}

impl<K> Default for Tracked<K> {
    fn default() -> Self {
        Self {
            objects: BTreeMap::new(),
            listed: BTreeSet::new(),
            is_synced: false,
        }
    }
}

impl<K: ResourceExt + Clone> Tracked<K> {
    /// The object with this name.
    pub fn get(&self, namespace: &str, name: &str) -> Option<&K> {
        self.objects.get(&(namespace.to_owned(), name.to_owned()))
    }

    /// All objects.
    pub fn iter(&self) -> impl Iterator<Item = &K> {
        self.objects.values()
    }

    /// Applies an event of the watch and returns the changes.
    pub fn handle(&mut self, event: Event<K>) -> Vec<ObjectChange<K>> {
        match event {
            Event::Init => {
                self.listed.clear();
                Vec::new()
            }
            Event::InitApply(object) => {
                self.listed.insert(key(&object));
                vec![self.apply(object)]
            }
            Event::InitDone => {
                self.is_synced = true;
                let listed = std::mem::take(&mut self.listed);
                let missing: Vec<Key> = self
                    .objects
                    .keys()
                    .filter(|key| !listed.contains(*key))
                    .cloned()
                    .collect();
                missing
                    .iter()
                    .filter_map(|key| self.objects.remove(key))
                    .map(ObjectChange::Deleted)
                    .collect()
            }
            Event::Apply(object) => vec![self.apply(object)],
            Event::Delete(object) => {
                self.objects.remove(&key(&object));
                vec![ObjectChange::Deleted(object)]
            }
        }
    }

    fn apply(&mut self, object: K) -> ObjectChange<K> {
        self.objects.insert(key(&object), object.clone());
        ObjectChange::Applied(object)
    }
}

fn key(object: &impl ResourceExt) -> Key {
    (object.namespace().unwrap_or_default(), object.name_any())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use serde_json::json;

    use super::*;

    fn pod(name: &str) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": name, "namespace": "n"}})).unwrap()
    }

    #[test]
    fn objects_missing_from_a_new_list_were_deleted() {
        let mut pods = Tracked::default();
        pods.handle(Event::Init);
        pods.handle(Event::InitApply(pod("a")));
        pods.handle(Event::InitApply(pod("b")));
        assert!(!pods.is_synced);
        assert_eq!(pods.handle(Event::InitDone), []);
        assert!(pods.is_synced);
        pods.handle(Event::Apply(pod("c")));
        pods.handle(Event::Init);
        pods.handle(Event::InitApply(pod("b")));
        let deleted = [pod("a"), pod("c")].map(ObjectChange::Deleted);
        assert_eq!(pods.handle(Event::InitDone), deleted);
        assert!(pods.get("n", "b").is_some() && pods.get("n", "a").is_none());
        assert_eq!(pods.iter().count(), 1);
    }
}
