//! What the spec says of a pod's volumes, beyond what they are made of. Pure.

use k8s_openapi::api::core::v1::PodSpec;

use crate::life::default_policy;
use crate::seams::ImageRequest;
use pod_protocol::Problem;

/// The image that a volume is, if it is one.
pub fn image(spec: &PodSpec, name: &str) -> Option<ImageRequest> {
    let mut volumes = spec.volumes.iter().flatten();
    let image = volumes.find(|volume| volume.name == name)?.image.as_ref()?;
    let reference = image.reference.clone().unwrap_or_default();
    let policy = image.pull_policy.clone();
    Some(ImageRequest {
        policy: policy.unwrap_or_else(|| default_policy(&reference)),
        reference,
    })
}

/// Whether what a container mounts in a volume is to be seen by others.
pub fn is_shared(spec: &PodSpec, name: &str) -> bool {
    let init = spec.init_containers.iter().flatten();
    let mut mounts = init
        .chain(&spec.containers)
        .flat_map(|container| container.volume_mounts.iter().flatten());
    mounts.any(|mount| {
        mount.name == name && mount.mount_propagation.as_deref() == Some("Bidirectional")
    })
}

/// A volume can't be made.
pub fn failed(name: &str, error: &std::io::Error) -> Problem {
    Problem {
        reason: "FailedMount".to_owned(),
        message: format!("MountVolume.SetUp failed for volume \"{name}\" : {error}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn volumes_are_images_or_shared_by_what_the_spec_says() {
        let spec: PodSpec = serde_json::from_value(json!({
            "volumes": [
                {"name": "i", "image": {"reference": "data:1"}},
                {"name": "l", "image": {"reference": "data", "pullPolicy": "Never"}},
                {"name": "e", "emptyDir": {}},
            ],
            "initContainers": [{"name": "side", "volumeMounts":
                [{"name": "e", "mountPath": "/e", "mountPropagation": "Bidirectional"}]}],
            "containers": [{"name": "c", "volumeMounts":
                [{"name": "i", "mountPath": "/i", "mountPropagation": "HostToContainer"}]}],
        }))
        .unwrap();
        let policy = |name| image(&spec, name).map(|image| image.policy);
        assert_eq!(policy("i").as_deref(), Some("IfNotPresent"));
        assert_eq!(policy("l").as_deref(), Some("Never"));
        assert_eq!((policy("e"), policy("none")), (None, None));
        assert!(is_shared(&spec, "e") && !is_shared(&spec, "i"));
    }
}
