//! The storage provisioner: creates directories and PersistentVolumes for claims.
//!
//! ```text
//!   classes.rs      the StorageClasses `shared` and `local`                     pure
//!   decide.rs       actions for claims and volumes, new PersistentVolumes       pure
//!   shared_dir.rs   directories on the shared file system
//!   expand.rs       expansion of volumes
//!   removals.rs     background removal of directories
//!   markers.rs      marker files of directories to remove with the cluster, in case it is killed
//! ```
//!
//! Runs once per cluster, in the leader. It creates and removes `shared` volumes: directories on the file system that all
//! nodes see. `local` volumes are in the scratch directory of a node (annotation [`SCRATCH_ANNOTATION`]), and only the node
//! can reach its disk. So the node creates the directory at the first mount, and removes the directories that the
//! provisioner lists in the annotation [`REMOVE_VOLUMES_ANNOTATION`].
//!
//! All decisions follow from the objects of the API server. A killed provisioner leaves at most an empty directory.

mod classes;
mod decide;
mod expand;
mod markers;
mod removals;
mod shared_dir;

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::{
    Event, EventSource, Node, ObjectReference, PersistentVolume, PersistentVolumeClaim,
};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::reflector::{self, Store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};

pub use classes::{LOCAL, SHARED, storage_classes};
use decide::{Decision, VolumeLocation};
pub use decide::{REMOVE_VOLUMES_ANNOTATION, SCRATCH_ANNOTATION, requested_removals};
use markers::DeletionMarkers;
pub use markers::{marked_clusters, remove_marked_volumes};
use removals::Removals;

/// The delay before a retry.
const PROVISION_RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Timeout for the last list request, when the API server may be stopping too.
const FINAL_LIST_TIMEOUT: Duration = Duration::from_millis(500);

/// Removes a directory recursively, including files of all ids that containers may have used.
pub type RemoveDir = Arc<dyn Fn(PathBuf) -> BoxFuture<'static, io::Result<()>> + Send + Sync>;

/// A volume cannot be provisioned, expanded or removed. Reported in an Event and retried.
#[derive(Debug, thiserror::Error)]
enum ProvisionError {
    #[error("{0}")]
    Rejected(String),
    /// The selected node cannot hold the volume, but another node may.
    #[error("{0}")]
    WrongNode(String),
    #[error("cannot {action} {}: {source}", .path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error(transparent)]
    Api(#[from] kube::Error),
}

/// Provisions volumes for one cluster.
pub struct Provisioner {
    client: Client,
    shared_dir: PathBuf,
    remove: RemoveDir,
    markers: DeletionMarkers,
    removals: Removals,
    /// The message of the last Event by the object's uid, to avoid duplicates.
    last_messages: HashMap<String, String>,
}

impl Provisioner {
    /// `client` has all permissions; `shared_dir` is on the file system that all nodes see. `cluster` is a line that identifies
    /// this cluster: callers of [`remove_marked_volumes`] find out from it whether the cluster has ended.
    pub fn new(
        client: Client,
        shared_dir: impl Into<PathBuf>,
        remove: RemoveDir,
        cluster: &str,
    ) -> Self {
        let shared_dir = shared_dir.into();
        Self {
            client,
            remove,
            markers: DeletionMarkers::new(&shared_dir, cluster),
            shared_dir,
            removals: Removals::default(),
            last_messages: HashMap::new(),
        }
    }

    /// Creates the StorageClasses, then serves claims. Runs until it is dropped.
    pub async fn run(mut self) {
        let (claims, claim_events) = watch(Api::<PersistentVolumeClaim>::all(self.client.clone()));
        let (volumes, volume_events) = watch(Api::<PersistentVolume>::all(self.client.clone()));
        let (nodes, node_events) = watch(Api::<Node>::all(self.client.clone()));
        let mut events = futures::stream::select_all([claim_events, volume_events, node_events]);
        let mut classes_exist = false;
        loop {
            if !classes_exist {
                classes_exist = self.create_classes().await;
            }
            let mut all_done = classes_exist;
            for claim in claims.state() {
                all_done &= self.serve_claim(&claim, &volumes, &nodes).await;
            }
            for volume in volumes.state() {
                all_done &= self.serve_volume(&volume, &nodes).await;
            }
            self.forget_deleted(&claims, &volumes);
            let retry = async {
                match all_done {
                    true => std::future::pending().await,
                    false => tokio::time::sleep(PROVISION_RETRY_INTERVAL).await,
                }
            };
            tokio::select! {
                () = retry => {}
                () = self.removals.next_finished() => {}
                event = events.next() => if event.is_none() {
                    return;
                },
            }
            // Handle all pending changes in one pass.
            while let Some(Some(())) = futures::FutureExt::now_or_never(events.next()) {}
        }
    }

