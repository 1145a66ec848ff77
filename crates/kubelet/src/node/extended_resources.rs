//! Extended resources that another program has added to the Node's capacity. The scheduler only looks at allocatable
//! resources, so the kubelet copies them there, as upstream's does.
//!
//! <https://kubernetes.io/docs/tasks/administer-cluster/extended-resource-node/>

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Map, Value, json};

/// A merge patch that makes the Node's allocatable resources equal to its capacity. The kubelet's `own` resources are left alone.
pub(super) fn allocatable_patch(node: &Node, own: &BTreeMap<String, Quantity>) -> Option<Value> {
    let none = BTreeMap::new();
    let status = node.status.as_ref()?;
    let capacity = status.capacity.as_ref().unwrap_or(&none);
    let allocatable = status.allocatable.as_ref().unwrap_or(&none);
    let missing = capacity
        .iter()
        .filter(|(name, amount)| allocatable.get(*name) != Some(amount))
        .map(|(name, amount)| (name, json!(amount)));
    let stale = allocatable
        .keys()
        .filter(|name| !capacity.contains_key(*name))
        .map(|name| (name, Value::Null));
    let changes: Map<_, _> = missing
        .chain(stale)
        .filter(|(name, _)| !own.contains_key(*name))
        .map(|(name, amount)| (name.clone(), amount))
        .collect();
    (!changes.is_empty()).then(|| json!({ "status": { "allocatable": changes } }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacity_added_by_others_becomes_allocatable() {
        let own = BTreeMap::from([("cpu".to_owned(), Quantity("4".to_owned()))]);
        let patch = |capacity: Value, allocatable: Value| {
            let node = json!({ "status": { "capacity": capacity, "allocatable": allocatable } });
            allocatable_patch(&serde_json::from_value(node).unwrap(), &own)
        };
        assert_eq!(patch(json!({ "cpu": "4" }), json!({ "cpu": "4" })), None);
        // Other programs cannot change the node's own resources.
        assert_eq!(patch(json!({ "cpu": "5" }), json!({ "cpu": "4" })), None);
        let added = patch(
            json!({ "cpu": "4", "a/b": "7", "c/d": "1" }),
            json!({ "cpu": "4", "c/d": "1" }),
        );
        assert_eq!(
            added,
            Some(json!({ "status": { "allocatable": { "a/b": "7" } } }))
        );
        let removed = patch(json!({ "cpu": "4" }), json!({ "cpu": "4", "a/b": "7" }));
        assert_eq!(
            removed,
            Some(json!({ "status": { "allocatable": { "a/b": null } } }))
        );
    }
}
