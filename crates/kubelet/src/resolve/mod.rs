//! What only the API server can tell about a pod, gathered into the [`Bundle`] for its sandbox.
//!
//! ```text
//!   references.rs   which config maps and secrets a pod names          pure
//!   objects.rs      those, each watched for as long as a pod names it
//!   services.rs     all services, and the variables that tell of them
//!   tokens.rs       service account tokens, renewed in time
//!   trust.rs        cluster trust bundles
//!   certificates/   pods' own certificates, renewed in time
//!   claims.rs       persistent volume claims and their volumes
//!   env.rs          a container's variables                            pure
//!   sources.rs      volumes → what they are made of                    pure
//!   pull_secrets.rs the way into registries                            pure
//! ```
//!
//! Nothing here fails as a whole: what can't be had is told at the container or volume that it concerns, in upstream's
//! words, and [`Resolver::changed`] says when asking again is worth it.

#[cfg(test)]
mod certificate_live_tests;
mod certificates;
mod claims;
mod env;
#[cfg(test)]
mod live_tests;
mod objects;
mod pull_secrets;
mod references;
mod services;
mod sources;
#[cfg(test)]
mod tests;
mod tokens;
mod trust;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, select_all};
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::Client;
use pod_protocol::{Bundle, ContainerInput, NodeFacts, Problem};
use tokio::sync::watch;
use tokio::time::Instant;
use volumes::content::{Inputs, TrustBundles};

use crate::NodeConfig;
use crate::node::resources;
use certificates::{Certificates, Standing};
use claims::Claims;
use objects::{Known, Objects};
use references::References;
use services::Services;
use tokens::Tokens;
use trust::Trust;

/// How long the first answer about an object may take before the pod is told that there is none.
const PATIENCE: Duration = Duration::from_secs(5);
/// When to ask again for what can't be watched, after it was refused or missing.
const ASK_AGAIN: Duration = Duration::from_secs(2);
/// Services come and go in groups; a pod hears of each group once.
const SETTLE: Duration = Duration::from_secs(1);

/// Resolves the pods of one node.
pub(crate) struct Resolver {
    node: NodeFacts,
    allocatable: BTreeMap<String, Quantity>,
    config_maps: Objects<ConfigMap>,
    secrets: Objects<Secret>,
    services: Services,
    tokens: Tokens,
    trust: Trust,
    certificates: Certificates,
    claims: Claims,
    /// By uid: what the last bundle was made of.
    pods: Mutex<HashMap<String, Basis>>,
}

/// A pod with all that the API server could tell, and what it couldn't.
#[derive(Clone, Debug)]
pub(crate) struct Resolved {
    /// For the sandbox. Lacks the volumes that `failed_mounts` tells of, so a pod that has not started yet must wait.
    pub bundle: Bundle,
    /// Messages for Events of reason `FailedMount`.
    pub failed_mounts: Vec<String>,
    /// Further Events of kind `Warning`: reason and message.
    pub warnings: Vec<(&'static str, String)>,
}

/// What a bundle was made of, as it was then.
#[derive(Clone)]
struct Basis {
    /// One signal for each object; each has been seen.
    objects: Vec<watch::Receiver<u64>>,
    /// If the pod asks for trust bundles.
    trust: Option<watch::Receiver<Option<Arc<TrustBundles>>>>,
    /// One for each of the pod's own certificates.
    certificates: Vec<watch::Receiver<Standing>>,
    services: watch::Receiver<u64>,
    /// The variables that told of services.
    service_variables: BTreeMap<String, String>,
    /// Something can't be watched, or ends by itself.
    again_at: Option<Instant>,
}

impl Resolver {
    /// Starts to follow services; everything else is followed when pods name it. Must be called in a tokio runtime.
    pub(crate) fn new(client: Client, config: &NodeConfig) -> Self {
        Self {
            node: NodeFacts {
                name: config.name.clone(),
                host_ips: config
                    .internal_ips
                    .iter()
                    .map(ToString::to_string)
                    .collect(),
                cluster_dns: config.cluster_dns.iter().map(ToString::to_string).collect(),
                cluster_domain: config.cluster_domain.clone(),
                memory_bytes: config.capacity.memory_bytes,
            },
            allocatable: resources(&config.capacity),
            config_maps: Objects::new(client.clone(), "configmap"),
            secrets: Objects::new(client.clone(), "secret"),
            services: Services::follow(client.clone()),
            tokens: Tokens::new(client.clone()),
            trust: Trust::new(client.clone()),
            certificates: Certificates::new(client.clone(), &config.name),
            claims: Claims::new(client),
            pods: Mutex::new(HashMap::new()),
        }
    }

