//! The StorageClasses of every cluster.

use std::collections::BTreeMap;

use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// The provisioner name for directories on the shared file system.
pub const SHARED: &str = "coracle.dev/shared";
/// The provisioner name for directories on a node's disk.
pub const LOCAL: &str = "coracle.dev/local";

/// `shared`, the default, for any number of pods on any nodes; `local`, on the disk of the first pod's node.
pub fn storage_classes() -> [StorageClass; 2] {
    [
        class("shared", SHARED, "Immediate", true),
        class("local", LOCAL, "WaitForFirstConsumer", false),
    ]
}

fn class(name: &str, provisioner: &str, binding: &str, is_default: bool) -> StorageClass {
    StorageClass {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            annotations: is_default.then(|| {
                let key = "storageclass.kubernetes.io/is-default-class";
                BTreeMap::from([(key.to_owned(), "true".to_owned())])
            }),
            ..Default::default()
        },
        provisioner: provisioner.to_owned(),
        reclaim_policy: Some("Delete".to_owned()),
        volume_binding_mode: Some(binding.to_owned()),
        // Sizes are not enforced, so expansion is free.
        allow_volume_expansion: Some(true),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn storage_classes_of_every_cluster() {
        insta::assert_json_snapshot!(super::storage_classes());
    }
}
