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
use crate::store::{Grant, Requester, Store, StoreError, Stored};

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
        requester: &Requester::new(&reference, &request.credentials),
        progress,
    };
    // An image that the requester may not use counts as absent: not even that it is here should be learned from this.
    let known = job.present(&reference).map_err(inspecting)?;
    if request.policy != PullPolicy::Always
        && let Some(stored) = &known
    {
        let used = job.layers(stored, Access::Recorded, false).await;
        let (paths, _) = used.map_err(pulling)?;
        store.touch(&reference);
        return Ok(image(&reference, stored, paths, false));
    }
    let Some(sources) = job.sources else {
        return Err(ImageError::NeverPull(request.reference.clone()));
    };
    let (stored, paths) = match known {
        Some(known) if sources.is_still(known.top.digest).await => {
            let used = job.layers(&known, Access::Recorded, true).await;
            let (paths, _) = used.map_err(pulling)?;
            (known, paths)
        }
        _ => job.pull(sources).await.map_err(pulling)?,
    };
    let named = store.name(&reference, &stored.top);
    named.map_err(|error| pulling(error.into()))?;
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

/// Whether blobs that are here may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    /// All of them: the record of the image's manifest says so.
    Recorded,
    /// Those that the requester has access to by records of their own. The others have to come from the image's registry.
    ByBlob,
}

/// An image's documents, as they came from its registry.
struct Documents {
    stored: Stored,
    access: Access,
    /// To whom each document was sent.
    grants: Vec<(Digest, Grant)>,
    /// What the configuration took, if that is known.
    config: Option<Grant>,
}

/// One image on its way.
struct Job<'a> {
    store: &'a Store,
    layers: Option<&'a Layers>,
    /// None: no registry may be asked.
    sources: Option<&'a Sources>,
    requester: &'a Requester,
    progress: &'a dyn Progress,
}

impl Job<'_> {
    /// The image, if the requester may use it and all of it is here: each layer unpacked, or at least its blob.
    fn present(&self, reference: &Reference) -> Result<Option<Stored>, StoreError> {
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
        let here =
            all.all(|(blob, diff_id)| self.is_unpacked(blob, *diff_id) || self.store.has(blob));
        Ok(here.then_some(stored))
    }

    fn is_unpacked(&self, blob: &Descriptor, diff_id: Digest) -> bool {
        self.layers
            .is_some_and(|layers| layers.has(diff_id, blob.digest))
    }

    /// Gets from the registry what the requester has no access to yet, and records that it has now.
    async fn pull(&self, sources: &Sources) -> Result<(Stored, Vec<PathBuf>), PullError> {
        let documents = self.documents(sources).await?;
        let stored = documents.stored;
        let (paths, blobs) = self.layers(&stored, documents.access, true).await?;
        let manifest = stored.manifest_descriptor.digest;
        for (digest, grant) in documents.grants {
            let grant = match (digest == manifest, documents.access) {
                (false, _) => Some(grant),
                // Its record stays as it is: which blobs the registry would have sent was not tried.
                (true, Access::Recorded) => None,
                // What the user brings into the store by hand is for all of the user's pods.
                (true, Access::ByBlob) if self.layers.is_none() => Some(Grant::Everybody),
                (true, Access::ByBlob) => {
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

    /// Fetches the manifest for this machine and the configuration, and keeps them.
    async fn documents(&self, sources: &Sources) -> Result<Documents, PullError> {
        let (top, mut bytes, grant) = sources.manifest(None, self.progress).await?;
        let (mut grants, mut documents) = (vec![(top.digest, grant)], vec![top.digest]);
        let mut at = top.clone();
        for _ in 0..3 {
            self.store.put(&bytes)?;
            match Document::parse(&bytes, &at.media_type)? {
                Document::Index(index) => {
                    at = index.choose()?.clone();
                    documents.push(at.digest);
                    let known = match self.store.may_use(at.digest, self.requester)? {
                        true => self.store.read_document(at.digest)?,
                        false => None,
                    };
                    bytes = match known {
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
                        true => Access::Recorded,
                        false => Access::ByBlob,
                    };
                    let fetched = self.fetch(&manifest.config, access, sources).await?;
                    let config = self.store.read_document(manifest.config.digest)?;
                    let configuration =
                        Configuration::parse(&config.unwrap_or_default(), manifest.layers.len())?;
                    let stored = Stored {
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
        Err(DocumentError::Unsupported("it is an index of an index of an index".to_owned()).into())
    }

    /// Has a blob in the store. Says what that took the requester, if that is known.
    async fn fetch(
        &self,
        blob: &Descriptor,
        access: Access,
        sources: &Sources,
    ) -> Result<Option<Grant>, PullError> {
        if access == Access::Recorded && self.store.has(blob) {
            return Ok(None);
        }
        let fetched = sources.blob(self.store, blob, self.requester, self.progress);
        Ok(fetched.await?)
    }

    /// Has all layers unpacked, if that is wanted; `keep` them in the store too, for other nodes, or
    /// have there only what must be unpacked. Says what each took the requester.
    async fn layers(
        &self,
        stored: &Stored,
        access: Access,
        keep: bool,
    ) -> Result<(Vec<PathBuf>, Vec<Option<Grant>>), PullError> {
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
        let all: Vec<(Option<PathBuf>, Option<Grant>)> = stream::iter(wanted)
            .map(|(blob, diff_id)| {
                let allowance = allowance.clone();
                async move {
                    let fetched = self.fetch_layer(blob, *diff_id, access, keep).await?;
                    let path = self.layer(blob, *diff_id, access, allowance).await?;
                    Ok::<_, PullError>((path, fetched))
                }
            })
            .buffered(AT_ONCE)
            .try_collect()
            .await?;
        let (paths, grants): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        Ok((paths.into_iter().flatten().collect(), grants))
    }

    async fn fetch_layer(
        &self,
        blob: &Descriptor,
        diff_id: Digest,
        access: Access,
        keep: bool,
    ) -> Result<Option<Grant>, PullError> {
        match self.sources {
            Some(sources) if keep || !self.is_unpacked(blob, diff_id) => {
                self.fetch(blob, access, sources).await
            }
            _ => Ok(None),
        }
    }

    async fn layer(
        &self,
        blob: &Descriptor,
        diff_id: Digest,
        access: Access,
        allowance: Option<Arc<Allowance>>,
    ) -> Result<Option<PathBuf>, PullError> {
        let (Some(layers), Some(allowance)) = (self.layers, allowance) else {
            return Ok(None);
        };
        match self.unpack(layers, blob, diff_id, &allowance).await {
            // A blob that went bad on disk is fetched once more; one that was always bad is not.
            Err(PullError::Layer(error)) if error.blames_archive() => match self.sources {
                Some(sources) if self.store.discard_if_damaged(blob.digest)? => {
                    self.fetch(blob, access, sources).await?;
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
        let fresh = !layers.has(diff_id, blob.digest);
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