    /// Returns false if a retry is needed.
    async fn create_classes(&self) -> bool {
        let api: Api<StorageClass> = Api::all(self.client.clone());
        let mut all_created = true;
        for class in storage_classes() {
            match api.create(&PostParams::default(), &class).await {
                // It exists, possibly changed by the user.
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                Ok(_) => {}
                Err(error) => {
                    tracing::debug!(
                        error = &error as &dyn std::error::Error,
                        "failed to create a StorageClass"
                    );
                    all_created = false;
                }
            }
        }
        all_created
    }

    /// Returns false if a retry is needed.
    async fn serve_claim(
        &mut self,
        claim: &PersistentVolumeClaim,
        volumes: &Store<PersistentVolume>,
        nodes: &Store<Node>,
    ) -> bool {
        let provisioned = match decide::decide_claim(claim) {
            Decision::Nothing => return self.serve_expansion(claim, volumes, nodes).await,
            // The cache may be stale; then the API server rejects a second volume of the same name.
            _ if volumes
                .get(&reflector::ObjectRef::new(&decide::volume_name(claim)))
                .is_some() =>
            {
                return true;
            }
            Decision::Reject(reason) => Err(ProvisionError::Rejected(reason)),
            Decision::Provision(location) => self.provision(claim, location, nodes).await,
        };
        let (warning, reason, message) = match &provisioned {
            Ok(name) => (
                false,
                "ProvisioningSucceeded",
                format!("Successfully provisioned volume {name}"),
            ),
            Err(error) => (
                true,
                "ProvisioningFailed",
                format!("failed to provision volume: {error}"),
            ),
        };
        self.record_event(claim, warning, reason, message).await;
        if let Err(ProvisionError::WrongNode(_)) = provisioned
            && let Err(error) = self.unselect_node(claim).await
        {
            tracing::debug!(claim = claim.name_any(), %error, "failed to clear the selected node of a claim");
        }
        provisioned.is_ok()
    }

    /// Makes the scheduler select another node for the first pod of a claim.
    async fn unselect_node(&self, claim: &PersistentVolumeClaim) -> Result<(), kube::Error> {
        let api = self.claims_in_namespace_of(claim);
        let patch = Patch::Merge(decide::unselect_node_patch());
        api.patch(&claim.name_any(), &PatchParams::default(), &patch)
            .await?;
        Ok(())
    }

    fn claims_in_namespace_of(&self, claim: &PersistentVolumeClaim) -> Api<PersistentVolumeClaim> {
        let namespace = claim.namespace().unwrap_or_default();
        Api::namespaced(self.client.clone(), &namespace)
    }

    /// Creates a volume for a claim, and returns its name.
    async fn provision(
        &mut self,
        claim: &PersistentVolumeClaim,
        location: VolumeLocation,
        nodes: &Store<Node>,
    ) -> Result<String, ProvisionError> {
        let classes: Api<StorageClass> = Api::all(self.client.clone());
        let class = decide::class_name(claim);
        let class = classes.get_opt(class).await?.ok_or_else(|| {
            ProvisionError::Rejected(format!("storageclass.storage.k8s.io {class:?} not found"))
        })?;
        decide::check_class(&class).map_err(ProvisionError::Rejected)?;
        let api: Api<PersistentVolume> = Api::all(self.client.clone());
        match location {
            VolumeLocation::Shared => {
                let space = shared_dir::disk_space(&self.shared_dir)?;
                decide::check_free_space(claim, space).map_err(ProvisionError::Rejected)?;
                let path = shared_dir::create(&self.shared_dir)?;
                let volume = decide::shared_volume(claim, &class, &path, space);
                self.update_marker(&volume);
                let created = create(&api, &volume).await;
                // Keep the directory if the response was lost, because the volume may exist. Its marker removes it with the
                // cluster.
                if matches!(created, Ok(false) | Err(kube::Error::Api(_))) {
                    // No volume refers to the directory, and it is empty.
                    let _ = std::fs::remove_dir(&path);
                    let _ = self.markers.set(&path, false);
                }
                created?;
                Ok(volume.name_any())
            }
            VolumeLocation::Local { node } => {
                let node = nodes
                    .get(&reflector::ObjectRef::new(&node))
                    .ok_or_else(|| ProvisionError::WrongNode(format!("node {node:?} not found")))?;
                decide::check_node_disk(claim, &node).map_err(ProvisionError::WrongNode)?;
                let name = shared_dir::random_name()?;
                let volume = decide::local_volume(claim, &class, &node, &name)
                    .map_err(ProvisionError::WrongNode)?;
                create(&api, &volume).await?;
                Ok(volume.name_any())
            }
        }
    }

