//! Persistent volume claims and their volumes.

use std::collections::BTreeMap;
use std::path::PathBuf;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod, Volume};
use kube::{Api, Client};
use tokio::time::Instant;
use volumes::{FsGroupPolicy, HostPathKind, VolumeSource};

use super::{OBJECT_RETRY_INTERVAL, references};
use crate::api_call::{ApiCallError, call_for_bound_pod};

/// A claim that is being deleted may still be used while it has this finalizer.
const PROTECTION: &str = "kubernetes.io/pvc-protection";
/// The annotation with a volume's provisioner.
const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
/// Prefix of Coracle's provisioners. The user owns their volumes, so `fsGroup` can be applied.
const OWN_PROVISIONER_PREFIX: &str = "coracle.dev/";

/// The volume of a bound claim.
#[derive(Clone, Debug)]
pub(super) struct BoundClaim {
    pub volume: PersistentVolume,
    /// The pod's volume is read-only.
    pub read_only: bool,
}

pub(super) struct PodClaims {
    /// By name of the pod's volume.
    pub volumes: BTreeMap<String, Result<BoundClaim, String>>,
    /// When to read them again, if one of them is not bound yet.
    pub refresh_at: Option<Instant>,
}

/// Reads claims and volumes. A node is not allowed to watch them.
pub(super) struct ClaimReader {
    client: Client,
}

impl ClaimReader {
    pub(super) fn new(client: Client) -> Self {
        Self { client }
    }

    pub(super) async fn get(&self, pod: &Pod) -> PodClaims {
        let mut found = PodClaims {
            volumes: BTreeMap::new(),
            refresh_at: None,
        };
        for volume in references::used_volumes(pod) {
            let Some((name, read_only)) = claim_name(pod, volume) else {
                continue;
            };
            let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
            let claimed = self.read(pod, volume, namespace, &name, read_only).await;
            if claimed.is_err() {
                found.refresh_at = Some(Instant::now() + OBJECT_RETRY_INTERVAL);
            }
            let claimed = claimed.map_err(|why| {
                format!(
                    "Unable to attach or mount volumes: unmounted volumes=[{0}], unattached volumes=[], failed to process volumes=[{0}]: error processing PVC {namespace}/{name}: {why}",
                    volume.name
                )
            });
            found.volumes.insert(volume.name.clone(), claimed);
        }
        found
    }

    async fn read(
        &self,
        pod: &Pod,
        volume: &Volume,
        namespace: &str,
        name: &str,
        read_only: bool,
    ) -> Result<BoundClaim, String> {
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), namespace);
        let claim = call_for_bound_pod(|| claims.get(name))
            .await
            .map_err(|error| {
                format!(
                    "failed to fetch PVC from API server: {}",
                    api_message(error)
                )
            })?;
        let bound_to = check_claim(pod, volume, &claim)?;
        let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
        let volume = call_for_bound_pod(|| volumes.get(&bound_to))
            .await
            .map_err(|error| {
                let message = api_message(error);
                format!("failed to fetch PV {bound_to} from API server: {message}")
            })?;
        check_volume(&volume, &claim)?;
        Ok(BoundClaim { volume, read_only })
    }
}

/// The API server's message or, without a response, the error.
fn api_message(error: ApiCallError) -> String {
    match error {
        ApiCallError::Status { message, .. } => message,
        other => other.to_string(),
    }
}

/// The name of a volume's claim, and whether it is read-only. `None` for other volumes.
fn claim_name(pod: &Pod, volume: &Volume) -> Option<(String, bool)> {
    if let Some(claim) = &volume.persistent_volume_claim {
        return Some((claim.claim_name.clone(), claim.read_only.unwrap_or(false)));
    }
    let pod = pod.metadata.name.as_deref().unwrap_or_default();
    volume
        .ephemeral
        .as_ref()
        .map(|_| (format!("{pod}-{}", volume.name), false))
}

