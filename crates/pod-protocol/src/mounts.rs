//! Volume mounts of a container, as both ends report them in its status.

use k8s_openapi::api::core::v1::{VolumeMount, VolumeMountStatus};

/// Whether the mounts below a read-only mount are read-only too. `IfPossible` is the same as `Enabled`, because it always is.
pub fn is_recursive_read_only(mount: &VolumeMount) -> bool {
    let requested = mount.recursive_read_only.as_deref();
    matches!(requested, Some("Enabled" | "IfPossible"))
}

/// The status of a mount.
pub fn mount_status(mount: &VolumeMount) -> VolumeMountStatus {
    let read_only = mount.read_only == Some(true);
    let recursive = match is_recursive_read_only(mount) {
        true => "Enabled",
        false => "Disabled",
    };
    VolumeMountStatus {
        mount_path: mount.mount_path.clone(),
        name: mount.name.clone(),
        read_only: read_only.then_some(true),
        recursive_read_only: read_only.then(|| recursive.to_owned()),
        volume_status: None,
    }
}