    /// Returns false if a retry is needed.
    async fn serve_volume(&mut self, volume: &PersistentVolume, nodes: &Store<Node>) -> bool {
        let removed = match decide::removal_location(volume) {
            None => {
                self.update_marker(volume);
                return true;
            }
            Some(VolumeLocation::Shared) => self.remove_shared(volume),
            Some(VolumeLocation::Local { node }) => {
                let node = nodes.get(&reflector::ObjectRef::new(&node));
                self.remove_local(volume, node.as_deref()).await
            }
        };
        match removed {
            Ok(true) => match self.delete(volume).await {
                Ok(()) => true,
                Err(error) => {
                    self.record_event(volume, true, "VolumeFailedDelete", error.to_string())
                        .await;
                    false
                }
            },
            // A change of the node's annotations or the end of the removal triggers the next pass.
            Ok(false) => true,
            Err(error) => {
                self.record_event(volume, true, "VolumeFailedDelete", error.to_string())
                    .await;
                false
            }
        }
    }

    /// Updates the marker of a `shared` volume: users may change the reclaim policy at any time.
    fn update_marker(&mut self, volume: &PersistentVolume) {
        if let Some((VolumeLocation::Shared, path)) =
            decide::location(volume).zip(decide::path(volume))
            && volume.metadata.deletion_timestamp.is_none()
            && path.parent() == Some(&self.shared_dir)
            && let Err(error) = self
                .markers
                .set(&path, decide::is_deleted_with_claim(volume))
        {
            tracing::warn!(dir = %path.display(), %error, "failed to update the deletion marker of a volume");
        }
    }

    /// Removes the directory in the background. Returns whether it is removed.
    fn remove_shared(&mut self, volume: &PersistentVolume) -> Result<bool, ProvisionError> {
        let path = decide::path(volume).unwrap_or_default();
        // A user may have edited the path: remove only directories of this provisioner.
        if path.parent() != Some(&self.shared_dir) || path.file_name().is_none() {
            return Err(ProvisionError::Rejected(format!(
                "{} is not in {}, so it is not removed",
                path.display(),
                self.shared_dir.display()
            )));
        }
        let Some(removed) = self.removals.result_of(&path, &self.remove) else {
            return Ok(false);
        };
        removed
            .and_then(|()| self.markers.set(&path, false))
            .map(|()| true)
            .map_err(|source| ProvisionError::Io {
                action: "remove",
                path,
                source,
            })
    }

    /// Requests the removal from the node. Returns whether it is removed.
    async fn remove_local(
        &self,
        volume: &PersistentVolume,
        node: Option<&Node>,
    ) -> Result<bool, ProvisionError> {
        let Some(node) = node else {
            // The scratch directory was removed with the node.
            return Ok(true);
        };
        let nodes: Api<Node> = Api::all(self.client.clone());
        match decide::node_removal(volume, node) {
            decide::NodeRemoval::Done => Ok(true),
            decide::NodeRemoval::Pending => Ok(false),
            decide::NodeRemoval::Request {
                volume: volume_patch,
                node: node_patch,
            } => {
                // In this order: if the second patch is lost, the request is repeated. In the other order the volume would
                // count as removed, and its directory would stay until the node ends.
                let parameters = PatchParams::default();
                let name = node.name_any();
                nodes
                    .patch(&name, &parameters, &Patch::Merge(node_patch))
                    .await?;
                let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
                let name = volume.name_any();
                volumes
                    .patch(&name, &parameters, &Patch::Merge(volume_patch))
                    .await?;
                Ok(false)
            }
        }
    }

    async fn delete(&self, volume: &PersistentVolume) -> Result<(), ProvisionError> {
        let api: Api<PersistentVolume> = Api::all(self.client.clone());
        let only_this_uid = DeleteParams {
            preconditions: Some(Preconditions {
                uid: volume.metadata.uid.clone(),
                resource_version: None,
            }),
            ..Default::default()
        };
        match api.delete(&volume.name_any(), &only_this_uid).await {
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            deleted => Ok(deleted.map(|_| ())?),
        }
    }

