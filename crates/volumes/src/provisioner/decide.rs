//! The decisions for claims and volumes, and the new PersistentVolumes. Pure functions.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{
    HostPathVolumeSource, LocalVolumeSource, Node, NodeSelector, NodeSelectorRequirement,
    NodeSelectorTerm, ObjectReference, PersistentVolume, PersistentVolumeClaim,
    PersistentVolumeSpec, VolumeNodeAffinity,
};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

use super::shared_dir::DiskSpace;
use super::{LOCAL, SHARED};

/// Annotation of a Node: its directory for `local` volumes.
pub const SCRATCH_ANNOTATION: &str = "coracle.dev/scratch";
/// Annotation of a Node: the names of `local` volumes that the node shall remove, separated by commas.
pub const REMOVE_VOLUMES_ANNOTATION: &str = "coracle.dev/remove-volumes";

/// Annotation of a claim: its provisioner, set by the controller manager.
const PROVISIONER: &str = "volume.kubernetes.io/storage-provisioner";
/// Annotation of a claim: the node of its first pod, set by the scheduler.
const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
/// Annotation of a volume: its provisioner.
const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
/// Annotation of a volume: the size of its file system at creation, as information. Volume sizes are not enforced.
const TOTAL_BYTES: &str = "coracle.dev/filesystem-bytes";
/// Annotation of a volume: the free space of its file system at creation.
const AVAILABLE_BYTES: &str = "coracle.dev/filesystem-available-bytes";
/// Annotation of a `local` volume: its node.
const ON_NODE: &str = "coracle.dev/node";
/// Annotation of a `local` volume: its node was requested to remove it.
const REMOVAL_REQUESTED: &str = "coracle.dev/removal-asked";

const HOSTNAME: &str = "kubernetes.io/hostname";

/// The action for a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// None: the claim has another provisioner, is bound, or waits for its first pod.
    Nothing,
    /// Reject: the claim asks for an unsupported feature.
    Reject(String),
    /// Provision a volume.
    Provision(VolumeLocation),
}

/// The file system of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum VolumeLocation {
    /// The shared file system.
    Shared,
    /// A node's disk.
    Local { node: String },
}

pub(super) fn decide_claim(claim: &PersistentVolumeClaim) -> Decision {
    let Some(spec) = &claim.spec else {
        return Decision::Nothing;
    };
    if bound_to(claim).is_some() || claim.metadata.deletion_timestamp.is_some() {
        return Decision::Nothing;
    }
    let location = match annotation(&claim.metadata, PROVISIONER) {
        Some(SHARED) => VolumeLocation::Shared,
        Some(LOCAL) => match annotation(&claim.metadata, SELECTED_NODE) {
            Some(node) => VolumeLocation::Local {
                node: node.to_owned(),
            },
            None => return Decision::Nothing,
        },
        _ => return Decision::Nothing,
    };
    if spec.volume_mode.as_deref() == Some("Block") {
        return Decision::Reject("block volumes are not supported".to_owned());
    }
    if spec.selector.is_some() {
        return Decision::Reject("claim Selector is not supported".to_owned());
    }
    if spec.data_source.is_some() || spec.data_source_ref.is_some() {
        return Decision::Reject("claim DataSource is not supported".to_owned());
    }
    Decision::Provision(location)
}

/// Rejects a class with settings that would have no effect.
pub(super) fn check_class(class: &StorageClass) -> Result<(), String> {
    let name = class.metadata.name.as_deref().unwrap_or_default();
    if let Some(parameter) = class.parameters.iter().flat_map(BTreeMap::keys).next() {
        return Err(format!(
            "StorageClass {name:?} has the parameter {parameter:?}, but {} supports no parameters",
            class.provisioner
        ));
    }
    match class.mount_options.as_deref().unwrap_or_default() {
        [] => Ok(()),
        options => Err(format!(
            "StorageClass {name:?} has the mount options {options:?}, but {} supports no mount options",
            class.provisioner
        )),
    }
}

/// Rejects a claim for more than the free space.
pub(super) fn check_free_space(
    claim: &PersistentVolumeClaim,
    space: DiskSpace,
) -> Result<(), String> {
    let requested = requested(claim).as_ref().and_then(quantity::bytes);
    check_available(requested.unwrap_or_default(), space)
}

/// Checks that the shared file system has this many free bytes.
pub(super) fn check_available(bytes: u64, space: DiskSpace) -> Result<(), String> {
    if bytes <= space.available {
        return Ok(());
    }
    Err(format!(
        "{bytes} bytes are requested, but only {} of {} are free on the shared file system",
        rounded(space.available),
        rounded(space.total)
    ))
}

/// Rounded to the largest unit, so that small changes of the free space do not cause a new Event.
fn rounded(bytes: u64) -> String {
    let units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let power = (bytes.max(1).ilog2() / 10) as usize;
    format!("{} {}", bytes >> (10 * power), units[power])
}

