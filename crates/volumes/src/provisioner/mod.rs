//! The storage provisioner: claims → directories and the PersistentVolumes that tell of them.
//!
//! ```text
//!   classes.rs   the StorageClasses `shared` and `local`                       pure
//!   decide.rs    what a claim or a volume needs, what a new volume looks like  pure
//!   place.rs     directories on the shared file system
//!   grow.rs      claims that ask for more than they got
//!   removals.rs  directories that are being removed
//!   terms.rs     notes of which directories end with the cluster, for when it is killed
//! ```
//!
//! Runs once per cluster, beside the control plane. `shared` volumes are directories on the file system that all nodes see,
//! made and removed here. `local` ones lie in the scratch directory that a node names in its annotation [`SCRATCH`]; the
//! node makes one when a pod first mounts it, and removes those that the leader lists in its annotation [`REMOVE`], for
//! nobody else can reach its disk.
//!
//! Everything is decided anew from what the API server shows, so that a provisioner that was killed leaves no more behind
//! than an empty directory.

mod classes;
mod decide;
mod grow;
mod place;
mod removals;
mod terms;

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
use decide::{Decision, Place};
pub use decide::{REMOVE, SCRATCH, removals};
use removals::Removals;
use terms::Terms;
pub use terms::{clusters, sweep};

/// How long to wait before what has failed is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// What the API server gets to answer at the cluster's end.
const LAST_LOOK: Duration = Duration::from_millis(500);

/// Removes a directory and all that is in it, whoever its files belong to.
pub type Remove = Arc<dyn Fn(PathBuf) -> BoxFuture<'static, io::Result<()>> + Send + Sync>;

/// Why something can't be provisioned or removed; told in an Event, and tried again.
#[derive(Debug, thiserror::Error)]
enum ProvisionError {
    #[error("{0}")]
    Refused(String),
    /// Another node may do.
    #[error("{0}")]
    Elsewhere(String),
    #[error("can't {action} {}: {source}", .path.display())]
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
    remove: Remove,
    terms: Terms,
    removals: Removals,
    /// By uid: the last thing that was said about an object, so that it is said once.
    said: HashMap<String, String>,
}

impl Provisioner {
    /// `client` may do everything; `shared_dir` is on the file system that all nodes see. `remove` must be able to remove
    /// files of all ids that containers may have had. `cluster` is one line that tells this cluster from all others, and by
    /// which [`sweep`] can find out whether it is over.
    pub fn new(
        client: Client,
        shared_dir: impl Into<PathBuf>,
        remove: Remove,
        cluster: &str,
    ) -> Self {
        let shared_dir = shared_dir.into();
        Self {
            client,
            remove,
            terms: Terms::new(&shared_dir, cluster),
            shared_dir,
            removals: Removals::default(),
            said: HashMap::new(),
        }
    }

    /// Makes the StorageClasses, then serves claims. Never ends; may be dropped at any time.
    pub async fn run(mut self) {
        let (claims, claim_events) = follow(Api::<PersistentVolumeClaim>::all(self.client.clone()));
        let (volumes, volume_events) = follow(Api::<PersistentVolume>::all(self.client.clone()));
        let (nodes, node_events) = follow(Api::<Node>::all(self.client.clone()));
        let mut events = futures::stream::select_all([claim_events, volume_events, node_events]);
        let mut classes_made = false;
        loop {
            if !classes_made {
                classes_made = self.make_classes().await;
            }
            let mut all_well = classes_made;
            for claim in claims.state() {
                all_well &= self.serve_claim(&claim, &volumes, &nodes).await;
            }
            for volume in volumes.state() {
                all_well &= self.serve_volume(&volume, &nodes).await;
            }
            self.forget(&claims, &volumes);
            let retry = async {
                match all_well {
                    true => std::future::pending().await,
                    false => tokio::time::sleep(RETRY).await,
                }
            };
            tokio::select! {
                () = retry => {}
                () = self.removals.next() => {}
                event = events.next() => if event.is_none() {
                    return;
                },
            }
            // What has come meanwhile is served in one go.
            while let Some(Some(())) = futures::FutureExt::now_or_never(events.next()) {}
        }
    }

    async fn make_classes(&self) -> bool {
        let api: Api<StorageClass> = Api::all(self.client.clone());
        let mut all_well = true;
        for class in storage_classes() {
            match api.create(&PostParams::default(), &class).await {
                // Whoever changed it had a reason.
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                Ok(_) => {}
                Err(error) => {
                    tracing::debug!(
                        error = &error as &dyn std::error::Error,
                        "making StorageClasses"
                    );
                    all_well = false;
                }
            }
        }
        all_well
    }

