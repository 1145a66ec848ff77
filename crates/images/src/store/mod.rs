//! Compressed blobs and what references stand for, on a file system that all nodes share.
//!
//! ```text
//! DIR/oci-layout                 says that this is OCI's layout
//! DIR/blobs/sha256/HEX           layers, configurations, manifests; each appears by one rename, verified
//! DIR/references/HASH.json       one reference: its name and the descriptor it stands for; its
//!                                modification time is when it was last used
//! DIR/access/HEX.json            who has obtained the blob HEX, by repository: everybody, or marks of secrets; of a
//!                                manifest: who has obtained all that it names
//! DIR/partial/HEX-SCOPE          a download of the blob HEX under way, for requesters of one repository and with the same
//!                                secrets; whoever downloads holds its lock
//! DIR/partial/.new-XXXXXX        a file being written, by who shares the lock below; else left by who died
//! DIR/use.lock                   shared by all who pull, load or unpack; held alone to collect garbage
//! ```
//!
//! Nothing in the store is ever changed in place, and everything in it is checked against its name when it is
//! used, so that several nodes, and processes that die at any moment, can do no harm.

mod access;
mod blob;
mod gc;
mod lock;
mod references;

use std::fs::{self, DirBuilder};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

pub use access::{Grant, Requester};
pub use blob::{Claim, Partial, Written};
pub use gc::{Collected, Prune};
pub use references::Summary;

use crate::digest::Digest;
use crate::manifest::{
    Configuration, Descriptor, Document, DocumentError, LARGEST_DOCUMENT, Manifest,
};

/// The store of compressed images. See the module's own text for its files.
#[derive(Debug, Clone)]
pub struct Store {
    root: PathBuf,
}

/// The store can't be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file system or the quota is full.
    #[error("there is no room left in {}", .dir.display())]
    NoRoom {
        /// Where.
        dir: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Anything else that the system refused.
    #[error("can't {doing} {}", .path.display())]
    Io {
        /// A verb.
        doing: &'static str,
        /// Its object.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A blob isn't what its name says.
    #[error("the digest of {what} is {got}, not {expected}")]
    Digest {
        /// Which blob, and from where.
        what: String,
        /// Its name.
        expected: Digest,
        /// What it is.
        got: Digest,
    },
    /// A document can't be used.
    #[error("{digest} in the image store")]
    Document {
        /// Which one.
        digest: Digest,
        /// Why not.
        source: DocumentError,
    },
    /// Somebody pulls all the time.
    #[error("images in {} are being pulled or unpacked", .0.display())]
    Busy(PathBuf),
}

impl StoreError {
    pub(crate) fn io(doing: &'static str, path: &Path, source: io::Error) -> StoreError {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => StoreError::NoRoom {
                dir: path.parent().unwrap_or(path).to_path_buf(),
                source,
            },
            _ => StoreError::Io {
                doing,
                path: path.to_path_buf(),
                source,
            },
        }
    }
}

/// An image as the store has it.
#[derive(Debug, Clone)]
pub struct Stored {
    /// What the reference stands for: an index or a manifest.
    pub top: Descriptor,
    /// The manifest for this machine.
    pub manifest: Manifest,
    /// Its descriptor.
    pub manifest_descriptor: Descriptor,
    /// The digests of all documents that lead to the configuration: indexes, and the manifest at the end.
    pub documents: Vec<Digest>,
    /// Its configuration.
    pub configuration: Configuration,
}

impl Store {
    /// Where the user's images are: `$XDG_DATA_HOME/coracle/images`, or below `~/.local/share`.
    pub fn default_path() -> Option<PathBuf> {
        let dir = |variable| std::env::var_os(variable).map(PathBuf::from);
        let absolute = |path: &PathBuf| path.is_absolute();
        let data = dir("XDG_DATA_HOME").filter(absolute);
        let home = || dir("HOME").filter(absolute);
        data.or_else(|| home().map(|home| home.join(".local/share")))
            .map(|data| data.join("coracle/images"))
    }

    /// Opens the store in `dir`, and makes it if need be.
    pub fn open(dir: &Path) -> Result<Store, StoreError> {
        let root = std::path::absolute(dir).map_err(|e| StoreError::io("find", dir, e))?;
        let store = Store { root };
        for dir in [store.blobs(), store.references(), store.partial()] {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&dir)
                .map_err(|e| StoreError::io("make the directory", &dir, e))?;
        }
        let layout = store.root.join("oci-layout");
        if !layout.exists() {
            let _in_use = store.in_use_blocking()?;
            store.write_whole(&layout, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        }
        Ok(store)
    }

    /// Its directory.
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

    /// Where the blob of this digest is, or would be.
    pub fn blob_path(&self, digest: Digest) -> PathBuf {
        self.blobs().join(digest.hex())
    }

    /// Whether a blob is there, whole.
    pub fn has(&self, blob: &Descriptor) -> bool {
        let path = self.blob_path(blob.digest);
        fs::metadata(path).is_ok_and(|found| found.len() == blob.size)
    }

    /// Reads a document, and checks that it is the one it should be. `None`: it isn't there, or damaged.
    pub fn read_document(&self, digest: Digest) -> Result<Option<Vec<u8>>, StoreError> {
        let path = self.blob_path(digest);
        let read = fs::File::open(&path).and_then(|file| {
            let mut bytes = Vec::new();
            file.take(LARGEST_DOCUMENT + 1).read_to_end(&mut bytes)?;
            Ok(bytes)
        });
        match read {
            Ok(bytes) if Digest::of(&bytes) == digest => Ok(Some(bytes)),
            Ok(_) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(StoreError::io("read", &path, error)),
        }
    }

    /// The image that `top` leads to on this machine, as far as its documents are here.
    pub fn image(&self, top: &Descriptor) -> Result<Option<Stored>, StoreError> {
        self.image_if(top, |_| Ok(true))
    }

    /// The same, if the requester may use it. No document that it may not use is read, or spoken of.
    pub fn image_for(
        &self,
        top: &Descriptor,
        requester: &Requester,
    ) -> Result<Option<Stored>, StoreError> {
        self.image_if(top, |document| self.may_use(document, requester))
    }

    fn image_if(
        &self,
        top: &Descriptor,
        may_read: impl Fn(Digest) -> Result<bool, StoreError>,
    ) -> Result<Option<Stored>, StoreError> {
        let wrong = |digest| move |source| StoreError::Document { digest, source };
        let mut at = top.clone();
        let mut documents = Vec::new();
        // An index may hold an index; nobody nests them deeper.
        for _ in 0..3 {
            if !may_read(at.digest)? {
                return Ok(None);
            }
            documents.push(at.digest);
            let Some(bytes) = self.read_document(at.digest)? else {
                return Ok(None);
            };
            match Document::parse(&bytes, &at.media_type).map_err(wrong(at.digest))? {
                Document::Index(index) => {
                    at = index.choose().map_err(wrong(at.digest))?.clone();
                }
                Document::Manifest(manifest) => {
                    let Some(config) = self.read_document(manifest.config.digest)? else {
                        return Ok(None);
                    };
                    let configuration = Configuration::parse(&config, manifest.layers.len())
                        .map_err(wrong(manifest.config.digest))?;
                    return Ok(Some(Stored {
                        top: top.clone(),
                        manifest,
                        manifest_descriptor: at,
                        documents,
                        configuration,
                    }));
                }
            }
        }
        Err(wrong(top.digest)(DocumentError::Unsupported(
            "it is an index of an index of an index".to_owned(),
        )))
    }
}
