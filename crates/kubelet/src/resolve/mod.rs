//! Resolves a pod: reads all API objects that it refers to, and builds the [`Bundle`] for its sandbox.
//!
//! ```text
//!   references.rs       the config maps and secrets that a pod refers to        pure
//!   watched_objects.rs  watches of these objects
//!   services.rs         watch of all services, and their environment variables
//!   tokens.rs           service account tokens, with renewal
//!   trust_bundles.rs    watch of cluster trust bundles
//!   certificates/       pod certificates, with renewal
//!   claims.rs           persistent volume claims and their volumes
//!   env.rs              environment variables of a container                    pure
//!   volume_sources.rs   sources of volumes                                      pure
//!   pull_secrets.rs     credentials for image registries                        pure
//! ```
//!
//! Resolving never fails as a whole. A missing object is reported at the container or volume that needs it, with upstream's
//! message, and [`Resolver::changed`] returns when the bundle may have changed.

#[cfg(test)]
mod certificate_live_tests;
mod certificates;
mod claims;
mod env;
#[cfg(test)]
mod live_tests;
mod pull_secrets;
mod references;
mod services;
#[cfg(test)]
mod tests;
mod tokens;
mod trust_bundles;
mod volume_sources;
mod watch_events;
mod watched_objects;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, select_all};
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::Client;
use pod_protocol::{Bundle, ContainerInput, NodeFacts, Problem};
use tokio::sync::watch;
use tokio::time::Instant;
use volumes::content::{TrustBundles, VolumeInputs};
use volumes::{NodePath, VolumeSource};

use self::certificates::{CertificateManager, CertificateState};
use self::claims::{BoundClaim, ClaimReader};
use self::references::ObjectReferences;
use self::services::ServiceCache;
use self::tokens::TokenManager;
use self::trust_bundles::TrustBundleCache;
use self::watched_objects::{ObjectState, WatchedObjects};
use crate::NodeConfig;
use crate::node::resources;

/// How long to wait for the first response about an object, before the pod is resolved without it.
const FIRST_SYNC_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between requests for a missing or forbidden object that cannot be watched.
const OBJECT_RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// Debounce window for changes of services.
const SERVICE_DEBOUNCE: Duration = Duration::from_secs(1);

/// Resolves the pods of one node.
pub(crate) struct Resolver {
    node: NodeFacts,
    node_paths: Vec<NodePath>,
    allocatable: BTreeMap<String, Quantity>,
    config_maps: WatchedObjects<ConfigMap>,
    secrets: WatchedObjects<Secret>,
    services: ServiceCache,
    tokens: TokenManager,
    trust_bundles: TrustBundleCache,
    certificates: CertificateManager,
    claims: ClaimReader,
    /// By uid: the dependencies of the last bundle.
    pods: Mutex<HashMap<String, Dependencies>>,
}

/// A resolved pod.
#[derive(Clone, Debug)]
pub(crate) struct ResolvedPod {
    /// Lacks the volumes of `failed_mounts`. A pod that has not started yet must wait for them.
    pub bundle: Bundle,
    /// Messages for Events of reason `FailedMount`.
    pub failed_mounts: Vec<String>,
    /// Further Events of type `Warning`: reason and message.
    pub warnings: Vec<(&'static str, String)>,
}

/// The inputs of a bundle, to notice changes.
#[derive(Clone)]
struct Dependencies {
    /// A change counter of each object, with the current value marked as seen.
    objects: Vec<watch::Receiver<u64>>,
    /// Only if the pod uses trust bundles.
    trust_bundles: Option<watch::Receiver<Option<Arc<TrustBundles>>>>,
    certificates: Vec<watch::Receiver<CertificateState>>,
    services: watch::Receiver<u64>,
    /// The variables of services in the bundle.
    service_variables: BTreeMap<String, String>,
    /// When to resolve again, because an object cannot be watched or expires.
    refresh_at: Option<Instant>,
}

impl Resolver {
    /// Starts to watch services. Other objects are watched when pods refer to them. Must be called in a tokio runtime.
    pub(crate) fn new(client: Client, config: &NodeConfig) -> Self {
        Self {
            node: NodeFacts {
                name: config.name.clone(),
                cluster_dns: config.cluster_dns.iter().map(ToString::to_string).collect(),
                cluster_domain: config.cluster_domain.clone(),
                memory_bytes: config.capacity.memory_bytes,
            },
            node_paths: config.node_paths.clone(),
            allocatable: resources(&config.capacity),
            config_maps: WatchedObjects::new(client.clone(), "configmap"),
            secrets: WatchedObjects::new(client.clone(), "secret"),
            services: ServiceCache::watch(client.clone()),
            tokens: TokenManager::new(client.clone()),
            trust_bundles: TrustBundleCache::new(client.clone()),
            certificates: CertificateManager::new(client.clone(), &config.name),
            claims: ClaimReader::new(client),
            pods: Mutex::new(HashMap::new()),
        }
    }

