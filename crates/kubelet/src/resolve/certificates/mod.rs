//! Pod certificates, for projected volumes.
//!
//! ```text
//!   private_key.rs    private keys, and the proof of possession
//!   request_watch.rs  watch of this node's PodCertificateRequests
//!   renewal.rs        requests and renews one certificate
//!   state.rs          state of one certificate, and its messages     pure
//! ```

mod private_key;
mod renewal;
mod request_watch;
mod state;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

use k8s_openapi::api::core::v1::{Pod, PodCertificateProjection};
use kube::Client;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use volumes::content::CredentialBundle;

use self::renewal::{CertificateRenewal, CertificateSpec};
use self::request_watch::RequestWatch;
pub(super) use self::state::CertificateState;
use super::{FIRST_SYNC_TIMEOUT, references};

/// The certificates of a pod.
#[derive(Default)]
pub(super) struct PodCertificates {
    /// By volume and index of its source.
    pub certificates: BTreeMap<(String, usize), Result<CredentialBundle, String>>,
    /// The state of each, with the current value marked as seen.
    pub states: Vec<watch::Receiver<CertificateState>>,
    /// Events of type `Warning`: reason and message.
    pub warnings: Vec<(&'static str, String)>,
    /// When the warnings change.
    pub refresh_at: Option<Instant>,
}

/// Requests and renews the certificates of this node's pods.
pub(super) struct CertificateManager {
    client: Client,
    requests: RequestWatch,
    certificates: Mutex<HashMap<CertificateKey, ManagedCertificate>>,
}

/// The pod's uid, its volume, and the index of the source there.
type CertificateKey = (String, String, usize);

struct ManagedCertificate {
    state: watch::Receiver<CertificateState>,
    since: Instant,
    _renewal: AbortOnDropHandle<()>,
}

/// A certificate source of a projected volume.
#[derive(Clone, Copy)]
struct CertificateSource<'a> {
    volume: &'a str,
    index: usize,
    projection: &'a PodCertificateProjection,
}

/// All certificate sources of a pod.
fn certificate_sources(pod: &Pod) -> impl Iterator<Item = CertificateSource<'_>> {
    references::used_volumes(pod).flat_map(|volume| {
        let projected = volume.projected.iter();
        let parts = projected.flat_map(|projected| projected.sources.iter().flatten());
        parts.enumerate().filter_map(|(index, part)| {
            Some(CertificateSource {
                volume: &volume.name,
                index,
                projection: part.pod_certificate.as_ref()?,
            })
        })
    })
}

impl CertificateManager {
    pub(super) fn new(client: Client, node: &str) -> Self {
        Self {
            requests: RequestWatch::new(client.clone(), node.to_owned()),
            client,
            certificates: Mutex::default(),
        }
    }

    /// The certificates of a pod's volumes. Waits for new ones, with a time-out.
    pub(super) async fn get(&self, pod: &Pod) -> PodCertificates {
        // Request all of them before waiting for the first one.
        let requested: Vec<_> = certificate_sources(pod)
            .map(|source| (source, self.manage(pod, source)))
            .collect();
        let mut found = PodCertificates::default();
        for (source, (mut state, since)) in requested {
            let settled = state.wait_for(CertificateState::is_settled);
            let _ = tokio::time::timeout_at(since + FIRST_SYNC_TIMEOUT, settled).await;
            let (now, current) = (Instant::now(), state.borrow_and_update().clone());
            let CertificateSource {
                volume,
                index,
                projection,
            } = source;
            let description = format!("volume {volume:?}, signer {:?}", projection.signer_name);
            found.warnings.extend(current.warnings(&description, now));
            let refresh_at = current.next_warning_at(now);
            found.refresh_at = found.refresh_at.into_iter().chain(refresh_at).min();
            found
                .certificates
                .insert((volume.to_owned(), index), current.credentials());
            found.states.push(state);
        }
        found
    }

    /// Starts the renewal of a certificate, if it is not running yet. Returns its state and when it was started.
    fn manage(
        &self,
        pod: &Pod,
        source: CertificateSource<'_>,
    ) -> (watch::Receiver<CertificateState>, Instant) {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let uid = text(&pod.metadata.uid);
        let account = pod
            .spec
            .as_ref()
            .and_then(|spec| spec.service_account_name.clone());
        let mut certificates = self.certificates.lock().unwrap();
        let managed = certificates
            .entry((uid.clone(), source.volume.to_owned(), source.index))
            .or_insert_with(|| {
                let (sender, state) = watch::channel(CertificateState::default());
                let renewal = CertificateRenewal {
                    client: self.client.clone(),
                    spec: CertificateSpec {
                        namespace: text(&pod.metadata.namespace),
                        pod: text(&pod.metadata.name),
                        uid,
                        account: account
                            .filter(|name| !name.is_empty())
                            .unwrap_or_else(|| "default".to_owned()),
                        node: self.requests.node().to_owned(),
                        projection: source.projection.clone(),
                    },
                    requests: self.requests.watch(),
                    state: sender,
                };
                ManagedCertificate {
                    state,
                    since: Instant::now(),
                    _renewal: AbortOnDropHandle::new(tokio::spawn(renewal.run())),
                }
            });
        (managed.state.clone(), managed.since)
    }

    /// Drops the certificates and keys of a pod.
    pub(super) fn forget(&self, uid: &str) {
        self.certificates
            .lock()
            .unwrap()
            .retain(|(of, _, _), _| of != uid);
    }
}