/// Rejects a claim for more than the size of a node's disk. Only the node knows its free space.
pub(super) fn check_node_disk(claim: &PersistentVolumeClaim, node: &Node) -> Result<(), String> {
    let requested = requested(claim).as_ref().and_then(quantity::bytes);
    match (requested, disk_size(node)) {
        (Some(bytes), Some(total)) if bytes > total => Err(format!(
            "{bytes} bytes are requested, but the disk of node {:?} has {total}",
            node.metadata.name.as_deref().unwrap_or_default()
        )),
        _ => Ok(()),
    }
}

/// The size of a node's disk in bytes.
fn disk_size(node: &Node) -> Option<u64> {
    let capacity = node.status.as_ref()?.capacity.as_ref()?;
    quantity::bytes(capacity.get("ephemeral-storage")?)
}

/// The patch that makes the scheduler select another node.
pub(super) fn unselect_node_patch() -> Value {
    json!({ "metadata": { "annotations": { SELECTED_NODE: null } } })
}

/// The requested expansion of a volume.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Expansion {
    /// The additional bytes.
    pub by: u64,
    /// The new size.
    pub to: Quantity,
}

pub(super) fn expansion(
    claim: &PersistentVolumeClaim,
    volume: &PersistentVolume,
) -> Option<Expansion> {
    let reference = volume.spec.as_ref()?.claim_ref.as_ref()?;
    let is_bound_to_claim = reference.uid.is_some() && reference.uid == claim.metadata.uid;
    let is_provisioned_here = matches!(
        annotation(&volume.metadata, PROVISIONED_BY),
        Some(SHARED | LOCAL)
    );
    if !is_bound_to_claim || !is_provisioned_here || claim.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let to = requested(claim)?;
    let current = claim.status.as_ref()?.capacity.as_ref()?.get("storage")?;
    let by = quantity::bytes(&to)?.checked_sub(quantity::bytes(current)?)?;
    (by > 0).then_some(Expansion { by, to })
}

/// The volume that a claim is bound to.
pub(super) fn bound_to(claim: &PersistentVolumeClaim) -> Option<&str> {
    let name = claim.spec.as_ref()?.volume_name.as_deref()?;
    Some(name).filter(|name| !name.is_empty())
}

/// The name that upstream's controllers expect. It also prevents a second volume for the same claim.
pub(super) fn volume_name(claim: &PersistentVolumeClaim) -> String {
    format!("pvc-{}", claim.metadata.uid.as_deref().unwrap_or_default())
}

pub(super) fn class_name(claim: &PersistentVolumeClaim) -> &str {
    let spec = claim.spec.as_ref();
    spec.and_then(|spec| spec.storage_class_name.as_deref())
        .unwrap_or_default()
}

pub(super) fn shared_volume(
    claim: &PersistentVolumeClaim,
    class: &StorageClass,
    path: &Path,
    space: DiskSpace,
) -> PersistentVolume {
    let mut volume = volume(claim, class, SHARED);
    let annotations = volume.metadata.annotations.get_or_insert_default();
    annotations.insert(TOTAL_BYTES.to_owned(), space.total.to_string());
    annotations.insert(AVAILABLE_BYTES.to_owned(), space.available.to_string());
    let spec = volume.spec.get_or_insert_default();
    spec.host_path = Some(HostPathVolumeSource {
        path: path.display().to_string(),
        type_: Some("Directory".to_owned()),
    });
    volume
}

pub(super) fn local_volume(
    claim: &PersistentVolumeClaim,
    class: &StorageClass,
    node: &Node,
    name: &str,
) -> Result<PersistentVolume, String> {
    let node_name = node.metadata.name.as_deref().unwrap_or_default();
    let scratch = annotation(&node.metadata, SCRATCH_ANNOTATION)
        .ok_or_else(|| format!("node {node_name:?} has no directory for local volumes"))?;
    let labels = node.metadata.labels.as_ref();
    let hostname = labels.and_then(|labels| labels.get(HOSTNAME));
    let mut volume = volume(claim, class, LOCAL);
    let annotations = volume.metadata.annotations.get_or_insert_default();
    annotations.insert(ON_NODE.to_owned(), node_name.to_owned());
    annotations.extend(disk_size(node).map(|total| (TOTAL_BYTES.to_owned(), total.to_string())));
    let spec = volume.spec.get_or_insert_default();
    spec.local = Some(LocalVolumeSource {
        path: Path::new(scratch).join(name).display().to_string(),
        fs_type: None,
    });
    spec.node_affinity = Some(VolumeNodeAffinity {
        required: Some(NodeSelector {
            node_selector_terms: vec![NodeSelectorTerm {
                match_expressions: Some(vec![NodeSelectorRequirement {
                    key: HOSTNAME.to_owned(),
                    operator: "In".to_owned(),
                    values: Some(vec![hostname.map_or(node_name, String::as_str).to_owned()]),
                }]),
                ..Default::default()
            }],
        }),
    });
    Ok(volume)
}

