//! Converts the volumes of a pod to sources for its sandbox, with upstream's error messages.

use k8s_openapi::api::core::v1::{EmptyDirVolumeSource, Pod, Volume};
use pod_protocol::restart::is_sidecar;
use quantity::{Amount, bytes};
use volumes::content::{ContentError, KeySelection, config_map, downward_api, projected, secret};
use volumes::{Payload, VolumeSource};

use super::references::{ObjectReferences, nested_mount_points};
use super::{ResolveInputs, claims};

/// The source of a volume; the error is a message for an Event of reason `FailedMount`.
pub(super) fn volume_source(
    volume: &Volume,
    inputs: &ResolveInputs,
) -> Result<VolumeSource, String> {
    let failed = |why: &dyn std::fmt::Display| {
        format!(
            "MountVolume.SetUp failed for volume {:?} : {why}",
            volume.name
        )
    };
    let names = ObjectReferences::of_volume(volume);
    let unknown_config_map = names
        .config_maps
        .iter()
        .find_map(|name| inputs.unknown_config_maps.get(name));
    let unknown_secret = names
        .secrets
        .iter()
        .find_map(|name| inputs.unknown_secrets.get(name));
    if let Some(why) = unknown_config_map.or(unknown_secret) {
        return Err(failed(why));
    }
    if let Some(files) = files(volume, inputs) {
        let payload = files.map_err(|error| failed(&error))?;
        return Ok(VolumeSource::Files(Payload {
            mount_points: nested_mount_points(&inputs.volumes.pod, &volume.name),
            ..payload
        }));
    }
    if let Some(claimed) = inputs.claims.get(&volume.name) {
        let claimed = claimed.as_ref().map_err(Clone::clone)?;
        return claims::claim_source(&volume.name, claimed, &inputs.volumes.pod);
    }
    if let Some(source) = &volume.empty_dir {
        return empty_dir(source, inputs).map_err(|why| failed(&why));
    }
    if let Some(source) = &volume.host_path {
        let source = claims::host_path_source(&source.path, source.type_.as_deref(), false);
        return source.map_err(|why| failed(&why));
    }
    if let Some(source) = &volume.image {
        return Ok(VolumeSource::Image {
            reference: source.reference.clone().unwrap_or_default(),
        });
    }
    if let Some(source) = &volume.nfs {
        return Ok(VolumeSource::Nfs {
            server: source.server.clone(),
            path: source.path.clone(),
            mounted_at: None,
            read_only: source.read_only.unwrap_or(false),
        });
    }
    let what = match &volume.csi {
        Some(csi) => format!("the CSI driver {}", csi.driver),
        None => "volumes of this type".to_owned(),
    };
    Err(failed(&format!("Coracle does not support {what}")))
}

/// The files of a volume with content from API objects. `None` for other volumes.
fn files(volume: &Volume, inputs: &ResolveInputs) -> Option<Result<Payload, ContentError>> {
    let objects = &inputs.volumes;
    if let Some(source) = &volume.config_map {
        let selection = KeySelection {
            name: &source.name,
            items: source.items.as_deref(),
            default_mode: source.default_mode,
            optional: source.optional.unwrap_or(false),
        };
        let object = objects.config_maps.get(&source.name).map(AsRef::as_ref);
        return Some(config_map(selection, object));
    }
    if let Some(source) = &volume.secret {
        let name = source.secret_name.as_deref().unwrap_or_default();
        let selection = KeySelection {
            name,
            items: source.items.as_deref(),
            default_mode: source.default_mode,
            optional: source.optional.unwrap_or(false),
        };
        return Some(secret(
            selection,
            objects.secrets.get(name).map(AsRef::as_ref),
        ));
    }
    if let Some(source) = &volume.downward_api {
        let items = source.items.as_deref().unwrap_or_default();
        return Some(downward_api(
            items,
            source.default_mode,
            &objects.pod,
            &objects.allocatable,
        ));
    }
    let source = volume.projected.as_ref()?;
    Some(projected(&volume.name, source, objects))
}

fn empty_dir(
    source: &EmptyDirVolumeSource,
    inputs: &ResolveInputs,
) -> Result<VolumeSource, String> {
    let size_limit = source
        .size_limit
        .as_ref()
        .and_then(bytes)
        .filter(|&limit| limit > 0);
    match source.medium.as_deref().unwrap_or_default() {
        "" => Ok(VolumeSource::EmptyDir {
            memory: false,
            size_limit,
        }),
        // A volume in memory is limited by the memory of the pod and of the node.
        "Memory" => {
            let node = inputs.volumes.allocatable.get("memory").and_then(bytes);
            let pod = memory_limit(&inputs.volumes.pod);
            Ok(VolumeSource::EmptyDir {
                memory: true,
                size_limit: [size_limit, node, pod]
                    .into_iter()
                    .flatten()
                    .filter(|&limit| limit > 0)
                    .min(),
            })
        }
        medium if medium.starts_with("HugePages") => Err(
            "Coracle does not support emptyDir on huge pages: mounting them needs root".to_owned(),
        ),
        medium => Err(format!("unknown storage medium {medium:?}")),
    }
}

/// The memory limit of the whole pod, if every container has one.
fn memory_limit(pod: &Pod) -> Option<u64> {
    let spec = pod.spec.as_ref()?;
    let limit = |resources: Option<&k8s_openapi::api::core::v1::ResourceRequirements>| {
        let limit = resources?.limits.as_ref()?.get("memory")?;
        Amount::of(limit)
            .map(Amount::value)
            .filter(|&limit| limit > 0)
    };
    if let Some(whole) = limit(spec.resources.as_ref()) {
        return u64::try_from(whole).ok();
    }
    let mut running: i64 = 0;
    for container in &spec.containers {
        running = running.saturating_add(limit(container.resources.as_ref())?);
    }
    let mut max = running;
    for container in spec.init_containers.iter().flatten() {
        let limit = limit(container.resources.as_ref())?;
        if is_sidecar(container) {
            running = running.saturating_add(limit);
            max = max.saturating_add(limit);
        } else {
            max = max.max(limit);
        }
    }
    u64::try_from(max.max(running)).ok()
}
