//! The client for registries.
//!
//! [`PullSources`] are the mirrors of an image's registry, then the registry itself. Each is a
//! [`source::PullSource`], which speaks the OCI distribution protocol and answers authentication challenges
//! ([`auth`]) with the matching [`credentials`].

mod auth;
mod blob_download;
mod client;
pub mod config;
pub mod credentials;
mod docker_config;
mod error;
mod source;

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

pub use config::{RegistryConfig, RegistryConfigError};
pub use credentials::{CredentialError, RegistryCredential, RegistrySecret};
pub use error::RegistryError;

use crate::manifest::Descriptor;
use crate::progress::{PullEvent, PullProgress};
use crate::reference::Reference;
use crate::store::{BlobClaim, Grant, ImageStore, ImageStoreError, Requester};
use download::Digest;
use download::error_chain;
use source::PullSource;

/// The registries that one image can be pulled from, in the order of attempts.
#[derive(Debug)]
pub struct PullSources {
    reference: Reference,
    all: Vec<PullSource>,
    /// The source of the last success: if it has the manifest, it has the blobs too.
    best: AtomicUsize,
}

impl PullSources {
    /// Resolves the sources; sends no request.
    pub fn new(
        reference: &Reference,
        config: &RegistryConfig,
        credentials: &[RegistryCredential],
    ) -> PullSources {
        let all = config
            .endpoints(reference)
            .into_iter()
            .map(|endpoint| PullSource::new(endpoint, config, credentials))
            .collect();
        PullSources {
            reference: reference.clone(),
            all,
            best: AtomicUsize::new(0),
        }
    }

    /// Whether the reference still resolves to `digest`, according to the first source. This does not prove access, so use
    /// it only for requesters that may use the image. A reference with a digest needs no request.
    pub async fn resolves_to(&self, digest: Digest) -> bool {
        match (self.reference.digest(), self.all.first()) {
            (Some(own), _) => own == digest,
            (_, Some(source)) => source.digest(&self.reference.version()).await == Some(digest),
            (_, None) => false,
        }
    }

    /// Fetches the manifest or index of the reference, or the one with `digest`. Returns also the grant under which the registry
    /// sent it.
    pub async fn manifest(
        &self,
        digest: Option<Digest>,
        progress: &dyn PullProgress,
    ) -> Result<(Descriptor, Vec<u8>, Grant), RegistryError> {
        let digest = digest.or(self.reference.digest());
        let version = digest.map_or_else(|| self.reference.version(), |digest| digest.to_string());
        let mut last = None;
        for (at, source) in self.in_order() {
            self.report_failed_mirror(last.take(), progress);
            match source.manifest(&version, digest).await {
                Ok(found) => {
                    self.best.store(at, Relaxed);
                    return Ok(found);
                }
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or(RegistryError::NoSource))
    }

    /// Makes sure that a blob is in the store: finds it there, waits for a concurrent download, or downloads it. Returns
    /// the grant under which the registry sent it, if known.
    pub async fn blob(
        &self,
        store: &ImageStore,
        blob: &Descriptor,
        requester: &Requester,
        progress: &dyn PullProgress,
    ) -> Result<Option<Grant>, RegistryError> {
        let waiting = || progress.event(PullEvent::Waiting { blob: blob.digest });
        let mut partial = match store.claim(blob, requester, waiting).await? {
            BlobClaim::Present(grant) => return Ok(Some(grant)),
            BlobClaim::Download(partial) => partial,
        };
        let mut last = None;
        for (at, source) in self.in_order() {
            self.report_failed_mirror(last.take(), progress);
            match blob_download::download(source, blob, &mut partial, progress).await {
                Ok(grants) => {
                    self.best.store(at, Relaxed);
                    // Without a request: an earlier attempt downloaded the whole blob, and it is unknown with which of the
                    // requester's secrets.
                    let grant = match grants.is_empty() {
                        true => requester.is_anonymous().then_some(Grant::Public),
                        false => Grant::combined(&grants),
                    };
                    // Before publishing the blob, so that waiting pulls find the grant.
                    if let Some(grant) = &grant {
                        store.grant(blob.digest, requester.repository(), grant)?;
                    }
                    let published = tokio::task::spawn_blocking(move || partial.finish()).await;
                    published.map_err(|_| ImageStoreError::Busy(store.path().to_path_buf()))??;
                    progress.event(PullEvent::Downloaded {
                        blob: blob.digest,
                        size: blob.size,
                    });
                    return Ok(grant);
                }
                // Another source would not help.
                Err(error @ RegistryError::Store(_)) => return Err(error),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or(RegistryError::NoSource))
    }

    /// Starts with the last successful source; earlier ones have failed.
    fn in_order(&self) -> impl Iterator<Item = (usize, &PullSource)> {
        let best = self.best.load(Relaxed);
        self.all.iter().enumerate().skip(best)
    }

    fn report_failed_mirror(&self, error: Option<RegistryError>, progress: &dyn PullProgress) {
        if let Some(error) = error {
            let text = format!("skipping a mirror: {}", error_chain(&error));
            progress.event(PullEvent::Note { text });
        }
    }
}