    /// Everything that a pod needs to run, as the API server knows it now.
    pub(crate) async fn bundle(&self, pod: &Arc<Pod>) -> Resolved {
        let references = References::of(pod);
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let (config_maps, secrets, tokens, trust, certificates, claims, services) = tokio::join!(
            self.config_maps
                .get(uid, namespace, &references.config_maps),
            self.secrets.get(uid, namespace, &references.secrets),
            self.tokens.get(pod),
            self.trust.get(pod),
            self.certificates.get(pod),
            self.claims.get(pod),
            self.services.synced(),
        );
        let services_version = self.services.changes();
        let links = pod.spec.as_ref().and_then(|spec| spec.enable_service_links);
        let service_variables = self.services.variables(namespace, links.unwrap_or(true));

        let again = [tokens.again_at, certificates.again_at, claims.again_at]
            .into_iter()
            .flatten()
            .min();
        let basis = Basis {
            objects: config_maps
                .signals
                .into_iter()
                .chain(secrets.signals)
                .collect(),
            trust: trust.signal,
            certificates: certificates.signals,
            services: services_version,
            service_variables: service_variables.clone(),
            again_at: again,
        };
        self.lock().insert(uid.to_owned(), basis);

        let facts = Facts {
            inputs: Inputs {
                pod: Arc::clone(pod),
                allocatable: self.allocatable.clone(),
                config_maps: existing(&config_maps.objects),
                secrets: existing(&secrets.objects),
                tokens: tokens.tokens,
                trust_bundles: trust.bundles,
                certificates: certificates.certificates,
            },
            unknown_config_maps: unknown(&config_maps.objects),
            unknown_secrets: unknown(&secrets.objects),
            claims: claims.volumes,
            services: services.then_some(service_variables),
        };
        let mut resolved = facts.resolve(self.node.clone());
        resolved.warnings.extend(certificates.warnings);
        resolved
    }

    /// Waits until [`bundle`](Self::bundle) could say something else about this pod than it did the last time.
    ///
    /// May be dropped and asked again. Changes of the pod itself are for the caller to notice.
    pub(crate) async fn changed(&self, pod: &Pod) {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let Some(basis) = self.lock().get(uid).cloned() else {
            // Never resolved: then there is nothing to wait for.
            return;
        };
        let objects = basis.objects.into_iter().map(signalled);
        let trust = basis.trust.into_iter().map(signalled);
        let certificates = basis.certificates.into_iter().map(signalled);
        let objects: Vec<_> = objects.chain(trust).chain(certificates).collect();
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let links = pod.spec.as_ref().and_then(|spec| spec.enable_service_links);
        let mut services = basis.services;
        let services = async {
            loop {
                if services.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
                tokio::time::sleep(SETTLE).await;
                services.borrow_and_update();
                if self.services.variables(namespace, links.unwrap_or(true))
                    != basis.service_variables
                {
                    return;
                }
            }
        };
        let again = async {
            match basis.again_at {
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
            () = again => {}
        }
    }

    /// The pod is gone: what only it named is followed no more.
    pub(crate) fn forget(&self, uid: &str) {
        self.lock().remove(uid);
        self.config_maps.forget(uid);
        self.secrets.forget(uid);
        self.tokens.forget(uid);
        self.certificates.forget(uid);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Basis>> {
        // The map is whole after every statement, so a panic elsewhere can't have left it half-written.
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for the next change, which never comes if nobody is left to make one.
fn signalled<T: Send + Sync + 'static>(mut signal: watch::Receiver<T>) -> BoxFuture<'static, ()> {
    async move {
        if signal.changed().await.is_err() {
            std::future::pending().await
        }
    }
    .boxed()
}

fn existing<K>(objects: &BTreeMap<String, Known<K>>) -> BTreeMap<String, Arc<K>> {
    let existing = |(name, known): (&String, &Known<K>)| match known {
        Known::There(object) => Some((name.clone(), Arc::clone(object))),
        Known::Missing | Known::Unknown(_) => None,
    };
    objects.iter().filter_map(existing).collect()
}

fn unknown<K>(objects: &BTreeMap<String, Known<K>>) -> BTreeMap<String, String> {
    let unknown = |(name, known): (&String, &Known<K>)| match known {
        Known::Unknown(why) => Some((name.clone(), why.clone())),
        Known::There(_) | Known::Missing => None,
    };
    objects.iter().filter_map(unknown).collect()
}

/// All that was found out about a pod; from here on everything is a pure function.
#[derive(Default)]
struct Facts {
    inputs: Inputs,
    /// Config maps about which the API server has said nothing yet, and why.
    unknown_config_maps: BTreeMap<String, String>,
    /// The same for secrets.
    unknown_secrets: BTreeMap<String, String>,
    /// By volume name: the persistent volume behind a claim, or why there is none.
    claims: BTreeMap<String, Result<claims::Claimed, String>>,
    /// Variables that tell of services; `None` if services are not known yet.
    services: Option<BTreeMap<String, String>>,
}

impl Facts {
    fn resolve(&self, node: NodeFacts) -> Resolved {
        let pod = &self.inputs.pod;
        let mut failed_mounts = Vec::new();
        let mut volumes = BTreeMap::new();
        for volume in references::used_volumes(pod) {
            let source = sources::source(volume, self).and_then(|source| {
                serde_json::to_value(source)
                    .map_err(|error| format!("can't describe volume {:?}: {error}", volume.name))
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
                        problem: Some(Problem {
                            reason: "CreateContainerConfigError".to_owned(),
                            message,
                        }),
                    },
                };
                (container.name.into_owned(), input)
            })
            .collect();
        let (pull_credentials, warnings) = pull_secrets::credentials(&self.inputs);
        Resolved {
            bundle: Bundle {
                pod: Pod::clone(pod),
                containers,
                volumes,
                pull_credentials,
                node,
                before: Vec::new(),
            },
            failed_mounts,
            warnings,
        }
    }
}
