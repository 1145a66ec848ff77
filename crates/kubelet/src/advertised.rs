//! Extended resources that somebody else has written into the Node's capacity: as upstream's kubelet, ours makes them
//! allocatable, which is all that the scheduler looks at.
//!
//! <https://kubernetes.io/docs/tasks/administer-cluster/extended-resource-node/>

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Map, Value, json};

/// What is missing in the Node's allocatable resources, or too much there, beside the node's `own`: a merge patch of its status.
pub(crate) fn patch(node: &Node, own: &BTreeMap<String, Quantity>) -> Option<Value> {
    let none = BTreeMap::new();
    let status = node.status.as_ref()?;
    let capacity = status.capacity.as_ref().unwrap_or(&none);
    let allocatable = status.allocatable.as_ref().unwrap_or(&none);
    let missing = capacity
        .iter()
        .filter(|(name, amount)| allocatable.get(*name) != Some(amount))
        .map(|(name, amount)| (name, json!(amount)));
    let too_much = allocatable
        .keys()
        .filter(|name| !capacity.contains_key(*name))
        .map(|name| (name, Value::Null));
    let changes: Map<_, _> = missing
        .chain(too_much)
        .filter(|(name, _)| !own.contains_key(*name))
        .map(|(name, amount)| (name.clone(), amount))
        .collect();
    (!changes.is_empty()).then(|| json!({ "status": { "allocatable": changes } }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_add_to_the_capacity_becomes_allocatable() {
        let own = BTreeMap::from([("cpu".to_owned(), Quantity("4".to_owned()))]);
        let patch = |capacity: Value, allocatable: Value| {
            let node = json!({ "status": { "capacity": capacity, "allocatable": allocatable } });
            patch(&serde_json::from_value(node).unwrap(), &own)
        };
        assert_eq!(patch(json!({ "cpu": "4" }), json!({ "cpu": "4" })), None);
        // The node's own are not for others to change.
        assert_eq!(patch(json!({ "cpu": "5" }), json!({ "cpu": "4" })), None);
        let added = patch(
            json!({ "cpu": "4", "a/b": "7", "c/d": "1" }),
            json!({ "cpu": "4", "c/d": "1" }),
        );
        assert_eq!(
            added,
            Some(json!({ "status": { "allocatable": { "a/b": "7" } } }))
        );
        let taken = patch(json!({ "cpu": "4" }), json!({ "cpu": "4", "a/b": "7" }));
        assert_eq!(
            taken,
            Some(json!({ "status": { "allocatable": { "a/b": null } } }))
        );
    }
}
