//! Writing images to an archive or a directory that others can load.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::digest::Digest;
use crate::manifest::{Descriptor, Index, OCI_INDEX};
use crate::reference::Reference;
use crate::store::{Store, StoreError, Stored};

/// What to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// An OCI layout in a tar archive, with the list that `docker load` wants beside it.
    Docker,
    /// An OCI layout in a tar archive.
    Oci,
    /// An OCI layout in a directory.
    OciDirectory,
}

/// An image can't be saved.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// It isn't in the store.
    #[error("there is no image {0} in the store")]
    Unknown(String),
    /// Some of it isn't.
    #[error("the image {reference} is incomplete: {blob} is missing")]
    Incomplete {
        /// Which image.
        reference: String,
        /// What is missing.
        blob: Digest,
    },
    /// It can't be written.
    #[error("can't write the archive")]
    Write(#[source] io::Error),
    /// It can't be read.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Where files go.
enum Target<W: Write> {
    Tar(Box<tar::Builder<W>>),
    Directory(PathBuf),
}

/// Writes `references` to `out`, or, as a directory, to `dir`. Blocks.
pub fn save(
    store: &Store,
    references: &[Reference],
    format: Format,
    out: impl Write,
    dir: &Path,
) -> Result<(), SaveError> {
    let _in_use = store.in_use_blocking()?;
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
    // Not before: a tar archive that is dropped writes its end, and looks whole.
    let mut target = match format {
        Format::OciDirectory => Target::Directory(dir.to_path_buf()),
        Format::Docker | Format::Oci => Target::Tar(Box::new(tar::Builder::new(out))),
    };
    target.text("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    let mut written = BTreeSet::new();
    for (_, image) in &images {
        let manifest = [&image.manifest_descriptor];
        for blob in image.manifest.blobs().chain(manifest) {
            if written.insert(blob.digest) {
                target.file(&blob_name(blob.digest), &store.blob_path(blob.digest))?;
            }
        }
    }
    target.json("index.json", &index(&images))?;
    if format == Format::Docker {
        target.json("manifest.json", &docker_list(&images))?;
    }
    target.finish()
}

fn blob_name(digest: Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// Of an index only the part for this machine is here, so only that is saved.
fn index(images: &[(&Reference, Stored)]) -> Index {
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

/// One entry for each image, with all of its names.
fn docker_list(images: &[(&Reference, Stored)]) -> Vec<DockerImage> {
    let mut list: Vec<DockerImage> = Vec::new();
    for (reference, image) in images {
        let config = blob_name(image.manifest.config.digest);
        // A name with a digest is no tag.
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
    fn file(&mut self, name: &str, from: &Path) -> Result<(), SaveError> {
        let mut file = File::open(from).map_err(|e| StoreError::io("read", from, e))?;
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

    fn text(&mut self, name: &str, text: &[u8]) -> Result<(), SaveError> {
        match self {
            Target::Directory(dir) => fs::create_dir_all(&*dir)
                .and_then(|()| fs::write(dir.join(name), text))
                .map_err(SaveError::Write),
            Target::Tar(tar) => {
                append(tar, name, text.len() as u64, &mut { text }).map_err(SaveError::Write)
            }
        }
    }

    fn json(&mut self, name: &str, value: &impl Serialize) -> Result<(), SaveError> {
        let text = serde_json::to_vec(value).map_err(|e| SaveError::Write(e.into()))?;
        self.text(name, &text)
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

/// The same image gives the same archive: nothing in it tells when or by whom it was written.
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
