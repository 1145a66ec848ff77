//! Registries: where an image may come from, how to get in, and how to fetch from there.
//!
//! [`Sources`] are the places that an image can come from: the mirrors of its registry, then the
//! registry itself. Each is a [`source::Source`], which speaks the distribution protocol over HTTP,
//! and answers challenges with what [`auth`] and [`credentials`] find.

mod auth;
mod client;
pub mod config;
pub mod credentials;
mod docker_config;
mod download;
mod error;
mod source;

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

pub use config::{ConfigError, RegistryConfig};
pub use credentials::{Credential, CredentialError, Secret};
pub use error::RegistryError;

use crate::digest::Digest;
use crate::error::causes;
use crate::manifest::Descriptor;
use crate::progress::{Event, Progress};
use crate::reference::Reference;
use crate::store::{Claim, Grant, Requester, Store, StoreError};
use source::Source;

/// The places that one image may come from, in the order in which they are asked.
#[derive(Debug)]
pub struct Sources {
    reference: Reference,
    all: Vec<Source>,
    /// The one that had the manifest: it will have the blobs too.
    best: AtomicUsize,
}

impl Sources {
    /// Nothing is asked yet.
    pub fn new(
        reference: &Reference,
        config: &RegistryConfig,
        credentials: &[Credential],
    ) -> Sources {
        let all = config
            .places(reference)
            .into_iter()
            .map(|place| Source::new(place, config, credentials))
            .collect();
        Sources {
            reference: reference.clone(),
            all,
            best: AtomicUsize::new(0),
        }
    }

    /// Whether the reference still stands for `digest`, as far as the first place tells. It proves no access, so it is only
    /// for requesters who may use the image. A digest can't stand for anything else, so that nobody needs to be asked.
    pub async fn is_still(&self, digest: Digest) -> bool {
        match (self.reference.digest(), self.all.first()) {
            (Some(own), _) => own == digest,
            (_, Some(source)) => source.digest(&self.reference.version()).await == Some(digest),
            (_, None) => false,
        }
    }

    /// The manifest or index that the reference stands for, or one by its digest; and to whom it was sent.
    pub async fn manifest(
        &self,
        digest: Option<Digest>,
        progress: &dyn Progress,
    ) -> Result<(Descriptor, Vec<u8>, Grant), RegistryError> {
        let digest = digest.or(self.reference.digest());
        let version = digest.map_or_else(|| self.reference.version(), |digest| digest.to_string());
        let mut last = None;
        for (at, source) in self.in_order() {
            self.explain(last.take(), progress);
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

    /// Has a blob in the store: finds it there, waits for whoever downloads it, or downloads it. Says what that took the
    /// requester, if that is known.
    pub async fn blob(
        &self,
        store: &Store,
        blob: &Descriptor,
        requester: &Requester,
        progress: &dyn Progress,
    ) -> Result<Option<Grant>, RegistryError> {
        let waiting = || progress.event(Event::Waiting { blob: blob.digest });
        let mut partial = match store.claim(blob, requester, waiting).await? {
            Claim::Present(grant) => return Ok(Some(grant)),
            Claim::Download(partial) => partial,
        };
        let mut last = None;
        for (at, source) in self.in_order() {
            self.explain(last.take(), progress);
            match download::download(source, blob, &mut partial, progress).await {
                Ok(grants) => {
                    self.best.store(at, Relaxed);
                    // Without a request all of it was there from an attempt before, by whichever of the requester's secrets.
                    let grant = match grants.is_empty() {
                        true => requester.is_anonymous().then_some(Grant::Everybody),
                        false => Grant::combined(&grants),
                    };
                    // First, so that whoever waits for the blob finds that it may use it.
                    if let Some(grant) = &grant {
                        store.grant(blob.digest, requester.repository(), grant)?;
                    }
                    let kept = tokio::task::spawn_blocking(move || partial.finish()).await;
                    kept.map_err(|_| StoreError::Busy(store.path().to_path_buf()))??;
                    progress.event(Event::Downloaded {
                        blob: blob.digest,
                        size: blob.size,
                    });
                    return Ok(grant);
                }
                // No other place would help.
                Err(error @ RegistryError::Store(_)) => return Err(error),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or(RegistryError::NoSource))
    }

    /// Begins with the one that worked last; those before it have failed.
    fn in_order(&self) -> impl Iterator<Item = (usize, &Source)> {
        let best = self.best.load(Relaxed);
        self.all.iter().enumerate().skip(best)
    }

    fn explain(&self, error: Option<RegistryError>, progress: &dyn Progress) {
        if let Some(error) = error {
            let text = format!("a mirror can't be used: {}", causes(&error));
            progress.event(Event::Note { text });
        }
    }
}
