//! Pulls images and makes them ready to run.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

use futures::{StreamExt, TryStreamExt, stream};
use serde::{Deserialize, Serialize};

use crate::error::{ImageError, PullError};
use crate::layers::{Layers, UnpackBudget};
use crate::manifest::{Descriptor, Document, DocumentError, ImageConfig, ImageConfiguration};
use crate::progress::{PullEvent, PullProgress};
use crate::reference::Reference;
use crate::registry::{PullSources, RegistryConfig, RegistryCredential};
use crate::store::{Grant, ImageStore, ImageStoreError, Requester, StoredImage};
use download::Digest;

/// The number of layers of an image that are downloaded and unpacked at the same time.
const CONCURRENT_LAYERS: usize = 3;

/// Kubernetes' `imagePullPolicy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PullPolicy {
    /// Contact the registry every time; present blobs are not downloaded again.
    Always,
    /// Contact the registry if the image is not present.
    IfNotPresent,
    /// Never contact the registry.
    Never,
}

/// A request to pull an image.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PullRequest {
    /// The image's name as the user wrote it.
    pub reference: String,
    /// When to contact the registry.
    pub policy: PullPolicy,
    /// From imagePullSecrets.
    #[serde(default)]
    pub credentials: Vec<RegistryCredential>,
}

/// An image that is in the store and, after [`ensure`], unpacked on this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalImage {
    /// The full name.
    pub reference: String,
    /// The repository with the image's digest.
    pub id: String,
    /// The compressed size in bytes.
    pub size: u64,
    /// The unpacked layers, lowest first, without duplicates.
    pub layers: Vec<PathBuf>,
    /// The defaults for a container.
    pub config: ImageConfig,
    /// Whether the registry was contacted. False if the image was present and the policy is not `Always`.
    pub pulled: bool,
}

/// Makes an image ready to run on this node: pulls it if needed, and unpacks its layers.
pub async fn ensure(
    store: &ImageStore,
    layers: &Layers,
    request: &PullRequest,
    config: &RegistryConfig,
    progress: &dyn PullProgress,
) -> Result<LocalImage, ImageError> {
    pull_image(store, Some(layers), request, config, progress).await
}

/// Pulls an image into the store without unpacking it.
pub async fn pull(
    store: &ImageStore,
    request: &PullRequest,
    config: &RegistryConfig,
    progress: &dyn PullProgress,
) -> Result<LocalImage, ImageError> {
    pull_image(store, None, request, config, progress).await
}

async fn pull_image(
    store: &ImageStore,
    layers: Option<&Layers>,
    request: &PullRequest,
    config: &RegistryConfig,
    progress: &dyn PullProgress,
) -> Result<LocalImage, ImageError> {
    let reference: Reference = request.reference.parse().map_err(ImageError::InvalidName)?;
    let inspecting = |error: ImageStoreError| ImageError::inspecting(&reference, error);
    let pulling = |error: PullError| ImageError::pulling(&reference, error);
    // Until the reference is written, only this lock protects the blobs from garbage collection.
    let _lock = store.lock_shared().await.map_err(inspecting)?;
    let sources = PullSources::new(&reference, config, &request.credentials);
    let pull = ImagePull {
        store,
        layers,
        sources: (request.policy != PullPolicy::Never).then_some(&sources),
        requester: &Requester::new(&reference, &request.credentials),
        progress,
    };
    // An image that the requester may not use counts as absent, so that its presence is not disclosed.
    let present = pull.find_present(&reference).map_err(inspecting)?;
    if request.policy != PullPolicy::Always
        && let Some(stored) = &present
    {
        let fetched = pull.fetch_layers(stored, BlobAccess::Recorded, false).await;
        let (paths, _) = fetched.map_err(pulling)?;
        store.touch(&reference);
        return Ok(image(&reference, stored, paths, false));
    }
    let Some(sources) = pull.sources else {
        return Err(ImageError::NeverPull(request.reference.clone()));
    };
    let (stored, paths) = match present {
        Some(present) if sources.resolves_to(present.top.digest).await => {
            let fetched = pull
                .fetch_layers(&present, BlobAccess::Recorded, true)
                .await;
            let (paths, _) = fetched.map_err(pulling)?;
            (present, paths)
        }
        _ => pull.pull(sources).await.map_err(pulling)?,
    };
    let stored_reference = store.set_reference(&reference, &stored.top);
    stored_reference.map_err(|error| pulling(error.into()))?;
    Ok(image(&reference, &stored, paths, true))
}

fn image(
    reference: &Reference,
    stored: &StoredImage,
    layers: Vec<PathBuf>,
    pulled: bool,
) -> LocalImage {
    LocalImage {
        reference: reference.to_string(),
        id: reference.pinned(stored.top.digest),
        size: stored.manifest.size(),
        layers,
        config: stored.configuration.config.clone(),
        pulled,
    }
}

