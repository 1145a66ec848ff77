//! The image store: compressed blobs and references, on a file system that all nodes share.
//!
//! ```text
//! DIR/oci-layout                 marks an OCI layout
//! DIR/blobs/sha256/HEX           layers, configurations, manifests; verified, then published by one rename
//! DIR/references/HASH.json       one reference: its name and descriptor; the modification time is the time of last use
//! DIR/access/HEX.json            access record of the blob HEX: for each repository `everybody`, or fingerprints of the secrets
//!                                with which the blob was obtained; for a manifest it covers all blobs of the image
//! DIR/partial/HEX-SCOPE          partial download of the blob HEX, for requesters of one repository with the same secrets; locked
//!                                by the downloading process
//! DIR/partial/.new-XXXXXX        a file while it is written, under the shared lock below; otherwise a leftover
//! DIR/use.lock                   lock: shared for pulls, loads and unpacks, exclusive for garbage collection
//! ```
//!
//! No file in the store changes in place, and every file is checked against its name when it is used. So concurrent
//! nodes and killed processes cannot corrupt it.

mod access;
mod blob;
mod gc;
pub(crate) mod lock;
mod references;

use std::fs::{self, DirBuilder};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

pub use access::{Grant, Requester};
pub use blob::{BlobClaim, PartialBlob, SpooledFile};
pub use gc::{PruneOptions, PruneReport};
pub use references::ImageSummary;

use crate::manifest::{
    Descriptor, Document, DocumentError, ImageConfiguration, MAX_DOCUMENT_SIZE, Manifest,
};
use download::Digest;

/// The store of compressed images. The module documentation lists its files.
#[derive(Debug, Clone)]
pub struct ImageStore {
    root: PathBuf,
}

/// The store cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum ImageStoreError {
    /// The file system or the quota is full.
    #[error("no space left in {}", .dir.display())]
    OutOfSpace {
        /// The directory.
        dir: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// Another system call failed.
    #[error("cannot {action} {}", .path.display())]
    Io {
        /// The operation, as a verb.
        action: &'static str,
        /// Its object.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// A document is invalid.
    #[error("invalid document {digest} in the image store")]
    Document {
        /// The document.
        digest: Digest,
        /// The reason.
        source: DocumentError,
    },
    /// Another process kept the store locked.
    #[error("images in {} are being pulled or unpacked", .0.display())]
    Busy(PathBuf),
}

impl ImageStoreError {
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> ImageStoreError {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                ImageStoreError::OutOfSpace {
                    dir: path.parent().unwrap_or(path).to_path_buf(),
                    source,
                }
            }
            _ => ImageStoreError::Io {
                action,
                path: path.to_path_buf(),
                source,
            },
        }
    }
}

/// An image in the store.
#[derive(Debug, Clone)]
pub struct StoredImage {
    /// The target of the reference: an index or a manifest.
    pub top: Descriptor,
    /// The manifest for this machine.
    pub manifest: Manifest,
    /// The descriptor of that manifest.
    pub manifest_descriptor: Descriptor,
    /// The digests of all indexes from `top` to the manifest, and of the manifest.
    pub documents: Vec<Digest>,
    /// The configuration.
    pub configuration: ImageConfiguration,
}

impl ImageStore {
    /// The default location of the user's images: `$XDG_DATA_HOME/coracle/images`, or below `~/.local/share`.
    pub fn default_path() -> Option<PathBuf> {
        let dir = |variable| std::env::var_os(variable).map(PathBuf::from);
        let absolute = |path: &PathBuf| path.is_absolute();
        let data = dir("XDG_DATA_HOME").filter(absolute);
        let home = || dir("HOME").filter(absolute);
        data.or_else(|| home().map(|home| home.join(".local/share")))
            .map(|data| data.join("coracle/images"))
    }