/// The name of the volume that a claim is bound to, or why it cannot be used.
fn check_claim(
    pod: &Pod,
    volume: &Volume,
    claim: &PersistentVolumeClaim,
) -> Result<String, String> {
    let metadata = &claim.metadata;
    let protected = metadata
        .finalizers
        .iter()
        .flatten()
        .any(|finalizer| finalizer == PROTECTION);
    if metadata.deletion_timestamp.is_some() && !protected {
        return Err("PVC is being deleted".to_owned());
    }
    let phase = claim
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    if phase != Some("Bound") {
        return Err("PVC is not bound".to_owned());
    }
    let mut owners = metadata.owner_references.iter().flatten();
    let is_owned = owners.any(|owner| {
        owner.controller == Some(true) && Some(&owner.uid) == pod.metadata.uid.as_ref()
    });
    if volume.ephemeral.is_some() && !is_owned {
        let name = |name: &Option<String>| name.clone().unwrap_or_default();
        return Err(format!(
            "PVC {0}/{1} was not created for pod {0}/{2} (pod is not owner)",
            name(&metadata.namespace),
            name(&metadata.name),
            name(&pod.metadata.name),
        ));
    }
    let bound_to = claim
        .spec
        .as_ref()
        .and_then(|spec| spec.volume_name.clone());
    bound_to
        .filter(|name| !name.is_empty())
        .ok_or_else(|| "PVC has empty pvc.Spec.VolumeName".to_owned())
}

fn check_volume(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> Result<(), String> {
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    let reference = volume
        .spec
        .as_ref()
        .and_then(|spec| spec.claim_ref.as_ref());
    let Some(reference) = reference else {
        return Err(format!(
            "found PV object {name} but it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim"
        ));
    };
    if reference.uid != claim.metadata.uid {
        let uid = |uid: &Option<String>| uid.clone().unwrap_or_default();
        return Err(format!(
            "found PV object {name} but its pv.Spec.ClaimRef.UID {} does not point to claim.UID {}",
            uid(&reference.uid),
            uid(&claim.metadata.uid),
        ));
    }
    Ok(())
}

/// Converts the volume of a claim. Fails for types that Coracle does not support.
pub(super) fn claim_source(
    name: &str,
    claimed: &BoundClaim,
    pod: &Pod,
) -> Result<VolumeSource, String> {
    let volume = &claimed.volume;
    let Some(spec) = &volume.spec else {
        return Err(format!("PersistentVolume of volume {name:?} has no spec"));
    };
    if spec.volume_mode.as_deref() == Some("Block") {
        return Err(format!(
            "volume {name} has volumeMode Block, which Coracle does not support: block devices need root"
        ));
    }
    let annotation = |key: &str| volume.metadata.annotations.as_ref()?.get(key).cloned();
    let is_own =
        annotation(PROVISIONED_BY).is_some_and(|by| by.starts_with(OWN_PROVISIONER_PREFIX));
    let ownership = ownership(pod);
    if let Some(host_path) = &spec.host_path {
        if is_own {
            return Ok(VolumeSource::Directory {
                path: PathBuf::from(&host_path.path),
                read_only: claimed.read_only,
                ownership,
                create: false,
            });
        }
        return host_path_source(
            &host_path.path,
            host_path.type_.as_deref(),
            claimed.read_only,
        );
    }
    if let Some(local) = &spec.local {
        return Ok(VolumeSource::Directory {
            path: PathBuf::from(&local.path),
            read_only: claimed.read_only,
            ownership,
            create: is_own,
        });
    }
    if let Some(nfs) = &spec.nfs {
        return Ok(VolumeSource::Nfs {
            server: nfs.server.clone(),
            path: nfs.path.clone(),
            mounted_at: annotation(volumes::MOUNTED_AT_ANNOTATION).map(PathBuf::from),
            read_only: claimed.read_only || nfs.read_only.unwrap_or(false),
        });
    }
    let what = match &spec.csi {
        Some(csi) => format!("the CSI driver {}", csi.driver),
        None => "this type of PersistentVolume".to_owned(),
    };
    Err(format!(
        "MountVolume.SetUp failed for volume {:?} : Coracle does not support {what}; it supports hostPath, local and nfs",
        volume.metadata.name.as_deref().unwrap_or_default()
    ))
}

pub(super) fn host_path_source(
    path: &str,
    kind: Option<&str>,
    read_only: bool,
) -> Result<VolumeSource, String> {
    let kind = kind.unwrap_or_default();
    let kind =
        HostPathKind::from_api(kind).ok_or_else(|| format!("{kind} is an invalid volume type"))?;
    Ok(VolumeSource::HostPath {
        path: PathBuf::from(path),
        kind,
        read_only,
        mapped: None,
    })
}

fn ownership(pod: &Pod) -> FsGroupPolicy {
    let context = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.security_context.as_ref());
    let policy = context.and_then(|context| context.fs_group_change_policy.as_deref());
    match policy {
        Some("OnRootMismatch") => FsGroupPolicy::OnRootMismatch,
        _ => FsGroupPolicy::Always,
    }
}