/// The common part of `shared` and `local` volumes.
fn volume(claim: &PersistentVolumeClaim, class: &StorageClass, by: &str) -> PersistentVolume {
    let spec = claim.spec.clone().unwrap_or_default();
    let capacity = requested(claim).unwrap_or_else(|| Quantity("0".to_owned()));
    PersistentVolume {
        metadata: ObjectMeta {
            name: Some(volume_name(claim)),
            annotations: Some(BTreeMap::from([(PROVISIONED_BY.to_owned(), by.to_owned())])),
            ..Default::default()
        },
        spec: Some(PersistentVolumeSpec {
            access_modes: spec.access_modes,
            capacity: Some(BTreeMap::from([("storage".to_owned(), capacity)])),
            claim_ref: Some(ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("PersistentVolumeClaim".to_owned()),
                name: claim.metadata.name.clone(),
                namespace: claim.metadata.namespace.clone(),
                uid: claim.metadata.uid.clone(),
                resource_version: claim.metadata.resource_version.clone(),
                ..Default::default()
            }),
            persistent_volume_reclaim_policy: class.reclaim_policy.clone(),
            storage_class_name: spec.storage_class_name,
            volume_mode: Some("Filesystem".to_owned()),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn requested(claim: &PersistentVolumeClaim) -> Option<Quantity> {
    let resources = claim.spec.as_ref()?.resources.as_ref()?;
    resources.requests.as_ref()?.get("storage").cloned()
}

/// The location of a volume whose claim is deleted and whose directory shall be removed.
pub(super) fn removal_location(volume: &PersistentVolume) -> Option<VolumeLocation> {
    let phase = volume
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    let is_released = matches!(phase, Some("Released" | "Failed"));
    // A deletion timestamp means that only a finalizer is pending: the directory was removed already, or a user deletes the
    // volume.
    if !is_released
        || !is_deleted_with_claim(volume)
        || volume.metadata.deletion_timestamp.is_some()
    {
        return None;
    }
    location(volume)
}

/// The location of a volume that this provisioner made.
pub(super) fn location(volume: &PersistentVolume) -> Option<VolumeLocation> {
    match annotation(&volume.metadata, PROVISIONED_BY) {
        Some(SHARED) => Some(VolumeLocation::Shared),
        Some(LOCAL) => Some(VolumeLocation::Local {
            node: annotation(&volume.metadata, ON_NODE)?.to_owned(),
        }),
        _ => None,
    }
}

/// Whether the volume's directory is removed with its claim or with the cluster.
pub(super) fn is_deleted_with_claim(volume: &PersistentVolume) -> bool {
    let spec = volume.spec.as_ref();
    let policy = spec.and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
    policy == Some("Delete")
}

/// The directory of a volume.
pub(super) fn path(volume: &PersistentVolume) -> Option<PathBuf> {
    let spec = volume.spec.as_ref()?;
    let shared = spec.host_path.as_ref().map(|source| &source.path);
    let local = spec.local.as_ref().map(|source| &source.path);
    shared.or(local).map(PathBuf::from)
}

/// The progress of a `local` volume's removal by its node.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum NodeRemoval {
    /// Request it: apply the patch of the Node, then the patch that records the request on the volume.
    Request { volume: Value, node: Value },
    /// Requested, but not removed yet.
    Pending,
    /// Removed.
    Done,
}

pub(super) fn node_removal(volume: &PersistentVolume, node: &Node) -> NodeRemoval {
    let path = path(volume).unwrap_or_default();
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
        return NodeRemoval::Done;
    };
    let scratch = annotation(&node.metadata, SCRATCH_ANNOTATION);
    if scratch.map(Path::new) != path.parent() {
        // A new agent of this node has a new scratch directory. The old one was removed with its agent.
        return NodeRemoval::Done;
    }
    let mut names = requested_removals(node);
    if names.iter().any(|listed| listed == name) {
        return NodeRemoval::Pending;
    }
    if annotation(&volume.metadata, REMOVAL_REQUESTED).is_some() {
        // The node has removed it from the list.
        return NodeRemoval::Done;
    }
    names.push(name.to_owned());
    NodeRemoval::Request {
        volume: json!({ "metadata": { "annotations": { REMOVAL_REQUESTED: "true" } } }),
        node: json!({
            "metadata": {
                "resourceVersion": node.metadata.resource_version,
                "annotations": { REMOVE_VOLUMES_ANNOTATION: names.join(",") },
            },
        }),
    }
}

/// The names of the directories that a node shall remove from its scratch directory.
pub fn requested_removals(node: &Node) -> Vec<String> {
    let listed = annotation(&node.metadata, REMOVE_VOLUMES_ANNOTATION).unwrap_or_default();
    // Only names of the provisioner's form, which cannot leave the scratch directory.
    let is_generated =
        |name: &&str| name.len() == 32 && name.bytes().all(|b| b.is_ascii_hexdigit());
    listed
        .split(',')
        .filter(is_generated)
        .map(str::to_owned)
        .collect()
}

fn annotation<'a>(metadata: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    let value = metadata.annotations.as_ref()?.get(key)?;
    Some(value.as_str()).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests;
