//! Cluster trust bundles, watched from the first pod on that asks for one.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::TryStreamExt;
use k8s_openapi::api::certificates::v1::ClusterTrustBundle;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;
use volumes::content::TrustBundles;

use super::{PATIENCE, references};
use crate::backoff::Doubling;

/// How long to wait at most between attempts to watch.
const RETRY_AT_MOST: Duration = Duration::from_secs(5);

/// All trust bundles of the cluster; few clusters have any, so nobody asks before a pod does.
pub(super) struct Trust {
    client: Client,
    following: Mutex<Option<Following>>,
}

struct Following {
    /// `None` until all bundles are known.
    known: watch::Receiver<Option<Arc<TrustBundles>>>,
    _watch: AbortOnDropHandle<()>,
}

/// What a pod is told.
#[derive(Default)]
pub(super) struct Answer {
    /// `None` if the pod asks for none, or the API server has said nothing yet.
    pub bundles: Option<Arc<TrustBundles>>,
    /// Signals changes after this answer, if the pod asks for bundles.
    pub signal: Option<watch::Receiver<Option<Arc<TrustBundles>>>>,
}

impl Trust {
    pub(super) fn new(client: Client) -> Self {
        Self {
            client,
            following: Mutex::default(),
        }
    }

    /// The bundles, if a volume of this pod asks for any.
    pub(super) async fn get(&self, pod: &Pod) -> Answer {
        if !is_asked_for(pod) {
            return Answer::default();
        }
        let mut known = self.follow();
        // The first change is the first answer.
        let _ = tokio::time::timeout(PATIENCE, known.wait_for(Option::is_some)).await;
        let bundles = known.borrow_and_update().clone();
        Answer {
            bundles,
            signal: Some(known),
        }
    }

    fn follow(&self) -> watch::Receiver<Option<Arc<TrustBundles>>> {
        // What is held is whole after every statement, so a panic elsewhere can't have left it half-written.
        let mut following = self
            .following
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let following = following.get_or_insert_with(|| {
            let (tell, known) = watch::channel(None);
            let task = watch_all(self.client.clone(), tell);
            Following {
                known,
                _watch: AbortOnDropHandle::new(tokio::spawn(task)),
            }
        });
        following.known.clone()
    }
}

fn is_asked_for(pod: &Pod) -> bool {
    references::used_volumes(pod)
        .filter_map(|volume| volume.projected.as_ref())
        .flat_map(|source| source.sources.iter().flatten())
        .any(|part| part.cluster_trust_bundle.is_some())
}

async fn watch_all(client: Client, tell: watch::Sender<Option<Arc<TrustBundles>>>) {
    let api: Api<ClusterTrustBundle> = Api::all(client);
    let events = watcher(api, watcher::Config::default()).backoff(Doubling::up_to(RETRY_AT_MOST));
    tokio::pin!(events);
    let mut listed = TrustBundles::new();
    loop {
        match events.try_next().await {
            Ok(Some(watcher::Event::Init)) => listed.clear(),
            Ok(Some(watcher::Event::InitApply(bundle))) => insert(&mut listed, bundle),
            Ok(Some(watcher::Event::InitDone)) => {
                let all = Arc::new(std::mem::take(&mut listed));
                tell.send_modify(|known| *known = Some(all));
            }
            Ok(Some(watcher::Event::Apply(bundle))) => {
                tell.send_modify(|known| insert(changed(known), bundle));
            }
            Ok(Some(watcher::Event::Delete(bundle))) => tell.send_modify(|known| {
                let name = bundle.metadata.name.unwrap_or_default();
                changed(known).remove(&name);
            }),
            Ok(None) => return,
            Err(error) => tracing::debug!(
                error = &error as &dyn std::error::Error,
                "watching cluster trust bundles"
            ),
        }
    }
}

/// To be changed; whoever was told before keeps what they were told.
fn changed(known: &mut Option<Arc<TrustBundles>>) -> &mut TrustBundles {
    Arc::make_mut(known.get_or_insert_default())
}

fn insert(bundles: &mut TrustBundles, bundle: ClusterTrustBundle) {
    let name = bundle.metadata.name.clone().unwrap_or_default();
    bundles.insert(name, Arc::new(bundle));
}
