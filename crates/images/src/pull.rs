//! Making an image ready to run.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

use futures::{StreamExt, TryStreamExt, stream};
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::error::{ImageError, PullError};
use crate::layers::{Allowance, Layers};
use crate::manifest::{Configuration, Descriptor, Document, DocumentError, ImageConfig};
use crate::progress::{Event, Progress};
use crate::reference::Reference;
use crate::registry::{Credential, RegistryConfig, Sources};
use crate::store::{Store, StoreError, Stored};

/// How many layers of an image are downloaded and unpacked at once.
const AT_ONCE: usize = 3;

/// When to ask the registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PullPolicy {
    /// Every time; what is here already is not downloaded again.
    Always,
    /// If the image isn't here.
    IfNotPresent,
    /// Never.
    Never,
}

/// What is wanted.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PullRequest {
    /// The image's name, as the user wrote it.
    pub reference: String,
    /// When to ask the registry.
    pub policy: PullPolicy,
    /// From imagePullSecrets.
    #[serde(default)]
    pub credentials: Vec<Credential>,
}

/// An image that is ready to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Its full name.
    pub reference: String,
    /// What exactly it is: its repository with a digest.
    pub id: String,
    /// The size of what was, or would have been, downloaded.
    pub size: u64,
    /// The unpacked layers, the lowest first. None appears twice.
    pub layers: Vec<PathBuf>,
    /// What to run.
    pub config: ImageConfig,
    /// Whether the registry was asked; if not, it was here already.
    pub pulled: bool,
}

/// Makes an image ready to run on this node.
pub async fn ensure(
    store: &Store,
    layers: &Layers,
    request: &PullRequest,
    config: &RegistryConfig,
    progress: &dyn Progress,
) -> Result<Image, ImageError> {
    get(store, Some(layers), request, config, progress).await
}

/// Brings an image into the store, and unpacks nothing.
pub async fn pull(
    store: &Store,
    request: &PullRequest,
    config: &RegistryConfig,
    progress: &dyn Progress,
) -> Result<Image, ImageError> {
    get(store, None, request, config, progress).await
}

async fn get(
    store: &Store,
    layers: Option<&Layers>,
    request: &PullRequest,
    config: &RegistryConfig,
    progress: &dyn Progress,
) -> Result<Image, ImageError> {
    let reference: Reference = request.reference.parse().map_err(ImageError::Name)?;
    let inspecting = |error: StoreError| ImageError::inspecting(&reference, error);
    let pulling = |error: PullError| ImageError::pulling(&reference, error);
    // Until the reference is written, nothing but this keeps its blobs.
    let _in_use = store.in_use().await.map_err(inspecting)?;
    let sources = Sources::new(&reference, config, &request.credentials);
    let job = Job {
        store,
        layers,
        sources: (request.policy != PullPolicy::Never).then_some(&sources),
        progress,
    };
    let known = job.present(&reference).map_err(inspecting)?;
    let marks: Vec<Digest> = request
        .credentials
        .iter()
        .map(|credential| credential.secret.mark(&reference.name()))
        .collect();
    let is_open = match &known {
        Some(known) => store
            .is_open(&reference, known, &marks)
            .map_err(inspecting)?,
        None => false,
    };
    if request.policy != PullPolicy::Always
        && is_open
        && let Some(stored) = &known
    {
        let paths = job.layers(stored, false).await.map_err(pulling)?;
        store.touch(&reference);
        return Ok(image(&reference, stored, paths, false));
    }
    // That an image is here which it may not have is nothing that a pod should learn.
    let Some(sources) = job.sources else {
        return Err(ImageError::NeverPull(request.reference.clone()));
    };
    let stored = match known {
        Some(known) if sources.is_still(known.top.digest, is_open).await => known,
        _ => job.documents(sources).await.map_err(pulling)?,
    };
    let paths = job.layers(&stored, true).await.map_err(pulling)?;
    // What the user brings into the store by hand is for all of the user's pods.
    let key = match layers {
        Some(_) => sources.key().await,
        None => None,
    };
    let mark = key.map(|secret| secret.mark(&reference.name()));
    store
        .open_to(&reference, &stored, mark)
        .and_then(|()| store.name(&reference, &stored.top))
        .map_err(|error| pulling(error.into()))?;
    Ok(image(&reference, &stored, paths, true))
}

fn image(reference: &Reference, stored: &Stored, layers: Vec<PathBuf>, pulled: bool) -> Image {
    Image {
        reference: reference.to_string(),
        id: reference.pinned(stored.top.digest),
        size: stored.manifest.size(),
        layers,
        config: stored.configuration.config.clone(),
        pulled,
    }
}

/// One image on its way.
struct Job<'a> {
    store: &'a Store,
    layers: Option<&'a Layers>,
    /// None: no registry may be asked.
    sources: Option<&'a Sources>,
    progress: &'a dyn Progress,
}