/// The blobs of the store that a pull may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BlobAccess {
    /// All blobs of the image: the access record of its manifest permits the requester to use them.
    Recorded,
    /// Only blobs whose own access records permit it. The others must be downloaded from the image's registry.
    ByBlob,
}

/// An image's documents, fetched from its registry.
struct Documents {
    stored: StoredImage,
    access: BlobAccess,
    /// The grant under which the registry sent each document.
    grants: Vec<(Digest, Grant)>,
    /// The grant under which the registry sent the configuration, if known.
    config: Option<Grant>,
}

/// The pull of one image.
struct ImagePull<'a> {
    store: &'a ImageStore,
    layers: Option<&'a Layers>,
    /// `None` with the pull policy `Never`.
    sources: Option<&'a PullSources>,
    requester: &'a Requester,
    progress: &'a dyn PullProgress,
}

impl ImagePull<'_> {
    /// The image, if the requester may use it and it is complete: each layer is unpacked or its blob is in the store.
    fn find_present(&self, reference: &Reference) -> Result<Option<StoredImage>, ImageStoreError> {
        let Some(top) = self.store.lookup(reference)? else {
            return Ok(None);
        };
        let Some(stored) = self.store.image_for(&top, self.requester)? else {
            return Ok(None);
        };
        let mut all = stored
            .manifest
            .layers
            .iter()
            .zip(&stored.configuration.diff_ids);
        let complete =
            all.all(|(blob, diff_id)| self.is_unpacked(blob, *diff_id) || self.store.has(blob));
        Ok(complete.then_some(stored))
    }

    fn is_unpacked(&self, blob: &Descriptor, diff_id: Digest) -> bool {
        self.layers
            .is_some_and(|layers| layers.has(diff_id, blob.digest))
    }

    /// Downloads everything that the requester has no access to yet, and records the new access.
    async fn pull(&self, sources: &PullSources) -> Result<(StoredImage, Vec<PathBuf>), PullError> {
        let documents = self.fetch_documents(sources).await?;
        let stored = documents.stored;
        let (paths, blobs) = self.fetch_layers(&stored, documents.access, true).await?;
        let manifest = stored.manifest_descriptor.digest;
        for (digest, grant) in documents.grants {
            let grant = match (digest == manifest, documents.access) {
                (false, _) => Some(grant),
                // Keep the access record: this pull did not test whether the registry would send the blobs to the requester.
                (true, BlobAccess::Recorded) => None,
                // `coracle image pull` makes an image available to all pods of the user.
                (true, BlobAccess::ByBlob) if self.layers.is_none() => Some(Grant::Public),
                (true, BlobAccess::ByBlob) => {
                    let parts = blobs.iter().cloned().chain([documents.config.clone()]);
                    let parts: Option<Vec<_>> = parts.chain([Some(grant)]).collect();
                    parts.and_then(|parts| Grant::combined(&parts))
                }
            };
            if let Some(grant) = grant {
                let repository = self.requester.repository();
                self.store.grant(digest, repository, &grant)?;
            }
        }
        Ok((stored, paths))
    }

    /// Fetches the manifest for this machine and the configuration into the store.
    async fn fetch_documents(&self, sources: &PullSources) -> Result<Documents, PullError> {
        let (top, mut bytes, grant) = sources.manifest(None, self.progress).await?;
        let (mut grants, mut documents) = (vec![(top.digest, grant)], vec![top.digest]);
        let mut at = top.clone();
        for _ in 0..3 {
            self.store.put(&bytes)?;
            match Document::parse(&bytes, &at.media_type)? {
                Document::Index(index) => {
                    at = index.choose()?.clone();
                    documents.push(at.digest);
                    let present = match self.store.may_use(at.digest, self.requester)? {
                        true => self.store.read_document(at.digest)?,
                        false => None,
                    };
                    bytes = match present {
                        Some(bytes) => bytes,
                        None => {
                            let digest = Some(at.digest);
                            let (_, bytes, grant) = sources.manifest(digest, self.progress).await?;
                            grants.push((at.digest, grant));
                            bytes
                        }
                    };
                }
                Document::Manifest(manifest) => {
                    let access = match self.store.may_use(at.digest, self.requester)? {
                        true => BlobAccess::Recorded,
                        false => BlobAccess::ByBlob,
                    };
                    let fetched = self.fetch(&manifest.config, access, sources).await?;
                    let config = self.store.read_document(manifest.config.digest)?;
                    let configuration = ImageConfiguration::parse(
                        &config.unwrap_or_default(),
                        manifest.layers.len(),
                    )?;
                    let stored = StoredImage {
                        top,
                        manifest,
                        manifest_descriptor: at,
                        documents,
                        configuration,
                    };
                    return Ok(Documents {
                        stored,
                        access,
                        grants,
                        config: fetched,
                    });
                }
            }
        }
        Err(DocumentError::Unsupported("its indexes are nested too deeply".to_owned()).into())
    }

    /// Makes sure that a blob is in the store. Returns the grant under which the registry sent it, if known.
    async fn fetch(
        &self,
        blob: &Descriptor,
        access: BlobAccess,
        sources: &PullSources,
    ) -> Result<Option<Grant>, PullError> {
        if access == BlobAccess::Recorded && self.store.has(blob) {
            return Ok(None);
        }
        let fetched = sources.blob(self.store, blob, self.requester, self.progress);
        Ok(fetched.await?)
    }

    /// Fetches all layers and, with [`Layers`], unpacks them. With `keep`, also fetches the blobs of layers that this node has
    /// unpacked already, because other nodes share the store. Returns the paths of the layers and their grants.
    async fn fetch_layers(
        &self,
        stored: &StoredImage,
        access: BlobAccess,
        keep: bool,
    ) -> Result<(Vec<PathBuf>, Vec<Option<Grant>>), PullError> {
        let limit = self.layers.map(Layers::limits).unwrap_or_default().bytes;
        if stored.manifest.size() > limit {
            return Err(DocumentError::Unsupported(format!(
                "it has {} bytes, and the limit is {limit}",
                stored.manifest.size()
            ))
            .into());
        }
        let budget = self
            .layers
            .map(|layers| Arc::new(UnpackBudget::new(layers.limits())));
        let pairs = stored
            .manifest
            .layers
            .iter()
            .zip(&stored.configuration.diff_ids);
        // overlayfs rejects duplicate layers; the upper one hides the lower one anyway.
        let mut seen = HashSet::new();
        let mut unique: Vec<_> = pairs
            .rev()
            .filter(|(_, diff_id)| seen.insert(**diff_id))
            .collect();
        unique.reverse();
        let all: Vec<(Option<PathBuf>, Option<Grant>)> = stream::iter(unique)
            .map(|(blob, diff_id)| {
                let budget = budget.clone();
                async move {
                    let fetched = self.fetch_layer(blob, *diff_id, access, keep).await?;
                    let path = self.unpack_layer(blob, *diff_id, access, budget).await?;
                    Ok::<_, PullError>((path, fetched))
                }
            })
            .buffered(CONCURRENT_LAYERS)
            .try_collect()
            .await?;
        let (paths, grants): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        Ok((paths.into_iter().flatten().collect(), grants))
    }

    async fn fetch_layer(
        &self,
        blob: &Descriptor,
        diff_id: Digest,
        access: BlobAccess,
        keep: bool,
    ) -> Result<Option<Grant>, PullError> {
        match self.sources {
            Some(sources) if keep || !self.is_unpacked(blob, diff_id) => {
                self.fetch(blob, access, sources).await
            }
            _ => Ok(None),
        }
    }

    async fn unpack_layer(
        &self,
        blob: &Descriptor,
        diff_id: Digest,
        access: BlobAccess,
        budget: Option<Arc<UnpackBudget>>,
    ) -> Result<Option<PathBuf>, PullError> {
        let (Some(layers), Some(budget)) = (self.layers, budget) else {
            return Ok(None);
        };
        match self.unpack(layers, blob, diff_id, &budget).await {
            // Download a blob again if it was damaged on disk, but not if the image itself is invalid.
            Err(PullError::Layer(error)) if error.is_archive_fault() => match self.sources {
                Some(sources) if self.store.discard_if_damaged(blob.digest)? => {
                    self.fetch(blob, access, sources).await?;
                    self.unpack(layers, blob, diff_id, &budget).await
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
        budget: &Arc<UnpackBudget>,
    ) -> Result<PathBuf, PullError> {
        let is_new = !layers.has(diff_id, blob.digest);
        if is_new {
            self.progress
                .event(PullEvent::Unpacking { blob: blob.digest });
        }
        let path = self.store.blob_path(blob.digest);
        let (layers, digest, budget) = (layers.clone(), blob.digest, budget.clone());
        let unpack = move || layers.unpack(&path, digest, diff_id, &budget);
        let done = tokio::task::spawn_blocking(unpack).await;
        let path = done.map_err(|error| {
            ImageStoreError::io("unpack", self.store.path(), std::io::Error::other(error))
        })??;
        if is_new {
            self.progress
                .event(PullEvent::Unpacked { blob: blob.digest });
        }
        Ok(path)
    }
}