    /// Resolves a pod with the current API objects.
    pub(crate) async fn bundle(&self, pod: &Arc<Pod>) -> ResolvedPod {
        let references = ObjectReferences::of(pod);
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let (config_maps, secrets, tokens, trust_bundles, certificates, claims, services_synced) = tokio::join!(
            self.config_maps
                .get(uid, namespace, &references.config_maps),
            self.secrets.get(uid, namespace, &references.secrets),
            self.tokens.get(pod),
            self.trust_bundles.get(pod),
            self.certificates.get(pod),
            self.claims.get(pod),
            self.services.synced(),
        );
        let services = self.services.changes();
        let links = pod.spec.as_ref().and_then(|spec| spec.enable_service_links);
        let service_variables = self.services.variables(namespace, links.unwrap_or(true));

        let refresh_at = [
            tokens.refresh_at,
            certificates.refresh_at,
            claims.refresh_at,
        ]
        .into_iter()
        .flatten()
        .min();
        let dependencies = Dependencies {
            objects: config_maps
                .changes
                .into_iter()
                .chain(secrets.changes)
                .collect(),
            trust_bundles: trust_bundles.changes,
            certificates: certificates.states,
            services,
            service_variables: service_variables.clone(),
            refresh_at,
        };
        self.pods
            .lock()
            .unwrap()
            .insert(uid.to_owned(), dependencies);

        let inputs = ResolveInputs {
            volumes: VolumeInputs {
                pod: Arc::clone(pod),
                allocatable: self.allocatable.clone(),
                config_maps: existing(&config_maps.objects),
                secrets: existing(&secrets.objects),
                tokens: tokens.tokens,
                trust_bundles: trust_bundles.bundles,
                certificates: certificates.certificates,
            },
            unknown_config_maps: unknown(&config_maps.objects),
            unknown_secrets: unknown(&secrets.objects),
            claims: claims.volumes,
            services: services_synced.then_some(service_variables),
        };
        let mut resolved = inputs.resolve(self.node.clone(), &self.node_paths);
        resolved.warnings.extend(certificates.warnings);
        resolved
    }

