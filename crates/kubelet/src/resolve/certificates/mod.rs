//! Certificates of pods, for projected volumes.
//!
//! ```text
//!   key.rs        a key, and the proof of having it
//!   requests.rs   the requests of this node, watched
//!   keeper.rs     one certificate: asked for, kept, renewed
//!   standing.rs   what a pod is told of it                      pure
//! ```

mod keeper;
mod key;
mod requests;
mod standing;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::{Pod, PodCertificateProjection};
use kube::Client;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use volumes::content::Credentials;

use self::keeper::{Keeper, Wish};
use self::requests::Requests;
pub(super) use self::standing::Standing;
use super::{PATIENCE, references};

/// The certificates of a pod.
#[derive(Default)]
pub(super) struct Answer {
    /// By volume and index of its source.
    pub certificates: BTreeMap<(String, usize), Result<Credentials, String>>,
    /// One signal for each; each has been seen.
    pub signals: Vec<watch::Receiver<Standing>>,
    /// Events of kind `Warning`: reason and message.
    pub warnings: Vec<(&'static str, String)>,
    /// When there will be other warnings.
    pub again_at: Option<Instant>,
}

/// All certificates of this node's pods.
pub(super) struct Certificates {
    client: Client,
    requests: Requests,
    kept: Mutex<HashMap<Key, Kept>>,
}

/// The pod's uid, its volume, and the index of the source there.
type Key = (String, String, usize);

struct Kept {
    standing: watch::Receiver<Standing>,
    since: Instant,
    _keeper: AbortOnDropHandle<()>,
}

/// A source of a projected volume.
#[derive(Clone, Copy)]
struct Source<'a> {
    volume: &'a str,
    index: usize,
    projection: &'a PodCertificateProjection,
}

/// All sources of a pod that are certificates.
fn sources(pod: &Pod) -> impl Iterator<Item = Source<'_>> {
    references::used_volumes(pod).flat_map(|volume| {
        let projected = volume.projected.iter();
        let parts = projected.flat_map(|projected| projected.sources.iter().flatten());
        parts.enumerate().filter_map(|(index, part)| {
            Some(Source {
                volume: &volume.name,
                index,
                projection: part.pod_certificate.as_ref()?,
            })
        })
    })
}

impl Certificates {
    pub(super) fn new(client: Client, node: &str) -> Self {
        Self {
            requests: Requests::new(client.clone(), node.to_owned()),
            client,
            kept: Mutex::default(),
        }
    }

    /// The certificates that a pod's volumes hold; those that it asks for the first time are waited for, but not for ever.
    pub(super) async fn get(&self, pod: &Pod) -> Answer {
        // All of them are on their way before the first one is waited for.
        let asked: Vec<_> = sources(pod)
            .map(|source| (source, self.keep(pod, source)))
            .collect();
        let mut answer = Answer::default();
        for (source, (mut standing, since)) in asked {
            let settled = standing.wait_for(Standing::is_settled);
            let _ = tokio::time::timeout_at(since + PATIENCE, settled).await;
            let (now, current) = (Instant::now(), standing.borrow_and_update().clone());
            let Source {
                volume,
                index,
                projection,
            } = source;
            let whose = format!("volume {volume:?}, signer {:?}", projection.signer_name);
            answer.warnings.extend(current.warnings(&whose, now));
            let again_at = current.again_at(now);
            answer.again_at = answer.again_at.into_iter().chain(again_at).min();
            answer
                .certificates
                .insert((volume.to_owned(), index), current.credentials());
            answer.signals.push(standing);
        }
        answer
    }

    /// Follows a certificate, from now on at the latest.
    fn keep(&self, pod: &Pod, source: Source<'_>) -> (watch::Receiver<Standing>, Instant) {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let uid = text(&pod.metadata.uid);
        let account = pod
            .spec
            .as_ref()
            .and_then(|spec| spec.service_account_name.clone());
        let mut kept = self.lock();
        let kept = kept
            .entry((uid.clone(), source.volume.to_owned(), source.index))
            .or_insert_with(|| {
                let (tell, standing) = watch::channel(Standing::default());
                let keeper = Keeper {
                    client: self.client.clone(),
                    wish: Wish {
                        namespace: text(&pod.metadata.namespace),
                        pod: text(&pod.metadata.name),
                        uid,
                        account: account
                            .filter(|name| !name.is_empty())
                            .unwrap_or_else(|| "default".to_owned()),
                        node: self.requests.node().to_owned(),
                        projection: source.projection.clone(),
                    },
                    requests: self.requests.follow(),
                    standing: tell,
                };
                Kept {
                    standing,
                    since: Instant::now(),
                    _keeper: AbortOnDropHandle::new(tokio::spawn(keeper.keep())),
                }
            });
        (kept.standing.clone(), kept.since)
    }

    /// The pod is gone, and its keys with it.
    pub(super) fn forget(&self, uid: &str) {
        self.lock().retain(|(of, _, _), _| of != uid);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Kept>> {
        // The map is whole after every statement, so a panic elsewhere can't have left it half-written.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
