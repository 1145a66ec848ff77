//! Cluster trust bundles, watched as soon as a pod uses one.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::certificates::v1::ClusterTrustBundle;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::watcher;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;
use volumes::content::TrustBundles;

use super::watch_events::watch_events;
use super::{FIRST_SYNC_TIMEOUT, references};

const MAX_TRUST_BUNDLE_RETRY_DELAY: Duration = Duration::from_secs(5);

/// All trust bundles of the cluster. Few clusters have any, so the watch starts with the first pod that uses them.
pub(super) struct TrustBundleCache {
    client: Client,
    watch: Mutex<Option<TrustBundleWatch>>,
}

struct TrustBundleWatch {
    /// `None` until all bundles were received.
    bundles: watch::Receiver<Option<Arc<TrustBundles>>>,
    _task: AbortOnDropHandle<()>,
}

/// The trust bundles for a pod.
#[derive(Default)]
pub(super) struct PodTrustBundles {
    /// `None` if the pod uses none, or they were not received yet.
    pub bundles: Option<Arc<TrustBundles>>,
    /// Notifies of changes, if the pod uses bundles.
    pub changes: Option<watch::Receiver<Option<Arc<TrustBundles>>>>,
}

impl TrustBundleCache {
    pub(super) fn new(client: Client) -> Self {
        Self {
            client,
            watch: Mutex::default(),
        }
    }

    /// The bundles, if a volume of this pod uses any.
    pub(super) async fn get(&self, pod: &Pod) -> PodTrustBundles {
        if !uses_trust_bundles(pod) {
            return PodTrustBundles::default();
        }
        let mut changes = self.watch();
        // The first change is the first response.
        let _ = tokio::time::timeout(FIRST_SYNC_TIMEOUT, changes.wait_for(Option::is_some)).await;
        let bundles = changes.borrow_and_update().clone();
        PodTrustBundles {
            bundles,
            changes: Some(changes),
        }
    }

    fn watch(&self) -> watch::Receiver<Option<Arc<TrustBundles>>> {
        let mut watch = self.watch.lock().unwrap();
        let watch = watch.get_or_insert_with(|| {
            let (sender, bundles) = watch::channel(None);
            let task = watch_all(self.client.clone(), sender);
            TrustBundleWatch {
                bundles,
                _task: AbortOnDropHandle::new(tokio::spawn(task)),
            }
        });
        watch.bundles.clone()
    }
}

fn uses_trust_bundles(pod: &Pod) -> bool {
    references::used_volumes(pod)
        .filter_map(|volume| volume.projected.as_ref())
        .flat_map(|source| source.sources.iter().flatten())
        .any(|part| part.cluster_trust_bundle.is_some())
}

async fn watch_all(client: Client, sender: watch::Sender<Option<Arc<TrustBundles>>>) {
    let api: Api<ClusterTrustBundle> = Api::all(client);
    let config = watcher::Config::default();
    let mut listed = TrustBundles::new();
    let handle = |event| match event {
        watcher::Event::Init => listed.clear(),
        watcher::Event::InitApply(bundle) => insert(&mut listed, bundle),
        watcher::Event::InitDone => {
            let all = Arc::new(std::mem::take(&mut listed));
            sender.send_modify(|bundles| *bundles = Some(all));
        }
        watcher::Event::Apply(bundle) => {
            sender.send_modify(|bundles| insert(make_mut(bundles), bundle));
        }
        watcher::Event::Delete(bundle) => sender.send_modify(|bundles| {
            let name = bundle.metadata.name.unwrap_or_default();
            make_mut(bundles).remove(&name);
        }),
    };
    let objects = "ClusterTrustBundles";
    watch_events(api, config, MAX_TRUST_BUNDLE_RETRY_DELAY, objects, handle).await;
}

/// Copies the bundles if a pod still uses the current ones.
fn make_mut(bundles: &mut Option<Arc<TrustBundles>>) -> &mut TrustBundles {
    Arc::make_mut(bundles.get_or_insert_default())
}

fn insert(bundles: &mut TrustBundles, bundle: ClusterTrustBundle) {
    let name = bundle.metadata.name.clone().unwrap_or_default();
    bundles.insert(name, Arc::new(bundle));
}
