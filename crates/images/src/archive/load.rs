//! Loads images from an archive or a directory into the store.
//!
//! An archive may come through a pipe, and its index may be its last entry. So every file is first spooled to a
//! temporary file in the store and looked up afterwards. No name from the archive ever becomes a path.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

use serde::Deserialize;

use crate::compression::{Compression, decompress, peek};
use crate::layers::ImageLimits;
use crate::layers::tar::{EntryKind, TarReader};
use crate::manifest::{
    Descriptor, Document, DocumentError, ImageConfiguration, MAX_DOCUMENT_SIZE, Manifest,
    OCI_CONFIG, OCI_LAYER, OCI_MANIFEST,
};
use crate::reference::{Reference, ReferenceError};
use crate::store::{ImageStore, ImageStoreError, SpooledFile};
use download::{Digest, HashingReader};

/// Limit on files and links, far above the number in any archive of images.
const MAX_ARCHIVE_FILES: usize = 20_000;

/// zstd level for layers that arrive uncompressed.
const COMPRESSION_LEVEL: i32 = 3;

/// Annotation in which containerd and Docker store an image's full name.
const FULL_NAME: &str = "io.containerd.image.name";
/// Annotation in which an OCI layout stores a tag or a name.
const REF_NAME: &str = "org.opencontainers.image.ref.name";