    /// Whether nothing is left to be tried again.
    async fn serve_claim(
        &mut self,
        claim: &PersistentVolumeClaim,
        volumes: &Store<PersistentVolume>,
        nodes: &Store<Node>,
    ) -> bool {
        let provisioned = match decide::claim(claim) {
            Decision::Nothing => return self.serve_growth(claim, volumes, nodes).await,
            // The store may be behind; then the API server refuses the second volume of that name.
            _ if volumes
                .get(&reflector::ObjectRef::new(&decide::volume_name(claim)))
                .is_some() =>
            {
                return true;
            }
            Decision::Refuse(why) => Err(ProvisionError::Refused(why)),
            Decision::Provision(place) => self.provision(claim, place, nodes).await,
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
        self.say(claim, warning, reason, message).await;
        if let Err(ProvisionError::Elsewhere(_)) = provisioned
            && let Err(error) = self.unselect_node(claim).await
        {
            tracing::debug!(claim = claim.name_any(), %error, "asking for another node");
        }
        provisioned.is_ok()
    }

    /// Has the scheduler choose again where the first pod of a claim goes.
    async fn unselect_node(&self, claim: &PersistentVolumeClaim) -> Result<(), kube::Error> {
        let api = self.claims_beside(claim);
        let patch = Patch::Merge(decide::without_node());
        api.patch(&claim.name_any(), &PatchParams::default(), &patch)
            .await?;
        Ok(())
    }

    fn claims_beside(&self, claim: &PersistentVolumeClaim) -> Api<PersistentVolumeClaim> {
        let namespace = claim.namespace().unwrap_or_default();
        Api::namespaced(self.client.clone(), &namespace)
    }

    /// Makes a volume for a claim, and tells its name.
    async fn provision(
        &mut self,
        claim: &PersistentVolumeClaim,
        place: Place,
        nodes: &Store<Node>,
    ) -> Result<String, ProvisionError> {
        let classes: Api<StorageClass> = Api::all(self.client.clone());
        let class = decide::class_name(claim);
        let class = classes.get_opt(class).await?.ok_or_else(|| {
            ProvisionError::Refused(format!("storageclass.storage.k8s.io {class:?} not found"))
        })?;
        decide::check_class(&class).map_err(ProvisionError::Refused)?;
        let api: Api<PersistentVolume> = Api::all(self.client.clone());
        match place {
            Place::Shared => {
                let room = place::room(&self.shared_dir)?;
                decide::check_room(claim, room).map_err(ProvisionError::Refused)?;
                let path = place::make(&self.shared_dir)?;
                let volume = decide::shared_volume(claim, &class, &path, room);
                self.note(&volume);
                let created = create(&api, &volume).await;
                // Unless the answer was lost: then it may be there. If it is not, the directory goes with the cluster.
                if matches!(created, Ok(false) | Err(kube::Error::Api(_))) {
                    // Nobody has heard of it, and nothing is in it.
                    let _ = std::fs::remove_dir(&path);
                    let _ = self.terms.set(&path, false);
                }
                created?;
                Ok(volume.name_any())
            }
            Place::Local { node } => {
                let node = nodes
                    .get(&reflector::ObjectRef::new(&node))
                    .ok_or_else(|| ProvisionError::Elsewhere(format!("node {node:?} not found")))?;
                decide::check_node_room(claim, &node).map_err(ProvisionError::Elsewhere)?;
                let name = place::random_name()?;
                let volume = decide::local_volume(claim, &class, &node, &name)
                    .map_err(ProvisionError::Elsewhere)?;
                create(&api, &volume).await?;
                Ok(volume.name_any())
            }
        }
    }

    /// Whether nothing is left to be tried again.
    async fn serve_volume(&mut self, volume: &PersistentVolume, nodes: &Store<Node>) -> bool {
        let removed = match decide::removal(volume) {
            None => {
                self.note(volume);
                return true;
            }
            Some(Place::Shared) => self.remove_shared(volume),
            Some(Place::Local { node }) => {
                let node = nodes.get(&reflector::ObjectRef::new(&node));
                self.remove_local(volume, node.as_deref()).await
            }
        };
        match removed {
            Ok(true) => match self.delete(volume).await {
                Ok(()) => true,
                Err(error) => {
                    self.say(volume, true, "VolumeFailedDelete", error.to_string())
                        .await;
                    false
                }
            },
            // The node will answer by a change of its annotations, and our own removals wake us.
            Ok(false) => true,
            Err(error) => {
                self.say(volume, true, "VolumeFailedDelete", error.to_string())
                    .await;
                false
            }
        }
    }

    /// Notes beside a `shared` volume whether it ends with this cluster, which may change at any time.
    fn note(&mut self, volume: &PersistentVolume) {
        if let Some((Place::Shared, path)) = decide::place(volume).zip(decide::path(volume))
            && volume.metadata.deletion_timestamp.is_none()
            && path.parent() == Some(&self.shared_dir)
            && let Err(error) = self.terms.set(&path, decide::is_deleted_with_claim(volume))
        {
            tracing::warn!(dir = %path.display(), %error, "can't note whether a volume ends with the cluster");
        }
    }

    /// Removes its directory; whether that is done.
    fn remove_shared(&mut self, volume: &PersistentVolume) -> Result<bool, ProvisionError> {
        let path = decide::path(volume).unwrap_or_default();
        // Whatever somebody wrote into the object, only what was made here is removed.
        if path.parent() != Some(&self.shared_dir) || path.file_name().is_none() {
            return Err(ProvisionError::Refused(format!(
                "{} is not in {}, so it is not removed",
                path.display(),
                self.shared_dir.display()
            )));
        }
        let Some(removed) = self.removals.of(&path, &self.remove) else {
            return Ok(false);
        };
        removed
            .and_then(|()| self.terms.set(&path, false))
            .map(|()| true)
            .map_err(|source| ProvisionError::Io {
                action: "remove",
                path,
                source,
            })
    }

    /// Has the node remove it; whether that is done.
    async fn remove_local(
        &self,
        volume: &PersistentVolume,
        node: Option<&Node>,
    ) -> Result<bool, ProvisionError> {
        let Some(node) = node else {
            // Its scratch directory went with it.
            return Ok(true);
        };
        let nodes: Api<Node> = Api::all(self.client.clone());
        match decide::ask_node(volume, node) {
            decide::Asking::Done => Ok(true),
            decide::Asking::Waiting => Ok(false),
            decide::Asking::Ask {
                volume: asked,
                node: ask,
            } => {
                // If the second of these gets lost, the directory stays until the node goes; the other way round, a volume
                // would wait for ever.
                let parameters = PatchParams::default();
                let name = node.name_any();
                nodes.patch(&name, &parameters, &Patch::Merge(ask)).await?;
                let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
                let name = volume.name_any();
                volumes
                    .patch(&name, &parameters, &Patch::Merge(asked))
                    .await?;
                Ok(false)
            }
        }
    }

    async fn delete(&self, volume: &PersistentVolume) -> Result<(), ProvisionError> {
        let api: Api<PersistentVolume> = Api::all(self.client.clone());
        let this_one = DeleteParams {
            preconditions: Some(Preconditions {
                uid: volume.metadata.uid.clone(),
                resource_version: None,
            }),
            ..Default::default()
        };
        match api.delete(&volume.name_any(), &this_one).await {
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            deleted => Ok(deleted.map(|_| ())?),
        }
    }

    /// Removes the directories of all `shared` volumes that are to be deleted with their claim: for a cluster that ends
    /// for ever, and takes its claims with it.
    pub async fn remove_all(mut self) {
        // Somebody may have changed their minds since we looked; an API server that is ending as well says nothing.
        let api: Api<PersistentVolume> = Api::all(self.client.clone());
        let all = ListParams::default();
        if let Ok(Ok(volumes)) = tokio::time::timeout(LAST_LOOK, api.list(&all)).await {
            for volume in &volumes {
                self.note(volume);
            }
        }
        let ours = [self.terms.cluster().to_owned()].into();
        sweep(&self.shared_dir, &self.remove, &ours).await;
    }

    /// Records an Event, unless it is what was said of this object the last time.
    async fn say<K>(&mut self, object: &K, warning: bool, reason: &str, message: String)
    where
        K: kube::Resource<DynamicType = ()>,
    {
        let uid = object.uid().unwrap_or_default();
        if self.said.get(&uid) == Some(&message) {
            return;
        }
        tracing::info!(object = object.name_any(), reason, message, "storage");
        let event = event(object, warning, reason, &message, Timestamp::now());
        let namespace = event.metadata.namespace.clone().unwrap_or_default();
        let api: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
        match api.create(&PostParams::default(), &event).await {
            Ok(_) => _ = self.said.insert(uid, message),
            Err(error) => {
                tracing::debug!(
                    error = &error as &dyn std::error::Error,
                    "could not record an event"
                );
            }
        }
    }

    /// What is no more is not spoken of again.
    fn forget(&mut self, claims: &Store<PersistentVolumeClaim>, volumes: &Store<PersistentVolume>) {
        let known: BTreeSet<_> = claims
            .state()
            .iter()
            .filter_map(|claim| claim.uid())
            .chain(volumes.state().iter().filter_map(|volume| volume.uid()))
            .collect();
        self.said.retain(|uid, _| known.contains(uid));
    }
}

/// All objects of a kind, and a signal for each change.
fn follow<K>(api: Api<K>) -> (Store<K>, futures::stream::BoxStream<'static, ()>)
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
                    tracing::debug!(error = &error as &dyn std::error::Error, "watching storage");
                    None
                }
            }
        });
    (store, events.boxed())
}

/// Whether it is new; the same volume may have been made by ourselves before.
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
    // Events about objects without a namespace live in the default one.
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
