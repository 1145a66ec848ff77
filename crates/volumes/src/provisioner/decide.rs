//! What a claim or a volume needs, and what new volumes look like. Pure.

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

use super::place::Room;
use super::{LOCAL, SHARED};

/// Where a node keeps `local` volumes: an annotation of the Node.
pub const SCRATCH: &str = "coracle.dev/scratch";
/// Which of them a node is to remove, by name and separated by commas: an annotation of the Node.
pub const REMOVE: &str = "coracle.dev/remove-volumes";

/// Who is to provision a claim, set by the controller manager.
const PROVISIONER: &str = "volume.kubernetes.io/storage-provisioner";
/// Where the first pod of a claim goes, set by the scheduler.
const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
/// Who has provisioned a volume.
const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
/// What the file system of a volume held when it was made, for people: nothing enforces the size of a volume.
const TOTAL: &str = "coracle.dev/filesystem-bytes";
/// The same, what was free.
const AVAILABLE: &str = "coracle.dev/filesystem-available-bytes";
/// On which node a `local` volume lies.
const ON_NODE: &str = "coracle.dev/node";
/// That its node has been asked to remove it.
const ASKED: &str = "coracle.dev/removal-asked";

const HOSTNAME: &str = "kubernetes.io/hostname";

/// What to do for a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// It isn't ours, has its volume, or has to wait for its first pod.
    Nothing,
    /// It asks for what can't be had.
    Refuse(String),
    /// It gets a volume.
    Provision(Place),
}

/// Where a volume lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// On the shared file system.
    Shared,
    /// On a node's own disk.
    Local { node: String },
}

pub(super) fn claim(claim: &PersistentVolumeClaim) -> Decision {
    let Some(spec) = &claim.spec else {
        return Decision::Nothing;
    };
    if bound_to(claim).is_some() || claim.metadata.deletion_timestamp.is_some() {
        return Decision::Nothing;
    }
    let place = match annotation(&claim.metadata, PROVISIONER) {
        Some(SHARED) => Place::Shared,
        Some(LOCAL) => match annotation(&claim.metadata, SELECTED_NODE) {
            Some(node) => Place::Local {
                node: node.to_owned(),
            },
            None => return Decision::Nothing,
        },
        _ => return Decision::Nothing,
    };
    if spec.volume_mode.as_deref() == Some("Block") {
        return Decision::Refuse("block volumes are not supported".to_owned());
    }
    if spec.selector.is_some() {
        return Decision::Refuse("claim Selector is not supported".to_owned());
    }
    if spec.data_source.is_some() || spec.data_source_ref.is_some() {
        return Decision::Refuse("claim DataSource is not supported".to_owned());
    }
    Decision::Provision(place)
}

/// Refuses a class that asks for what nothing here would do: whoever wrote it believes that it has an effect.
pub(super) fn check_class(class: &StorageClass) -> Result<(), String> {
    let name = class.metadata.name.as_deref().unwrap_or_default();
    if let Some(parameter) = class.parameters.iter().flat_map(BTreeMap::keys).next() {
        return Err(format!(
            "StorageClass {name:?} has the parameter {parameter:?}, but {} knows no parameters",
            class.provisioner
        ));
    }
    match class.mount_options.as_deref().unwrap_or_default() {
        [] => Ok(()),
        options => Err(format!(
            "StorageClass {name:?} has the mount options {options:?}, but {} mounts nothing",
            class.provisioner
        )),
    }
}

/// Refuses a claim for more than there is.
pub(super) fn check_room(claim: &PersistentVolumeClaim, room: Room) -> Result<(), String> {
    let requested = requested(claim).as_ref().and_then(quantity::bytes);
    fits(requested.unwrap_or_default(), room)
}

/// Whether so many bytes more can be had on the shared file system.
pub(super) fn fits(bytes: u64, room: Room) -> Result<(), String> {
    if bytes <= room.available {
        return Ok(());
    }
    Err(format!(
        "{bytes} bytes are requested, but only {} of {} are free on the shared file system",
        rounded(room.available),
        rounded(room.total)
    ))
}

/// In the largest unit, so that what is free is mostly told in the same words, and once.
fn rounded(bytes: u64) -> String {
    let units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let power = (bytes.max(1).ilog2() / 10) as usize;
    format!("{} {}", bytes >> (10 * power), units[power])
}

/// Refuses a claim for more than the disk of a node holds. What is free there, only the node knows.
pub(super) fn check_node_room(claim: &PersistentVolumeClaim, node: &Node) -> Result<(), String> {
    let requested = requested(claim).as_ref().and_then(quantity::bytes);
    match (requested, disk(node)) {
        (Some(bytes), Some(total)) if bytes > total => Err(format!(
            "{bytes} bytes are requested, but the disk of node {:?} has {total}",
            node.metadata.name.as_deref().unwrap_or_default()
        )),
        _ => Ok(()),
    }
}

/// What the disk of a node holds, in bytes.
fn disk(node: &Node) -> Option<u64> {
    let capacity = node.status.as_ref()?.capacity.as_ref()?;
    quantity::bytes(capacity.get("ephemeral-storage")?)
}

