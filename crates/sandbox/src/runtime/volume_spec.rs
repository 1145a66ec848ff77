//! Properties of volumes that follow from the pod's spec. Pure.

use k8s_openapi::api::core::v1::PodSpec;
use pod_protocol::Problem;

use crate::container_runtime::{ImagePullPolicy, ImageRequest};

/// The image of an image volume.
pub fn image(spec: &PodSpec, name: &str) -> Option<ImageRequest> {
    let mut volumes = spec.volumes.iter().flatten();
    let image = volumes.find(|volume| volume.name == name)?.image.as_ref()?;
    let reference = image.reference.clone().unwrap_or_default();
    let policy = ImagePullPolicy::from_spec(image.pull_policy.as_deref(), &reference);
    Some(ImageRequest { reference, policy })
}

/// Whether a container mounts the volume with `mountPropagation: Bidirectional`.
pub fn is_shared(spec: &PodSpec, name: &str) -> bool {
    let init = spec.init_containers.iter().flatten();
    let mut mounts = init
        .chain(&spec.containers)
        .flat_map(|container| container.volume_mounts.iter().flatten());
    mounts.any(|mount| {
        mount.name == name && mount.mount_propagation.as_deref() == Some("Bidirectional")
    })
}

/// The problem of a volume that cannot be mounted, with upstream's text.
pub fn mount_problem(name: &str, error: &std::io::Error) -> Problem {
    Problem::new(
        "FailedMount",
        format!("MountVolume.SetUp failed for volume \"{name}\" : {error}"),
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn image_and_shared_volumes_are_recognised() {
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
        assert_eq!(policy("i"), Some(ImagePullPolicy::IfNotPresent));
        assert_eq!(policy("l"), Some(ImagePullPolicy::Never));
        assert_eq!((policy("e"), policy("none")), (None, None));
        assert!(is_shared(&spec, "e") && !is_shared(&spec, "i"));
    }
}
