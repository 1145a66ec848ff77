//! Reading images from an archive or a directory into the store.
//!
//! An archive may come through a pipe, and says only at its end what its files were. So every file is
//! kept as it comes, under a name of ours, and looked up afterwards: no name in the archive ever
//! becomes a path.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

use serde::Deserialize;

use crate::compression::{Compression, decompress, peek};
use crate::digest::{Digest, HashingReader};
use crate::layers::Limits;
use crate::layers::tar::{Archive, Kind};
use crate::manifest::{
    Configuration, Descriptor, Document, DocumentError, LARGEST_DOCUMENT, Manifest, OCI_CONFIG,
    OCI_LAYER, OCI_MANIFEST,
};
use crate::reference::{Reference, ReferenceError};
use crate::store::{Store, StoreError, Written};

/// Files in an archive that are no image: enough is enough.
const MOST_FILES: usize = 20_000;

/// How layers that come uncompressed are kept.
const COMPRESSION_LEVEL: i32 = 3;

/// Where containerd, and after it Docker, note an image's full name.
const FULL_NAME: &str = "io.containerd.image.name";
/// Where OCI's layout notes a tag or a name.
const REF_NAME: &str = "org.opencontainers.image.ref.name";

/// An archive can't be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// It can't be read.
    #[error("the archive can't be read")]
    Read(#[source] io::Error),
    /// Not a single byte came.
    #[error("the archive is empty")]
    Empty,
    /// It is something else altogether.
    #[error("this is no tar archive, neither compressed nor plain")]
    NoArchive(#[source] io::Error),
    /// There is no image in it.
    #[error("the archive is neither one of `docker save` nor an OCI image layout: it has no {0}")]
    NoImage(&'static str),
    /// A part of the image isn't there.
    #[error("the archive is incomplete: {0} is missing")]
    Missing(String),
    /// A file isn't what its name says.
    #[error("the archive is damaged: {name} is {got}")]
    Digest {
        /// Its name.
        name: String,
        /// What it is.
        got: Digest,
    },
    /// A document makes no sense.
    #[error("{name} in the archive")]
    Json {
        /// Which one.
        name: String,
        /// Why not.
        source: serde_json::Error,
    },
    /// A manifest or configuration makes no sense.
    #[error("{name} in the archive")]
    Document {
        /// Which one.
        name: String,
        /// Why not.
        source: DocumentError,
    },
    /// An image in it has an impossible name.
    #[error(transparent)]
    Name(#[from] ReferenceError),
    /// It can't be kept.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// It has far too many files.
    #[error("the archive has more than {MOST_FILES} files: it is no image")]
    TooMany,
    /// A name was given, and it is not clear for which.
    #[error("the archive has {0} images, and a name was given for one")]
    Names(usize),
}

/// An image that was loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loaded {
    /// Its full name; `None` if the archive has none for it, and none was given.
    pub reference: Option<Reference>,
    /// What it is.
    pub digest: Digest,
}

/// A file of the archive, kept but not in its place.
enum Kept {
    /// As it was.
    Plain(Written),
    /// A layer that was compressed by us.
    Compressed { file: Written, diff_id: Digest },
    /// Another name in the archive.
    Link(String),
}

/// Loads all images of an archive, which may be compressed, but not hold more than `limits` allow for an image. `name` is
/// what its only image shall be called. Blocks.
pub fn load(
    store: &Store,
    archive: impl Read,
    name: Option<&Reference>,
    limits: Limits,
) -> Result<Vec<Loaded>, LoadError> {
    let _in_use = store.in_use_blocking()?;
    let (start, archive) = peek(archive).map_err(LoadError::Read)?;
    if start.is_empty() {
        return Err(LoadError::Empty);
    }
    let (_, stream) = decompress(archive).map_err(LoadError::Read)?;
    let mut archive = Archive::new(Bounded {
        inner: stream,
        most: limits.bytes,
        read: 0,
    });
    let mut files = Files::new(store);
    let mut next = archive.next().map_err(no_archive)?;
    while let Some(entry) = next {
        let path = normal(&String::from_utf8_lossy(&entry.path));
        match entry.kind {
            Kind::File => files.add(path, &mut archive)?,
            Kind::Symlink | Kind::HardLink => {
                let target = String::from_utf8_lossy(&entry.link).into_owned();
                files.link(path, &target, entry.kind)?;
            }
            _ => {}
        }
        next = archive.next().map_err(LoadError::Read)?;
    }
    files.images(name)
}

/// Sorts why not even the first entry can be read.
fn no_archive(error: io::Error) -> LoadError {
    use io::ErrorKind::{InvalidData, InvalidInput, UnexpectedEof};
    match error.kind() {
        InvalidData | InvalidInput | UnexpectedEof => LoadError::NoArchive(error),
        _ => LoadError::Read(error),
    }
}

/// Loads all images of an OCI layout, or of an unpacked `docker save`, in a directory. Blocks.
pub fn load_directory(
    store: &Store,
    dir: &Path,
    name: Option<&Reference>,
) -> Result<Vec<Loaded>, LoadError> {
    let _in_use = store.in_use_blocking()?;
    let mut files = Files::new(store);
    add_directory(&mut files, dir, "", 3)?;
    files.images(name)
}

fn add_directory(
    files: &mut Files<'_>,
    dir: &Path,
    prefix: &str,
    depth: u32,
) -> Result<(), LoadError> {
    for entry in fs::read_dir(dir).map_err(LoadError::Read)? {
        let entry = entry.map_err(LoadError::Read)?;
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        let path = entry.path();
        // The user's own directory: its symlinks are as good as files.
        let found = fs::metadata(&path).map_err(LoadError::Read)?;
        if found.is_dir() && depth > 0 {
            add_directory(files, &path, &format!("{name}/"), depth - 1)?;
        } else if found.is_file() {
            files.add(name, File::open(&path).map_err(LoadError::Read)?)?;
        }
    }
    Ok(())
}

/// `./a//b` is `a/b`, and `a/../b` is `b`.
fn normal(path: &str) -> String {
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

/// What an archive holds, by name.
struct Files<'a> {
    store: &'a Store,
    kept: HashMap<String, Kept>,
    /// What is in its place already, and its size.
    placed: HashMap<String, (Descriptor, Option<Digest>)>,
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

impl<'a> Files<'a> {
    fn new(store: &'a Store) -> Self {
        Files {
            store,
            kept: HashMap::new(),
            placed: HashMap::new(),
        }
    }

    fn add(&mut self, name: String, content: impl Read) -> Result<(), LoadError> {
        if self.kept.len() >= MOST_FILES {
            return Err(LoadError::TooMany);
        }
        let (start, mut content) = peek(content).map_err(LoadError::Read)?;
        // In the new form a file's name is its digest, and must stay that.
        let ours = !name.starts_with("blobs/") && name.ends_with(".tar");
        let kept = match ours && Compression::of(&start) == Compression::None {
            true => self.compress(content)?,
            false => {
                let mut spool = self.store.spool()?;
                copy(&mut content, &mut spool, self.store)?;
                Kept::Plain(spool.close())
            }
        };
        self.kept.insert(name, kept);
        Ok(())
    }

    fn compress(&self, content: impl Read) -> Result<Kept, LoadError> {
        let mut content = HashingReader::new(content);
        let spool = self.store.spool()?;
        let writing = |e| StoreError::io("write to", self.store.path(), e);
        let mut encoder =
            zstd::stream::write::Encoder::new(spool, COMPRESSION_LEVEL).map_err(writing)?;
        copy(&mut content, &mut encoder, self.store)?;
        let file = encoder.finish().map_err(writing)?.close();
        let (_, diff_id) = content.finish();
        Ok(Kept::Compressed { file, diff_id })
    }

    fn link(&mut self, name: String, target: &str, kind: Kind) -> Result<(), LoadError> {
        if self.kept.len() >= MOST_FILES {
            return Err(LoadError::TooMany);
        }
        let target = match (kind, name.rsplit_once('/')) {
            (Kind::Symlink, Some((dir, _))) => normal(&format!("{dir}/{target}")),
            _ => normal(target),
        };
        self.kept.insert(name, Kept::Link(target));
        Ok(())
    }

    /// Names of files that stand for others.
    fn resolve(&self, name: &str) -> String {
        let mut name = normal(name);
        for _ in 0..8 {
            match self.kept.get(&name) {
                Some(Kept::Link(target)) => name = target.clone(),
                _ => break,
            }
        }
        name
    }

    /// The content of a small file.
    fn text(&self, name: &str) -> Result<Option<Vec<u8>>, LoadError> {
        let Some(Kept::Plain(file)) = self.kept.get(&self.resolve(name)) else {
            return Ok(None);
        };
        let mut bytes = Vec::new();
        file.open()?
            .take(LARGEST_DOCUMENT)
            .read_to_end(&mut bytes)
            .map_err(LoadError::Read)?;
        Ok(Some(bytes))
    }

    /// Puts a file in its place in the store. The second value is the digest of what is inside, if known.
    fn place(&mut self, name: &str) -> Result<(Descriptor, Option<Digest>), LoadError> {
        let name = self.resolve(name);
        if let Some(placed) = self.placed.get(&name) {
            return Ok(placed.clone());
        }
        let (file, diff_id) = match self.kept.remove(&name) {
            Some(Kept::Plain(file)) => (file, None),
            Some(Kept::Compressed { file, diff_id }) => (file, Some(diff_id)),
            Some(Kept::Link(_)) | None => return Err(LoadError::Missing(name)),
        };
        let (digest, size) = self.store.keep(file)?;
        let descriptor = Descriptor {
            media_type: String::new(),
            digest,
            size,
            platform: None,
            annotations: BTreeMap::new(),
        };
        self.placed.insert(name, (descriptor.clone(), diff_id));
        Ok((descriptor, diff_id))
    }

    /// Puts a blob of the new form in its place.
    fn place_blob(&mut self, blob: &Descriptor) -> Result<(), LoadError> {
        let name = format!("blobs/sha256/{}", blob.digest.hex());
        let is_own = self.kept.contains_key(&name) || self.placed.contains_key(&name);
        // An archive without a blob proves no access to it, and what is loaded becomes everybody's.
        if !is_own && self.store.has(blob) && self.store.is_open(blob.digest)? {
            return Ok(());
        }
        let (found, _) = self.place(&name)?;
        match found.digest == blob.digest {
            true => Ok(()),
            false => Err(LoadError::Digest {
                name,
                got: found.digest,
            }),
        }
    }

    fn images(mut self, name: Option<&Reference>) -> Result<Vec<Loaded>, LoadError> {
        let docker = match self.text("manifest.json")? {
            Some(text) => serde_json::from_slice(&text).map_err(|source| LoadError::Json {
                name: "manifest.json".to_owned(),
                source,
            })?,
            None => Vec::new(),
        };
        let mut loaded = by_image(match self.text("index.json")? {
            Some(index) => self.layout(&index, &docker)?,
            None if docker.is_empty() => return Err(LoadError::NoImage("manifest.json")),
            None => self.docker(docker)?,
        });
        match (name, loaded.as_mut_slice()) {
            (_, []) => return Err(LoadError::NoImage("image")),
            (Some(name), [only]) => only.1 = vec![name.clone()],
            (Some(_), several) => return Err(LoadError::Names(several.len())),
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
                self.store.name(name, &descriptor)?;
            }
            let digest = descriptor.digest;
            match names.is_empty() {
                true => all.push(Loaded {
                    reference: None,
                    digest,
                }),
                false => all.extend(names.into_iter().map(|name| Loaded {
                    reference: Some(name),
                    digest,
                })),
            }
        }
        Ok(all)
    }

    /// The new form: everything by digest.
    fn layout(
        &mut self,
        index: &[u8],
        docker: &[DockerImage],
    ) -> Result<Vec<(Descriptor, Vec<Reference>)>, LoadError> {
        let wrong = |name: &str| {
            let name = name.to_owned();
            move |source| LoadError::Document { name, source }
        };
        let index = match Document::parse(index, "").map_err(wrong("index.json"))? {
            Document::Index(index) => index,
            Document::Manifest(_) => return Err(LoadError::NoImage("index.json")),
        };
        let mut all = Vec::new();
        for top in index.manifests {
            let mut at = top.clone();
            for depth in 0.. {
                self.place_blob(&at)?;
                let name = at.digest.to_string();
                let bytes = self.store.read_document(at.digest)?.unwrap_or_default();
                match Document::parse(&bytes, &at.media_type).map_err(wrong(&name))? {
                    Document::Index(index) if depth < 3 => {
                        at = index.choose().map_err(wrong(&name))?.clone();
                    }
                    Document::Index(_) => return Err(LoadError::NoImage("manifest of an image")),
                    Document::Manifest(manifest) => {
                        for blob in manifest.blobs() {
                            self.place_blob(blob)?;
                        }
                        let names = names(&top, &manifest, docker)?;
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

    /// The old form: a list of configurations and layers, from which we make manifests.
    fn docker(
        &mut self,
        images: Vec<DockerImage>,
    ) -> Result<Vec<(Descriptor, Vec<Reference>)>, LoadError> {
        let mut all = Vec::new();
        for image in images {
            let layer_names = image.layers.unwrap_or_default();
            let (mut config, _) = self.place(&image.config)?;
            config.media_type = OCI_CONFIG.to_owned();
            let text = self.store.read_document(config.digest)?.unwrap_or_default();
            let configuration =
                Configuration::parse(&text, layer_names.len()).map_err(|source| {
                    LoadError::Document {
                        name: image.config.clone(),
                        source,
                    }
                })?;
            let mut layers = Vec::new();
            for (name, expected) in layer_names.iter().zip(configuration.diff_ids) {
                let (mut layer, diff_id) = self.place(name)?;
                if let Some(got) = diff_id.filter(|got| *got != expected) {
                    return Err(LoadError::Digest {
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
        let mut file = File::open(&path).map_err(|e| StoreError::io("read", &path, e))?;
        let n = file.read(&mut start).map_err(LoadError::Read)?;
        Ok(Compression::of(&start[..n]))
    }
}

/// Each image once, with all of its names: a layout has an entry for each of them.
fn by_image(listed: Vec<(Descriptor, Vec<Reference>)>) -> Vec<(Descriptor, Vec<Reference>)> {
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

/// What an image of a layout is called: by its own notes, else by Docker's list beside it.
fn names(
    top: &Descriptor,
    manifest: &Manifest,
    docker: &[DockerImage],
) -> Result<Vec<Reference>, LoadError> {
    let config = format!("blobs/sha256/{}", manifest.config.digest.hex());
    let same = |image: &&DockerImage| normal(&image.config) == config;
    let tags: Vec<String> = docker
        .iter()
        .filter(same)
        .flat_map(|image| image.repo_tags.clone().unwrap_or_default())
        .collect();
    if !tags.is_empty() {
        let names: Result<_, _> = tags.iter().map(|tag| tag.parse()).collect();
        return Ok(names?);
    }
    if let Some(name) = top.annotations.get(FULL_NAME) {
        return Ok(vec![name.parse()?]);
    }
    // Often only a tag, which names nothing.
    let named = |name: &&String| name.contains(['/', ':']);
    match top.annotations.get(REF_NAME).filter(named) {
        Some(name) => Ok(vec![name.parse()?]),
        None => Ok(Vec::new()),
    }
}

/// Ends with an error, and not quietly, where a few compressed bytes become more than an image may be.
struct Bounded<R> {
    inner: R,
    most: u64,
    read: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.read += n as u64;
        match self.read > self.most {
            true => Err(io::Error::other(format!(
                "it holds more than {} bytes, and no image may",
                self.most
            ))),
            false => Ok(n),
        }
    }
}

/// Tells an archive that can't be read from a store that can't be written.
fn copy(from: &mut impl Read, to: &mut impl Write, store: &Store) -> Result<(), LoadError> {
    let mut buffer = vec![0; 256 << 10];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n) => to
                .write_all(&buffer[..n])
                .map_err(|e| StoreError::io("write to", &store.path().join("."), e))?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(LoadError::Read(error)),
        }
    }
}