/// The change that has the scheduler look for another node.
pub(super) fn without_node() -> Value {
    json!({ "metadata": { "annotations": { SELECTED_NODE: null } } })
}

/// How much larger a volume is to become, as its claim asks for more than it got.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Growth {
    /// In bytes.
    pub by: u64,
    /// What it has then.
    pub to: Quantity,
}

pub(super) fn growth(claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> Option<Growth> {
    let reference = volume.spec.as_ref()?.claim_ref.as_ref()?;
    let is_its = reference.uid.is_some() && reference.uid == claim.metadata.uid;
    let is_ours = matches!(
        annotation(&volume.metadata, PROVISIONED_BY),
        Some(SHARED | LOCAL)
    );
    if !is_its || !is_ours || claim.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let to = requested(claim)?;
    let has = claim.status.as_ref()?.capacity.as_ref()?.get("storage")?;
    let by = quantity::bytes(&to)?.checked_sub(quantity::bytes(has)?)?;
    (by > 0).then_some(Growth { by, to })
}

/// The volume that a claim is bound to.
pub(super) fn bound_to(claim: &PersistentVolumeClaim) -> Option<&str> {
    let name = claim.spec.as_ref()?.volume_name.as_deref()?;
    Some(name).filter(|name| !name.is_empty())
}

/// The name that upstream's controllers expect; also what makes a second volume for the same claim impossible.
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
    room: Room,
) -> PersistentVolume {
    let mut volume = volume(claim, class, SHARED);
    let annotations = volume.metadata.annotations.get_or_insert_default();
    annotations.insert(TOTAL.to_owned(), room.total.to_string());
    annotations.insert(AVAILABLE.to_owned(), room.available.to_string());
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
    let scratch = annotation(&node.metadata, SCRATCH)
        .ok_or_else(|| format!("node {node_name:?} has no directory for local volumes"))?;
    let labels = node.metadata.labels.as_ref();
    let hostname = labels.and_then(|labels| labels.get(HOSTNAME));
    let mut volume = volume(claim, class, LOCAL);
    let annotations = volume.metadata.annotations.get_or_insert_default();
    annotations.insert(ON_NODE.to_owned(), node_name.to_owned());
    annotations.extend(disk(node).map(|total| (TOTAL.to_owned(), total.to_string())));
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

/// What both kinds have in common.
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

/// Where a volume lies that is to be removed, as nobody claims it any more.
pub(super) fn removal(volume: &PersistentVolume) -> Option<Place> {
    let phase = volume
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    let is_free = matches!(phase, Some("Released" | "Failed"));
    // If it is being deleted, only somebody's finalizer holds it: it was removed already, or somebody deletes it by hand.
    if !is_free || !is_deleted_with_claim(volume) || volume.metadata.deletion_timestamp.is_some() {
        return None;
    }
    place(volume)
}

/// Where a volume of ours lies.
pub(super) fn place(volume: &PersistentVolume) -> Option<Place> {
    match annotation(&volume.metadata, PROVISIONED_BY) {
        Some(SHARED) => Some(Place::Shared),
        Some(LOCAL) => Some(Place::Local {
            node: annotation(&volume.metadata, ON_NODE)?.to_owned(),
        }),
        _ => None,
    }
}

/// Whether a volume goes when its claim goes, or the whole cluster.
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

/// How far the removal of a `local` volume by its node is.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Asking {
    /// It has to be asked: a patch of the Node, then one of the volume that remembers it.
    Ask { volume: Value, node: Value },
    /// It has been asked.
    Waiting,
    /// It has done it.
    Done,
}

pub(super) fn ask_node(volume: &PersistentVolume, node: &Node) -> Asking {
    let path = path(volume).unwrap_or_default();
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
        return Asking::Done;
    };
    let scratch = annotation(&node.metadata, SCRATCH);
    if scratch.map(Path::new) != path.parent() {
        // Another life of that node: what was in the old directory is gone.
        return Asking::Done;
    }
    let mut names = removals(node);
    if names.iter().any(|listed| listed == name) {
        return Asking::Waiting;
    }
    if annotation(&volume.metadata, ASKED).is_some() {
        // It was listed, and the node took it off the list.
        return Asking::Done;
    }
    names.push(name.to_owned());
    Asking::Ask {
        volume: json!({ "metadata": { "annotations": { ASKED: "true" } } }),
        node: json!({
            "metadata": {
                "resourceVersion": node.metadata.resource_version,
                "annotations": { REMOVE: names.join(",") },
            },
        }),
    }
}

/// The names of the directories that a node is to remove from its scratch directory.
pub fn removals(node: &Node) -> Vec<String> {
    let listed = annotation(&node.metadata, REMOVE).unwrap_or_default();
    // Names that we gave; whatever else is there can't lead anywhere.
    let is_ours = |name: &&str| name.len() == 32 && name.bytes().all(|b| b.is_ascii_hexdigit());
    listed
        .split(',')
        .filter(is_ours)
        .map(str::to_owned)
        .collect()
}

fn annotation<'a>(metadata: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    let value = metadata.annotations.as_ref()?.get(key)?;
    Some(value.as_str()).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests;