    /// Waits until [`bundle`](Self::bundle) may return a different bundle than the last time. The caller has to notice changes of
    /// the pod itself.
    ///
    /// The future may be dropped and requested again.
    pub(crate) async fn changed(&self, pod: &Pod) {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let Some(dependencies) = self.pods.lock().unwrap().get(uid).cloned() else {
            // Not resolved yet.
            return;
        };
        let objects = dependencies.objects.into_iter().map(changed);
        let trust_bundles = dependencies.trust_bundles.into_iter().map(changed);
        let certificates = dependencies.certificates.into_iter().map(changed);
        let objects: Vec<_> = objects.chain(trust_bundles).chain(certificates).collect();
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let links = pod.spec.as_ref().and_then(|spec| spec.enable_service_links);
        let mut services = dependencies.services;
        let services = async {
            loop {
                if services.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
                tokio::time::sleep(SERVICE_DEBOUNCE).await;
                services.borrow_and_update();
                if self.services.variables(namespace, links.unwrap_or(true))
                    != dependencies.service_variables
                {
                    return;
                }
            }
        };
        let refresh = async {
            match dependencies.refresh_at {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let objects = async {
            if objects.is_empty() {
                std::future::pending::<()>().await;
            }
            select_all(objects).await;
        };
        tokio::select! {
            () = objects => {}
            () = services => {}
            () = refresh => {}
        }
    }

    /// Forgets a pod, and stops watching objects that only it refers to.
    pub(crate) fn forget(&self, uid: &str) {
        self.pods.lock().unwrap().remove(uid);
        self.config_maps.forget(uid);
        self.secrets.forget(uid);
        self.tokens.forget(uid);
        self.certificates.forget(uid);
    }
}

/// Waits for the next change. Never returns if the sender was dropped.
fn changed<T: Send + Sync + 'static>(mut receiver: watch::Receiver<T>) -> BoxFuture<'static, ()> {
    async move {
        if receiver.changed().await.is_err() {
            std::future::pending().await
        }
    }
    .boxed()
}

fn existing<K>(objects: &BTreeMap<String, ObjectState<K>>) -> BTreeMap<String, Arc<K>> {
    let existing = |(name, state): (&String, &ObjectState<K>)| match state {
        ObjectState::Present(object) => Some((name.clone(), Arc::clone(object))),
        ObjectState::Missing | ObjectState::Unknown(_) => None,
    };
    objects.iter().filter_map(existing).collect()
}

fn unknown<K>(objects: &BTreeMap<String, ObjectState<K>>) -> BTreeMap<String, String> {
    let unknown = |(name, state): (&String, &ObjectState<K>)| match state {
        ObjectState::Unknown(why) => Some((name.clone(), why.clone())),
        ObjectState::Present(_) | ObjectState::Missing => None,
    };
    objects.iter().filter_map(unknown).collect()
}

/// All objects that were read for a pod. From here on resolving is a pure function.
#[derive(Default)]
struct ResolveInputs {
    /// The objects that volumes use.
    volumes: VolumeInputs,
    /// Config maps that were not received yet, and why.
    unknown_config_maps: BTreeMap<String, String>,
    /// The same for secrets.
    unknown_secrets: BTreeMap<String, String>,
    /// By volume name: the persistent volume behind a claim, or why there is none.
    claims: BTreeMap<String, Result<BoundClaim, String>>,
    /// Environment variables of services; `None` if services were not received yet.
    services: Option<BTreeMap<String, String>>,
}

impl ResolveInputs {
    fn resolve(&self, node: NodeFacts, node_paths: &[NodePath]) -> ResolvedPod {
        let pod = &self.volumes.pod;
        let mut failed_mounts = Vec::new();
        let mut volumes = BTreeMap::new();
        for volume in references::used_volumes(pod) {
            let source = volume_sources::volume_source(volume, self).and_then(|mut source| {
                if let VolumeSource::HostPath { path, mapped, .. } = &mut source {
                    *mapped = NodePath::find(node_paths, path);
                }
                serde_json::to_value(source)
                    .map_err(|error| format!("cannot encode volume {:?}: {error}", volume.name))
            });
            match source {
                Ok(source) => _ = volumes.insert(volume.name.clone(), source),
                Err(message) => failed_mounts.push(message),
            }
        }
        let containers = references::containers(pod)
            .map(|container| {
                let input = match env::variables(&container, self) {
                    Ok(env) => ContainerInput { env, problem: None },
                    Err(message) => ContainerInput {
                        env: Vec::new(),
                        problem: Some(Problem::new("CreateContainerConfigError", message)),
                    },
                };
                (container.name.to_owned(), input)
            })
            .collect();
        let (pull_credentials, warnings) = pull_secrets::credentials(&self.volumes);
        ResolvedPod {
            bundle: Bundle {
                pod: Pod::clone(pod),
                containers,
                volumes,
                pull_credentials,
                node,
                previous_statuses: Vec::new(),
            },
            failed_mounts,
            warnings,
        }
    }
}
