//! Writes images to an archive or a directory that other tools can load.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::manifest::{Descriptor, Index, OCI_INDEX};
use crate::reference::Reference;
use crate::store::{ImageStore, ImageStoreError, StoredImage};
use download::Digest;

/// The format to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArchiveFormat {
    /// An OCI layout in a tar archive, plus the `manifest.json` that `docker load` needs.
    Docker,
    /// An OCI layout in a tar archive.
    Oci,
    /// An OCI layout in a directory.
    OciDirectory,
}

/// An image cannot be saved.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// The image is not in the store.
    #[error("there is no image {0} in the store")]
    Unknown(String),
    /// The store lacks a blob of the image.
    #[error("the image {reference} is incomplete: {blob} is missing")]
    Incomplete {
        /// The image.
        reference: String,
        /// The missing blob.
        blob: Digest,
    },
    /// Writing the archive failed.
    #[error("cannot write the archive")]
    Write(#[source] io::Error),
    /// Reading the store failed.
    #[error(transparent)]
    Store(#[from] ImageStoreError),
}

/// The output.
enum Target<W: Write> {
    Tar(Box<tar::Builder<W>>),
    Directory(PathBuf),
}

/// Writes `references` to `out`, or to `dir` with [`ArchiveFormat::OciDirectory`]. Blocks.
pub fn save(
    store: &ImageStore,
    references: &[Reference],
    format: ArchiveFormat,
    out: impl Write,
    dir: &Path,
) -> Result<(), SaveError> {
    let _lock = store.lock_shared_blocking()?;
    let mut images = Vec::new();
    for reference in references {
        let unknown = || SaveError::Unknown(reference.to_string());
        let top = store.lookup(reference)?.ok_or_else(unknown)?;
        let image = store.image(&top)?.ok_or_else(unknown)?;
        if let Some(missing) = image.manifest.blobs().find(|blob| !store.has(blob)) {
            return Err(SaveError::Incomplete {
                reference: reference.to_string(),
                blob: missing.digest,
            });
        }
        images.push((reference, image));
    }
    // Create the tar builder after all checks: when dropped, it writes the end marker, and an incomplete archive would look
    // complete.
    let mut target = match format {
        ArchiveFormat::OciDirectory => Target::Directory(dir.to_path_buf()),
        ArchiveFormat::Docker | ArchiveFormat::Oci => Target::Tar(Box::new(tar::Builder::new(out))),
    };
    target.write_bytes("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    let mut written = BTreeSet::new();
    for (_, image) in &images {
        let manifest = [&image.manifest_descriptor];
        for blob in image.manifest.blobs().chain(manifest) {
            if written.insert(blob.digest) {
                target.write_file(&blob_name(blob.digest), &store.blob_path(blob.digest))?;
            }
        }
    }
    target.write_json("index.json", &index(&images))?;
    if format == ArchiveFormat::Docker {
        target.write_json("manifest.json", &docker_manifest(&images))?;
    }
    target.finish()
}

fn blob_name(digest: Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// The store has only this machine's manifest of a multi-platform image, so only that one is saved.
fn index(images: &[(&Reference, StoredImage)]) -> Index {
    let manifests = images.iter().map(|(reference, image)| Descriptor {
        annotations: BTreeMap::from([
            ("io.containerd.image.name".to_owned(), reference.to_string()),
            (
                "org.opencontainers.image.ref.name".to_owned(),
                reference.to_string(),
            ),
        ]),
        size: image.manifest_descriptor.size,
        ..image.manifest_descriptor.clone()
    });
    Index {
        schema_version: 2,
        media_type: Some(OCI_INDEX.to_owned()),
        manifests: manifests.collect(),
    }
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct DockerImage {
    config: String,
    repo_tags: Vec<String>,
    layers: Vec<String>,
}

/// One entry per image, with all of its tags.
fn docker_manifest(images: &[(&Reference, StoredImage)]) -> Vec<DockerImage> {
    let mut list: Vec<DockerImage> = Vec::new();
    for (reference, image) in images {
        let config = blob_name(image.manifest.config.digest);
        // A name with a digest is not a tag.
        let tag = reference.digest().is_none().then(|| reference.to_string());
        if let Some(known) = list.iter_mut().find(|known| known.config == config) {
            known.repo_tags.extend(tag);
            continue;
        }
        let layers = image.manifest.layers.iter();
        list.push(DockerImage {
            config,
            repo_tags: tag.into_iter().collect(),
            layers: layers.map(|layer| blob_name(layer.digest)).collect(),
        });
    }
    list
}

impl<W: Write> Target<W> {
    fn write_file(&mut self, name: &str, from: &Path) -> Result<(), SaveError> {
        let mut file = File::open(from).map_err(|e| ImageStoreError::io("read", from, e))?;
        match self {
            Target::Directory(dir) => {
                let to = dir.join(name);
                fs::create_dir_all(to.parent().unwrap_or(dir))
                    .and_then(|()| File::create(&to))
                    .and_then(|mut to| io::copy(&mut file, &mut to))
                    .map_err(SaveError::Write)?;
                Ok(())
            }
            Target::Tar(tar) => {
                let size = file.metadata().map_err(SaveError::Write)?.len();
                append(tar, name, size, &mut file).map_err(SaveError::Write)
            }
        }
    }

    fn write_bytes(&mut self, name: &str, bytes: &[u8]) -> Result<(), SaveError> {
        match self {
            Target::Directory(dir) => fs::create_dir_all(&*dir)
                .and_then(|()| fs::write(dir.join(name), bytes))
                .map_err(SaveError::Write),
            Target::Tar(tar) => {
                append(tar, name, bytes.len() as u64, &mut { bytes }).map_err(SaveError::Write)
            }
        }
    }

    fn write_json(&mut self, name: &str, value: &impl Serialize) -> Result<(), SaveError> {
        let text = serde_json::to_vec(value).map_err(|e| SaveError::Write(e.into()))?;
        self.write_bytes(name, &text)
    }

    fn finish(self) -> Result<(), SaveError> {
        match self {
            Target::Directory(_) => Ok(()),
            Target::Tar(tar) => tar
                .into_inner()
                .and_then(|mut out| out.flush())
                .map_err(SaveError::Write),
        }
    }
}

/// Appends a file without time and owner, so that the same image always gives the same archive.
fn append(
    tar: &mut tar::Builder<impl Write>,
    name: &str,
    size: u64,
    content: &mut impl Read,
) -> io::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_size(size);
    header.set_mode(0o644);
    header.set_mtime(0);
    tar.append_data(&mut header, name, content)
}
