//! Names of objects, as shown to the user: `job/train`, `pod/web in staging`.

use std::fmt;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

/// Label of a ReplicaSet's pods. The name of a Deployment's ReplicaSet ends with its value.
const TEMPLATE_HASH: &str = "pod-template-hash";

/// The name of an object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectRef {
    /// `Job`
    pub kind: String,
    /// Empty for objects without a namespace.
    pub namespace: String,
    pub name: String,
}

impl ObjectRef {
    /// The name of an object of this kind.
    pub fn new(kind: &str, namespace: &str, name: &str) -> Self {
        Self {
            kind: kind.to_owned(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        }
    }

    /// The name of a pod.
    pub fn of_pod(pod: &Pod) -> Self {
        Self::new("Pod", &pod.namespace().unwrap_or_default(), &pod.name_any())
    }

    /// The object that a manifest would contain for this pod: its Job, Deployment or other controller, or the pod itself.
    pub fn controller_of(pod: &Pod) -> Self {
        let namespace = pod.namespace().unwrap_or_default();
        let owners = pod.owner_references();
        let Some(owner) = owners.iter().find(|owner| owner.controller == Some(true)) else {
            return Self::of_pod(pod);
        };
        let deployment = pod
            .labels()
            .get(TEMPLATE_HASH)
            .and_then(|hash| owner.name.strip_suffix(&format!("-{hash}")));
        match deployment {
            Some(name) if owner.kind == "ReplicaSet" => Self::new("Deployment", &namespace, name),
            _ => Self::new(&owner.kind, &namespace, &owner.name),
        }
    }

    /// Whether the workload waits for the end of this object.
    pub fn ends(&self) -> bool {
        matches!(self.kind.as_str(), "Job" | "Pod")
    }

    /// Whether the object runs pods until it is deleted.
    pub fn never_ends(&self) -> bool {
        [
            "Deployment",
            "StatefulSet",
            "DaemonSet",
            "ReplicaSet",
            "ReplicationController",
            "CronJob",
        ]
        .contains(&self.kind.as_str())
    }
}

impl fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.kind.to_lowercase(), self.name)?;
        match self.namespace.as_str() {
            "" | "default" => Ok(()),
            namespace => write!(f, " in {namespace}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn controller(owners: Value, labels: Value) -> String {
        let pod: Pod = serde_json::from_value(json!({"metadata": {
            "name": "p", "namespace": "n", "ownerReferences": owners, "labels": labels}}))
        .unwrap();
        ObjectRef::controller_of(&pod).to_string()
    }

    #[test]
    fn controller_is_the_object_of_the_manifest() {
        let owner = |kind: &str, name: &str| json!([{"kind": kind, "name": name, "controller": true, "apiVersion": "", "uid": ""}]);
        assert_eq!(controller(json!([]), json!({})), "pod/p in n");
        assert_eq!(controller(owner("Job", "j"), json!({})), "job/j in n");
        let hash = json!({"pod-template-hash": "5d4f"});
        assert_eq!(
            controller(owner("ReplicaSet", "web-5d4f"), hash.clone()),
            "deployment/web in n"
        );
        assert_eq!(
            controller(owner("ReplicaSet", "other"), hash),
            "replicaset/other in n"
        );
    }
}