    /// Removes the directories of all `shared` volumes with the reclaim policy Delete, when the cluster ends.
    pub async fn remove_all(mut self) {
        // Reclaim policies may have changed since the last pass. The timeout is short because the API server may be stopping too.
        let api: Api<PersistentVolume> = Api::all(self.client.clone());
        let parameters = ListParams::default();
        if let Ok(Ok(volumes)) =
            tokio::time::timeout(FINAL_LIST_TIMEOUT, api.list(&parameters)).await
        {
            for volume in &volumes {
                self.update_marker(volume);
            }
        }
        let ended = [self.markers.cluster().to_owned()].into();
        remove_marked_volumes(&self.shared_dir, &self.remove, &ended).await;
    }

    /// Records an Event, unless the object's last one has the same message.
    async fn record_event<K>(&mut self, object: &K, warning: bool, reason: &str, message: String)
    where
        K: kube::Resource<DynamicType = ()>,
    {
        let uid = object.uid().unwrap_or_default();
        if self.last_messages.get(&uid) == Some(&message) {
            return;
        }
        tracing::info!(
            object = object.name_any(),
            reason,
            message,
            "recording a storage event"
        );
        let event = event(object, warning, reason, &message, Timestamp::now());
        let namespace = event.metadata.namespace.clone().unwrap_or_default();
        let api: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
        match api.create(&PostParams::default(), &event).await {
            Ok(_) => _ = self.last_messages.insert(uid, message),
            Err(error) => {
                tracing::debug!(
                    error = &error as &dyn std::error::Error,
                    "failed to record an event"
                );
            }
        }
    }

    /// Drops the messages of deleted objects.
    fn forget_deleted(
        &mut self,
        claims: &Store<PersistentVolumeClaim>,
        volumes: &Store<PersistentVolume>,
    ) {
        let known: BTreeSet<_> = claims
            .state()
            .iter()
            .filter_map(|claim| claim.uid())
            .chain(volumes.state().iter().filter_map(|volume| volume.uid()))
            .collect();
        self.last_messages.retain(|uid, _| known.contains(uid));
    }
}

/// A cache of all objects of a kind, and a signal for each change.
fn watch<K>(api: Api<K>) -> (Store<K>, futures::stream::BoxStream<'static, ()>)
where
    K: kube::Resource<DynamicType = ()> + Clone + std::fmt::Debug,
    K: serde::de::DeserializeOwned + Send + Sync + 'static,
{
    let (store, writer) = reflector::store();
    let events = watcher(api, watcher::Config::default())
        .default_backoff()
        .reflect(writer)
        .filter_map(|event| async move {
            match event {
                Ok(watcher::Event::Init | watcher::Event::InitApply(_)) => None,
                Ok(_) => Some(()),
                Err(error) => {
                    tracing::debug!(
                        error = &error as &dyn std::error::Error,
                        "watch of storage objects failed"
                    );
                    None
                }
            }
        });
    (store, events.boxed())
}

/// Returns false if the volume exists already, from an earlier attempt.
async fn create(
    api: &Api<PersistentVolume>,
    volume: &PersistentVolume,
) -> Result<bool, kube::Error> {
    match api.create(&PostParams::default(), volume).await {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(error),
    }
}

fn event<K>(object: &K, warning: bool, reason: &str, message: &str, now: Timestamp) -> Event
where
    K: kube::Resource<DynamicType = ()>,
{
    // Events of objects without a namespace are in the default namespace.
    let namespace = object.namespace().unwrap_or_else(|| "default".to_owned());
    Event {
        metadata: ObjectMeta {
            name: Some(format!("{}.{:x}", object.name_any(), now.as_nanosecond())),
            namespace: Some(namespace),
            ..Default::default()
        },
        involved_object: ObjectReference {
            api_version: Some(K::api_version(&()).into_owned()),
            kind: Some(K::kind(&()).into_owned()),
            name: Some(object.name_any()),
            namespace: object.namespace(),
            uid: object.uid(),
            resource_version: object.resource_version(),
            field_path: None,
        },
        type_: Some(if warning { "Warning" } else { "Normal" }.to_owned()),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        count: Some(1),
        first_timestamp: Some(Time(now)),
        last_timestamp: Some(Time(now)),
        source: Some(EventSource {
            component: Some("coracle-provisioner".to_owned()),
            host: None,
        }),
        reporting_component: Some("coracle-provisioner".to_owned()),
        ..Default::default()
    }
}
