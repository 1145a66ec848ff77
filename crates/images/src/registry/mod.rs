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
use crate::store::{Claim, Store, StoreError};
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

    /// Whether the reference still stands for `digest`, as far as the first place tells. A digest can't stand for
    /// anything else, so that nobody needs to be asked if the image `is_open` to who wants it.
    pub async fn is_still(&self, digest: Digest, is_open: bool) -> bool {
        match (self.reference.digest(), self.all.first()) {
            (Some(own), _) if own != digest || is_open => own == digest,
            (_, Some(source)) => source.digest(&self.reference.version()).await == Some(digest),
            (_, None) => false,
        }
    }

    /// The secret of the request's own that was needed to get in, if one was.
    pub async fn key(&self) -> Option<Secret> {
        let source = self.all.get(self.best.load(Relaxed))?;
        source.key().await
    }

    /// The manifest or index that the reference stands for, or one by its digest.
    pub async fn manifest(
        &self,
        digest: Option<Digest>,
        progress: &dyn Progress,
    ) -> Result<(Descriptor, Vec<u8>), RegistryError> {
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

    /// Has a blob in the store: finds it there, waits for whoever downloads it, or downloads it.
    pub async fn blob(
        &self,
        store: &Store,
        blob: &Descriptor,
        progress: &dyn Progress,
    ) -> Result<(), RegistryError> {
        let waiting = || progress.event(Event::Waiting { blob: blob.digest });
        let mut partial = match store.claim(blob, waiting).await? {
            Claim::Present => return Ok(()),
            Claim::Download(partial) => partial,
        };
        let mut last = None;
        for (at, source) in self.in_order() {
            self.explain(last.take(), progress);
            match download::download(source, blob, &mut partial, progress).await {
                Ok(()) => {
                    self.best.store(at, Relaxed);
                    let kept = tokio::task::spawn_blocking(move || partial.finish()).await;
                    kept.map_err(|_| StoreError::Busy(store.path().to_path_buf()))??;
                    progress.event(Event::Downloaded {
                        blob: blob.digest,
                        size: blob.size,
                    });
                    return Ok(());
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