/// An archive cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Reading the archive failed.
    #[error("cannot read the archive")]
    Read(#[source] io::Error),
    /// The archive has no bytes.
    #[error("the archive is empty")]
    Empty,
    /// The first entry is not a tar header.
    #[error("not a tar archive, neither compressed nor plain")]
    NotTar(#[source] io::Error),
    /// The archive holds no image.
    #[error("the archive is neither from `docker save` nor an OCI image layout: it has no {0}")]
    NoImage(&'static str),
    /// The archive lacks a file that the image refers to.
    #[error("the archive is incomplete: {0} is missing")]
    Missing(String),
    /// A file's digest differs from the one in its name.
    #[error("the archive is damaged: {name} has digest {got}")]
    DigestMismatch {
        /// The file.
        name: String,
        /// Its actual digest.
        got: Digest,
    },
    /// A file is not the expected JSON.
    #[error("cannot parse {name} in the archive")]
    Json {
        /// The file.
        name: String,
        /// The parser's error.
        source: serde_json::Error,
    },
    /// A manifest or configuration is invalid.
    #[error("invalid {name} in the archive")]
    Document {
        /// The file.
        name: String,
        /// The reason.
        source: DocumentError,
    },
    /// An image in the archive has an invalid name.
    #[error(transparent)]
    Name(#[from] ReferenceError),
    /// Writing to the store failed.
    #[error(transparent)]
    Store(#[from] ImageStoreError),
    /// The archive has more than [`MAX_ARCHIVE_FILES`] files.
    #[error("the archive has more than {MAX_ARCHIVE_FILES} files: it is not an image")]
    TooManyFiles,
    /// The caller named one image, but the archive has several.
    #[error("the archive has {0} images, but one name was given")]
    AmbiguousName(usize),
}

/// An image that was loaded from an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedImage {
    /// The full name; `None` if neither the archive nor the caller names the image.
    pub reference: Option<Reference>,
    /// The digest of its manifest or index.
    pub digest: Digest,
}

/// A file of the archive, spooled but not yet a blob of the store.
enum StagedFile {
    /// The unchanged bytes.
    Plain(SpooledFile),
    /// A layer that the loader compressed.
    Compressed { file: SpooledFile, diff_id: Digest },
    /// A link to another name in the archive.
    Link(String),
}

/// Loads all images of an archive, which may be compressed. The uncompressed archive must not exceed `limits.bytes`.
/// `name` replaces the name of its only image. Blocks.
pub fn load(
    store: &ImageStore,
    archive: impl Read,
    name: Option<&Reference>,
    limits: ImageLimits,
) -> Result<Vec<LoadedImage>, LoadError> {
    let _lock = store.lock_shared_blocking()?;
    let (start, archive) = peek(archive).map_err(LoadError::Read)?;
    if start.is_empty() {
        return Err(LoadError::Empty);
    }
    let (_, stream) = decompress(archive).map_err(LoadError::Read)?;
    let mut archive = TarReader::new(LimitedReader {
        inner: stream,
        limit: limits.bytes,
        read: 0,
    });
    let mut files = ArchiveFiles::new(store);
    let mut next = archive.next().map_err(first_entry_error)?;
    while let Some(entry) = next {
        let path = normalize(&String::from_utf8_lossy(&entry.path));
        match entry.kind {
            EntryKind::File => files.add(path, &mut archive)?,
            EntryKind::Symlink | EntryKind::HardLink => {
                let target = String::from_utf8_lossy(&entry.link).into_owned();
                files.link(path, &target, entry.kind)?;
            }
            _ => {}
        }
        next = archive.next().map_err(LoadError::Read)?;
    }
    files.load_images(name)
}

/// Distinguishes an input that is not a tar archive from a read error.
fn first_entry_error(error: io::Error) -> LoadError {
    use io::ErrorKind::{InvalidData, InvalidInput, UnexpectedEof};
    match error.kind() {
        InvalidData | InvalidInput | UnexpectedEof => LoadError::NotTar(error),
        _ => LoadError::Read(error),
    }
}

/// Loads all images of an OCI layout, or of an unpacked `docker save`, in a directory. Blocks.
pub fn load_directory(
    store: &ImageStore,
    dir: &Path,
    name: Option<&Reference>,
) -> Result<Vec<LoadedImage>, LoadError> {
    let _lock = store.lock_shared_blocking()?;
    let mut files = ArchiveFiles::new(store);
    add_directory(&mut files, dir, "", 3)?;
    files.load_images(name)
}

fn add_directory(
    files: &mut ArchiveFiles<'_>,
    dir: &Path,
    prefix: &str,
    depth: u32,
) -> Result<(), LoadError> {
    for entry in fs::read_dir(dir).map_err(LoadError::Read)? {
        let entry = entry.map_err(LoadError::Read)?;
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        let path = entry.path();
        // Unlike an archive, the directory is on the user's own file system, so symlinks out of it are allowed.
        let found = fs::metadata(&path).map_err(LoadError::Read)?;
        if found.is_dir() && depth > 0 {
            add_directory(files, &path, &format!("{name}/"), depth - 1)?;
        } else if found.is_file() {
            files.add(name, File::open(&path).map_err(LoadError::Read)?)?;
        }
    }
    Ok(())
}

/// Normalises `./a//b` to `a/b`, and `a/../b` to `b`.
fn normalize(path: &str) -> String {
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// The files of an archive, by name.
struct ArchiveFiles<'a> {
    store: &'a ImageStore,
    staged: HashMap<String, StagedFile>,
    /// Files that are blobs of the store already, with their diff id if known.
    stored: HashMap<String, (Descriptor, Option<Digest>)>,
}

/// An entry of `manifest.json`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerImage {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    #[serde(default)]
    layers: Option<Vec<String>>,
}

impl<'a> ArchiveFiles<'a> {
    fn new(store: &'a ImageStore) -> Self {
        ArchiveFiles {
            store,
            staged: HashMap::new(),
            stored: HashMap::new(),
        }
    }

    fn add(&mut self, name: String, content: impl Read) -> Result<(), LoadError> {
        if self.staged.len() >= MAX_ARCHIVE_FILES {
            return Err(LoadError::TooManyFiles);
        }
        let (start, mut content) = peek(content).map_err(LoadError::Read)?;
        // In an OCI layout a file's name is its digest, so its bytes must not change.
        let may_compress = !name.starts_with("blobs/") && name.ends_with(".tar");
        let staged = match may_compress && Compression::of(&start) == Compression::None {
            true => self.compress(content)?,
            false => {
                let mut spool = self.store.spool()?;
                copy(&mut content, &mut spool, self.store)?;
                StagedFile::Plain(spool.close())
            }
        };
        self.staged.insert(name, staged);
        Ok(())
    }

    fn compress(&self, content: impl Read) -> Result<StagedFile, LoadError> {
        let mut content = HashingReader::new(content);
        let spool = self.store.spool()?;
        let write_error = |e| ImageStoreError::io("write to", self.store.path(), e);
        let mut encoder =
            zstd::stream::write::Encoder::new(spool, COMPRESSION_LEVEL).map_err(write_error)?;
        copy(&mut content, &mut encoder, self.store)?;
        let file = encoder.finish().map_err(write_error)?.close();
        let (_, diff_id) = content.finish();
        Ok(StagedFile::Compressed { file, diff_id })
    }

    fn link(&mut self, name: String, target: &str, kind: EntryKind) -> Result<(), LoadError> {
        if self.staged.len() >= MAX_ARCHIVE_FILES {
            return Err(LoadError::TooManyFiles);
        }
        let target = match (kind, name.rsplit_once('/')) {
            (EntryKind::Symlink, Some((dir, _))) => normalize(&format!("{dir}/{target}")),
            _ => normalize(target),
        };
        self.staged.insert(name, StagedFile::Link(target));
        Ok(())
    }

    /// Follows links within the archive.
    fn resolve(&self, name: &str) -> String {
        let mut name = normalize(name);
        for _ in 0..8 {
            match self.staged.get(&name) {
                Some(StagedFile::Link(target)) => name = target.clone(),
                _ => break,
            }
        }
        name
    }

    /// The content of a small file, such as an index.
    fn read_small_file(&self, name: &str) -> Result<Option<Vec<u8>>, LoadError> {
        let Some(StagedFile::Plain(file)) = self.staged.get(&self.resolve(name)) else {
            return Ok(None);
        };
        let mut bytes = Vec::new();
        file.open()?
            .take(MAX_DOCUMENT_SIZE)
            .read_to_end(&mut bytes)
            .map_err(LoadError::Read)?;
        Ok(Some(bytes))
    }

    /// Makes a file a blob of the store. The second value is its diff id, if known.
    fn store_file(&mut self, name: &str) -> Result<(Descriptor, Option<Digest>), LoadError> {
        let name = self.resolve(name);
        if let Some(stored) = self.stored.get(&name) {
            return Ok(stored.clone());
        }
        let (file, diff_id) = match self.staged.remove(&name) {
            Some(StagedFile::Plain(file)) => (file, None),
            Some(StagedFile::Compressed { file, diff_id }) => (file, Some(diff_id)),
            Some(StagedFile::Link(_)) | None => return Err(LoadError::Missing(name)),
        };
        let (digest, size) = self.store.add_spooled(file)?;
        let descriptor = Descriptor {
            media_type: String::new(),
            digest,
            size,
            platform: None,
            annotations: BTreeMap::new(),
        };
        self.stored.insert(name, (descriptor.clone(), diff_id));
        Ok((descriptor, diff_id))
    }

    /// Adds a blob of an OCI layout to the store, and checks its digest.
    fn store_blob(&mut self, blob: &Descriptor) -> Result<(), LoadError> {
        let name = format!("blobs/sha256/{}", blob.digest.hex());
        let in_archive = self.staged.contains_key(&name) || self.stored.contains_key(&name);
        // All pods may use loaded images. So a blob that the archive lacks may come from the store only if all pods may use it
        // already.
        if !in_archive && self.store.has(blob) && self.store.is_public(blob.digest)? {
            return Ok(());
        }
        let (found, _) = self.store_file(&name)?;
        match found.digest == blob.digest {
            true => Ok(()),
            false => Err(LoadError::DigestMismatch {
                name,
                got: found.digest,
            }),
        }
    }

    fn load_images(mut self, name: Option<&Reference>) -> Result<Vec<LoadedImage>, LoadError> {
        let docker = match self.read_small_file("manifest.json")? {
            Some(text) => serde_json::from_slice(&text).map_err(|source| LoadError::Json {
                name: "manifest.json".to_owned(),
                source,
            })?,
            None => Vec::new(),
        };
        let mut loaded = merge_by_image(match self.read_small_file("index.json")? {
            Some(index) => self.load_layout(&index, &docker)?,
            None if docker.is_empty() => return Err(LoadError::NoImage("manifest.json")),
            None => self.load_docker(docker)?,
        });
        match (name, loaded.as_mut_slice()) {
            (_, []) => return Err(LoadError::NoImage("image")),
            (Some(name), [only]) => only.1 = vec![name.clone()],
            (Some(_), several) => return Err(LoadError::AmbiguousName(several.len())),
            (None, _) => {}
        }
        let mut all = Vec::new();
        for (descriptor, names) in loaded {
            if let Some(image) = self.store.image(&descriptor)? {
                let blobs = image.manifest.blobs().map(|blob| blob.digest);
                for digest in blobs.chain(image.documents.iter().copied()) {
                    self.store.grant_loaded(digest)?;
                }
            }
            for name in &names {
                self.store.set_reference(name, &descriptor)?;
            }
            let digest = descriptor.digest;
            match names.is_empty() {
                true => all.push(LoadedImage {
                    reference: None,
                    digest,
                }),
                false => all.extend(names.into_iter().map(|name| LoadedImage {
                    reference: Some(name),
                    digest,
                })),
            }
        }
        Ok(all)
    }

    /// Loads an OCI layout, which `docker save` writes too since Docker 25: all files are blobs named by digest.
    fn load_layout(
        &mut self,
        index: &[u8],
        docker: &[DockerImage],
    ) -> Result<Vec<(Descriptor, Vec<Reference>)>, LoadError> {
        let invalid = |name: &str| {
            let name = name.to_owned();
            move |source| LoadError::Document { name, source }
        };
        let index = match Document::parse(index, "").map_err(invalid("index.json"))? {
            Document::Index(index) => index,
            Document::Manifest(_) => return Err(LoadError::NoImage("index.json")),
        };
        let mut all = Vec::new();
        for top in index.manifests {
            let mut at = top.clone();
            for depth in 0.. {
                self.store_blob(&at)?;
                let name = at.digest.to_string();
                let bytes = self.store.read_document(at.digest)?.unwrap_or_default();
                match Document::parse(&bytes, &at.media_type).map_err(invalid(&name))? {
                    Document::Index(index) if depth < 3 => {
                        at = index.choose().map_err(invalid(&name))?.clone();
                    }
                    Document::Index(_) => return Err(LoadError::NoImage("manifest of an image")),
                    Document::Manifest(manifest) => {
                        for blob in manifest.blobs() {
                            self.store_blob(blob)?;
                        }
                        let names = image_names(&top, &manifest, docker)?;
                        let plain = Descriptor {
                            annotations: BTreeMap::new(),
                            ..top
                        };
                        all.push((plain, names));
                        break;
                    }
                }
            }
        }
        Ok(all)
    }

    /// Loads the format of `docker save` before Docker 25: a list of configurations and layers. Generates a manifest for each
    /// image.
    fn load_docker(
        &mut self,
        images: Vec<DockerImage>,
    ) -> Result<Vec<(Descriptor, Vec<Reference>)>, LoadError> {
        let mut all = Vec::new();
        for image in images {
            let layer_names = image.layers.unwrap_or_default();
            let (mut config, _) = self.store_file(&image.config)?;
            config.media_type = OCI_CONFIG.to_owned();
            let text = self.store.read_document(config.digest)?.unwrap_or_default();
            let configuration =
                ImageConfiguration::parse(&text, layer_names.len()).map_err(|source| {
                    LoadError::Document {
                        name: image.config.clone(),
                        source,
                    }
                })?;
            let mut layers = Vec::new();
            for (name, expected) in layer_names.iter().zip(configuration.diff_ids) {
                let (mut layer, diff_id) = self.store_file(name)?;
                if let Some(got) = diff_id.filter(|got| *got != expected) {
                    return Err(LoadError::DigestMismatch {
                        name: name.clone(),
                        got,
                    });
                }
                let compression = self.compression(layer.digest)?;
                layer.media_type = format!("{OCI_LAYER}{}", compression.suffix());
                layers.push(layer);
            }
            let manifest = Manifest {
                schema_version: 2,
                media_type: Some(OCI_MANIFEST.to_owned()),
                config,
                layers,
            };
            let text = serde_json::to_vec(&manifest).map_err(|source| LoadError::Json {
                name: "manifest.json".to_owned(),
                source,
            })?;
            let descriptor = Descriptor {
                media_type: OCI_MANIFEST.to_owned(),
                digest: self.store.put(&text)?,
                size: text.len() as u64,
                platform: None,
                annotations: BTreeMap::new(),
            };
            let tags = image.repo_tags.unwrap_or_default();
            let names: Result<_, _> = tags.iter().map(|tag| tag.parse()).collect();
            all.push((descriptor, names?));
        }
        Ok(all)
    }

    fn compression(&self, blob: Digest) -> Result<Compression, LoadError> {
        let path = self.store.blob_path(blob);
        let mut start = [0; 4];
        let mut file = File::open(&path).map_err(|e| ImageStoreError::io("read", &path, e))?;
        let n = file.read(&mut start).map_err(LoadError::Read)?;
        Ok(Compression::of(&start[..n]))
    }
}

/// Merges entries of the same image: a layout has one entry per name.
fn merge_by_image(listed: Vec<(Descriptor, Vec<Reference>)>) -> Vec<(Descriptor, Vec<Reference>)> {
    let mut all: Vec<(Descriptor, Vec<Reference>)> = Vec::new();
    for (descriptor, names) in listed {
        match all.iter_mut().find(|(d, _)| d.digest == descriptor.digest) {
            Some((_, known)) => {
                let new: Vec<_> = names.into_iter().filter(|n| !known.contains(n)).collect();
                known.extend(new);
            }
            None => all.push((descriptor, names)),
        }
    }
    all
}

/// The names of an image in a layout: from Docker's `manifest.json` if it lists the image, else from annotations.
fn image_names(
    top: &Descriptor,
    manifest: &Manifest,
    docker: &[DockerImage],
) -> Result<Vec<Reference>, LoadError> {
    let config = format!("blobs/sha256/{}", manifest.config.digest.hex());
    let has_config = |image: &&DockerImage| normalize(&image.config) == config;
    let tags: Vec<String> = docker
        .iter()
        .filter(has_config)
        .flat_map(|image| image.repo_tags.clone().unwrap_or_default())
        .collect();
    if !tags.is_empty() {
        let names: Result<_, _> = tags.iter().map(|tag| tag.parse()).collect();
        return Ok(names?);
    }
    if let Some(name) = top.annotations.get(FULL_NAME) {
        return Ok(vec![name.parse()?]);
    }
    // The annotation often has only a tag, which does not name an image.
    let is_full_name = |name: &&String| name.contains(['/', ':']);
    match top.annotations.get(REF_NAME).filter(is_full_name) {
        Some(name) => Ok(vec![name.parse()?]),
        None => Ok(Vec::new()),
    }
}

/// Fails at the size limit instead of reporting the end of the file: an archive may be a decompression bomb.
struct LimitedReader<R> {
    inner: R,
    limit: u64,
    read: u64,
}

impl<R: Read> Read for LimitedReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.read += n as u64;
        match self.read > self.limit {
            true => Err(io::Error::other(format!(
                "it holds more than {} bytes, the limit for an image",
                self.limit
            ))),
            false => Ok(n),
        }
    }
}

/// Copies, and distinguishes read errors of the archive from write errors of the store.
fn copy(from: &mut impl Read, to: &mut impl Write, store: &ImageStore) -> Result<(), LoadError> {
    let mut buffer = vec![0; 256 << 10];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n) => to
                .write_all(&buffer[..n])
                .map_err(|e| ImageStoreError::io("write to", &store.path().join("."), e))?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(LoadError::Read(error)),
        }
    }
}