impl Job<'_> {
    /// The image, if all of it is here: each layer unpacked, or at least its blob.
    fn present(&self, reference: &Reference) -> Result<Option<Stored>, StoreError> {
        let Some(top) = self.store.lookup(reference)? else {
            return Ok(None);
        };
        let Some(stored) = self.store.image(&top)? else {
            return Ok(None);
        };
        let unpacked = |diff_id: Digest| self.layers.is_some_and(|layers| layers.has(diff_id));
        let mut all = stored
            .manifest
            .layers
            .iter()
            .zip(&stored.configuration.diff_ids);
        let here = all.all(|(blob, diff_id)| unpacked(*diff_id) || self.store.has(blob));
        Ok(here.then_some(stored))
    }

    /// Fetches the manifest for this machine and the configuration, and keeps them.
    async fn documents(&self, sources: &Sources) -> Result<Stored, PullError> {
        let (top, mut bytes) = sources.manifest(None, self.progress).await?;
        let mut at = top.clone();
        for _ in 0..3 {
            self.store.put(&bytes)?;
            match Document::parse(&bytes, &at.media_type)? {
                Document::Index(index) => {
                    at = index.choose()?.clone();
                    bytes = match self.store.read_document(at.digest)? {
                        Some(bytes) => bytes,
                        None => sources.manifest(Some(at.digest), self.progress).await?.1,
                    };
                }
                Document::Manifest(manifest) => {
                    self.store.close_new(&manifest.config)?;
                    self.fetch(&manifest.config, sources).await?;
                    let config = self.store.read_document(manifest.config.digest)?;
                    let configuration =
                        Configuration::parse(&config.unwrap_or_default(), manifest.layers.len())?;
                    return Ok(Stored {
                        top,
                        manifest,
                        manifest_descriptor: at,
                        configuration,
                    });
                }
            }
        }
        Err(DocumentError::Unsupported("it is an index of an index of an index".to_owned()).into())
    }

    /// Has a blob in the store.
    async fn fetch(&self, blob: &Descriptor, sources: &Sources) -> Result<(), PullError> {
        Ok(sources.blob(self.store, blob, self.progress).await?)
    }

    /// Has all layers unpacked, if that is wanted; `keep` them in the store too, for other nodes, or
    /// have there only what must be unpacked.
    async fn layers(&self, stored: &Stored, keep: bool) -> Result<Vec<PathBuf>, PullError> {
        let most = self.layers.map(Layers::limits).unwrap_or_default().bytes;
        if stored.manifest.size() > most {
            return Err(DocumentError::Unsupported(format!(
                "it is {} bytes large, and {most} are allowed",
                stored.manifest.size()
            ))
            .into());
        }
        let allowance = self
            .layers
            .map(|layers| Arc::new(Allowance::new(layers.limits())));
        let pairs = stored
            .manifest
            .layers
            .iter()
            .zip(&stored.configuration.diff_ids);
        // overlayfs refuses a layer that appears twice; the upper one hides the lower one anyway.
        let mut seen = HashSet::new();
        let mut wanted: Vec<_> = pairs
            .rev()
            .filter(|(_, diff_id)| seen.insert(**diff_id))
            .collect();
        wanted.reverse();
        let paths: Vec<Option<PathBuf>> = stream::iter(wanted)
            .map(|(blob, diff_id)| {
                let allowance = allowance.clone();
                async move { self.layer(blob, *diff_id, keep, allowance).await }
            })
            .buffered(AT_ONCE)
            .try_collect()
            .await?;
        Ok(paths.into_iter().flatten().collect())
    }

    async fn layer(
        &self,
        blob: &Descriptor,
        diff_id: Digest,
        keep: bool,
        allowance: Option<Arc<Allowance>>,
    ) -> Result<Option<PathBuf>, PullError> {
        let unpacked = self.layers.is_some_and(|layers| layers.has(diff_id));
        if let Some(sources) = self.sources
            && (keep || !unpacked)
        {
            self.fetch(blob, sources).await?;
        }
        let (Some(layers), Some(allowance)) = (self.layers, allowance) else {
            return Ok(None);
        };
        match self.unpack(layers, blob, diff_id, &allowance).await {
            // A blob that went bad on disk is fetched once more; one that was always bad is not.
            Err(PullError::Layer(error)) if error.blames_archive() => match self.sources {
                Some(sources) if self.store.discard_if_damaged(blob.digest)? => {
                    self.fetch(blob, sources).await?;
                    self.unpack(layers, blob, diff_id, &allowance).await
                }
                _ => Err(error.into()),
            },
            done => done,
        }
        .map(Some)
    }

    async fn unpack(
        &self,
        layers: &Layers,
        blob: &Descriptor,
        diff_id: Digest,
        allowance: &Arc<Allowance>,
    ) -> Result<PathBuf, PullError> {
        let fresh = !layers.has(diff_id);
        if fresh {
            self.progress.event(Event::Unpacking { blob: blob.digest });
        }
        let path = self.store.blob_path(blob.digest);
        let (layers, digest, allowance) = (layers.clone(), blob.digest, allowance.clone());
        let unpack = move || layers.unpack(&path, digest, diff_id, &allowance);
        let done = tokio::task::spawn_blocking(unpack).await;
        let path = done.map_err(|error| {
            StoreError::io("unpack", self.store.path(), std::io::Error::other(error))
        })??;
        if fresh {
            self.progress.event(Event::Unpacked { blob: blob.digest });
        }
        Ok(path)
    }
}