    /// Opens the store in `dir`, and creates it if it is missing.
    pub fn open(dir: &Path) -> Result<ImageStore, ImageStoreError> {
        let root = std::path::absolute(dir).map_err(|e| ImageStoreError::io("find", dir, e))?;
        let store = ImageStore { root };
        for dir in [store.blobs(), store.references(), store.partial()] {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&dir)
                .map_err(|e| ImageStoreError::io("create directory", &dir, e))?;
        }
        let layout = store.root.join("oci-layout");
        if !layout.exists() {
            let _lock = store.lock_shared_blocking()?;
            store.write_durably(&layout, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        }
        Ok(store)
    }

    /// The directory of the store.
    pub fn path(&self) -> &Path {
        &self.root
    }

    fn blobs(&self) -> PathBuf {
        self.root.join("blobs/sha256")
    }

    fn references(&self) -> PathBuf {
        self.root.join("references")
    }

    fn access(&self) -> PathBuf {
        self.root.join("access")
    }

    fn partial(&self) -> PathBuf {
        self.root.join("partial")
    }

    /// The path of a blob, which need not exist.
    pub fn blob_path(&self, digest: Digest) -> PathBuf {
        self.blobs().join(digest.hex())
    }

    /// Whether the store has a blob of this digest and size.
    pub fn has(&self, blob: &Descriptor) -> bool {
        let path = self.blob_path(blob.digest);
        fs::metadata(path).is_ok_and(|found| found.len() == blob.size)
    }

    /// Reads a document and checks its digest. `None` if it is missing or damaged.
    pub fn read_document(&self, digest: Digest) -> Result<Option<Vec<u8>>, ImageStoreError> {
        let path = self.blob_path(digest);
        let read = fs::File::open(&path).and_then(|file| {
            let mut bytes = Vec::new();
            file.take(MAX_DOCUMENT_SIZE + 1).read_to_end(&mut bytes)?;
            Ok(bytes)
        });
        match read {
            Ok(bytes) if Digest::of(&bytes) == digest => Ok(Some(bytes)),
            Ok(_) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(ImageStoreError::io("read", &path, error)),
        }
    }

    /// This machine's image below `top`; `None` if a document is missing.
    pub fn image(&self, top: &Descriptor) -> Result<Option<StoredImage>, ImageStoreError> {
        self.image_if(top, |_| Ok(true))
    }

    /// Like [`image`](Self::image), if the requester may use it. Errors disclose no document that it may not use.
    pub fn image_for(
        &self,
        top: &Descriptor,
        requester: &Requester,
    ) -> Result<Option<StoredImage>, ImageStoreError> {
        self.image_if(top, |document| self.may_use(document, requester))
    }

    fn image_if(
        &self,
        top: &Descriptor,
        may_read: impl Fn(Digest) -> Result<bool, ImageStoreError>,
    ) -> Result<Option<StoredImage>, ImageStoreError> {
        let invalid = |digest| move |source| ImageStoreError::Document { digest, source };
        let mut at = top.clone();
        let mut documents = Vec::new();
        // An index may contain an index; deeper nesting is not supported.
        for _ in 0..3 {
            if !may_read(at.digest)? {
                return Ok(None);
            }
            documents.push(at.digest);
            let Some(bytes) = self.read_document(at.digest)? else {
                return Ok(None);
            };
            match Document::parse(&bytes, &at.media_type).map_err(invalid(at.digest))? {
                Document::Index(index) => {
                    at = index.choose().map_err(invalid(at.digest))?.clone();
                }
                Document::Manifest(manifest) => {
                    let Some(config) = self.read_document(manifest.config.digest)? else {
                        return Ok(None);
                    };
                    let configuration = ImageConfiguration::parse(&config, manifest.layers.len())
                        .map_err(invalid(manifest.config.digest))?;
                    return Ok(Some(StoredImage {
                        top: top.clone(),
                        manifest,
                        manifest_descriptor: at,
                        documents,
                        configuration,
                    }));
                }
            }
        }
        Err(invalid(top.digest)(DocumentError::Unsupported(
            "its indexes are nested too deeply".to_owned(),
        )))
    }
}
