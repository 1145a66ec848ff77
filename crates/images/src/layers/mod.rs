//! Layers, unpacked once per node into local storage.
//!
//! ```text
//! DIR/0123456789abcdef0123456789abcdef   a layer, named by the first half of its diff id; published by one rename
//! DIR/.lock-0123…                        lock, exclusive while the layer is unpacked or removed
//! DIR/.from-0123…                        digests of blobs that are known to unpack to the layer, one per line
//! DIR/.use-0123…                         lock, shared while pods use the layer, exclusive to remove it; the
//!                                        modification time is the time of last use
//! DIR/.new-0123…                         the layer while it is unpacked, under the lock
//! DIR/.old-0123…                         the layer while it is removed, under the lock
//! ```
//!
//! Files are owned by ids of the user namespace that they were unpacked in, so they must be removed in it too.

mod gc;
mod holds;
mod ids;
mod layer_tree;
mod path;
pub(crate) mod tar;
mod unpack;

use std::ffi::CString;
use std::fs::{self, DirBuilder, File, FileTimes, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

pub use gc::ImageGcPolicy;
pub use holds::LayerHolds;
pub use unpack::{UnpackBudget, UnpackError};

use crate::compression::decompress;
use crate::store::lock;
use download::{Digest, HashingReader};

/// The unpacked layers of one node.
#[derive(Debug, Clone)]
pub struct Layers {
    dir: PathBuf,
    limits: ImageLimits,
}

/// Limits for the unpacked size of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageLimits {
    /// Bytes of all layers together.
    pub bytes: u64,
    /// Files, directories and links of all layers together.
    pub entries: u64,
}

impl Default for ImageLimits {
    /// Larger than today's images, but small enough for a node's disk.
    fn default() -> Self {
        ImageLimits {
            bytes: 128 << 30,
            entries: 8_000_000,
        }
    }
}

/// A layer cannot be unpacked or used.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    /// The archive is invalid, or the file system failed.
    #[error("cannot unpack layer {diff_id}")]
    Unpack {
        /// The layer.
        diff_id: Digest,
        /// The cause.
        source: UnpackError,
    },
    /// The uncompressed layer has another digest than the image's configuration says.
    #[error("layer {blob} unpacks to {got}, but the image's configuration says {diff_id}")]
    DiffId {
        /// The compressed layer.
        blob: Digest,
        /// The expected diff id.
        diff_id: Digest,
        /// The actual diff id.
        got: Digest,
    },
    /// A system call failed.
    #[error("cannot {action} {}", .path.display())]
    Io {
        /// The operation, as a verb.
        action: &'static str,
        /// Its object.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
}

impl LayerError {
    /// Whether the archive is the cause, and not the node's file system.
    pub fn is_archive_fault(&self) -> bool {
        matches!(
            self,
            LayerError::DiffId { .. }
                | LayerError::Unpack {
                    source: UnpackError::Damaged(_) | UnpackError::Rejected { .. },
                    ..
                }
        )
    }
}

fn io_error<'a>(action: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> LayerError + 'a {
    move |source| LayerError::Io {
        action,
        path: path.to_path_buf(),
        source,
    }
}

/// Protects layers from removal until it is dropped.
#[derive(Debug)]
pub struct LayerHold {
    _locks: Vec<File>,
}

impl Layers {
    /// Opens the directory `dir`, and creates it if it is missing.
    pub fn open(dir: &Path) -> Result<Layers, LayerError> {
        let dir = std::path::absolute(dir).map_err(io_error("find", dir))?;
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)
            .map_err(io_error("create directory", &dir))?;
        Ok(Layers {
            dir,
            limits: ImageLimits::default(),
        })
    }

    /// Sets the limits for the size of images.
    pub fn with_limits(self, limits: ImageLimits) -> Layers {
        Layers { limits, ..self }
    }

    /// The limits for the size of images.
    pub fn limits(&self) -> ImageLimits {
        self.limits
    }

    /// The directory of the layers.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    fn name(diff_id: Digest) -> String {
        diff_id.hex()[..32].to_owned()
    }

    /// The path of a layer, which need not exist.
    pub fn layer_path(&self, diff_id: Digest) -> PathBuf {
        self.dir.join(Self::name(diff_id))
    }

    /// Whether the layer is unpacked and this blob is known to unpack to it. That an image's configuration pairs the two is no
    /// proof: its author could name the diff id of a layer without having access to it.
    pub fn has(&self, diff_id: Digest, blob: Digest) -> bool {
        self.is_unpacked(diff_id) && self.has_origin(diff_id, blob)
    }

    fn is_unpacked(&self, diff_id: Digest) -> bool {
        self.layer_path(diff_id).is_dir()
    }

    fn origins_path(&self, diff_id: Digest) -> PathBuf {
        self.dir.join(format!(".from-{}", Self::name(diff_id)))
    }

    fn has_origin(&self, diff_id: Digest, blob: Digest) -> bool {
        let origins = fs::read_to_string(self.origins_path(diff_id)).unwrap_or_default();
        origins.lines().any(|line| line == blob.hex())
    }

    /// Records that a blob unpacks to a layer; the record stays valid when either is removed. The caller holds the lock.
    fn record_origin(&self, diff_id: Digest, blob: Digest) -> Result<(), LayerError> {
        if self.has_origin(diff_id, blob) {
            return Ok(());
        }
        let path = self.origins_path(diff_id);
        OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(&path)
            .and_then(|mut file| file.write_all(format!("{}\n", blob.hex()).as_bytes()))
            .map_err(io_error("write", &path))
    }

    /// Unpacks the blob `digest`, stored at `blob`. Does nothing if [`has`](Self::has) is true. Waits for a concurrent unpack of
    /// the layer. If the layer was unpacked from another blob, only checks that this blob has the same diff id.
    pub fn unpack(
        &self,
        blob: &Path,
        digest: Digest,
        diff_id: Digest,
        budget: &UnpackBudget,
    ) -> Result<PathBuf, LayerError> {
        let target = self.layer_path(diff_id);
        let lock = self.lock_file(&Self::name(diff_id))?;
        lock.lock().map_err(io_error("lock", &target))?;
        // Refresh the time of last use, so that no prune removes the layer before the caller holds it.
        self.touch(&self.use_file(&Self::name(diff_id))?);
        if self.has(diff_id, digest) {
            return Ok(target);
        }
        let failed = |source| LayerError::Unpack { diff_id, source };
        let file = File::open(blob).map_err(io_error("read", blob))?;
        let damaged = |error| failed(UnpackError::Damaged(error));
        let (_, stream) = decompress(file).map_err(damaged)?;
        let mut stream = HashingReader::new(stream);
        let staging = match self.is_unpacked(diff_id) {
            true => {
                unpack::read_through(&mut stream, budget).map_err(failed)?;
                None
            }
            false => {
                let staging = Staging::new(self, diff_id)?;
                let root = staging.path();
                let root = File::open(&root).map_err(io_error("open", &root))?;
                let ids = ids::IdMappings::of_this_process();
                unpack::unpack(root.into(), &mut stream, &ids, budget).map_err(failed)?;
                Some(staging)
            }
        };
        let (_, got) = stream.finish();
        if got != diff_id {
            return Err(LayerError::DiffId {
                blob: digest,
                diff_id,
                got,
            });
        }
        self.record_origin(diff_id, digest)?;
        if let Some(staging) = staging {
            staging.publish(&target)?;
        }
        self.touch(&self.use_file(&Self::name(diff_id))?);
        Ok(target)
    }

    fn lock_file(&self, name: &str) -> Result<File, LayerError> {
        self.open_side_file(&format!(".lock-{name}"))
    }

    fn use_file(&self, name: &str) -> Result<File, LayerError> {
        self.open_side_file(&format!(".use-{name}"))
    }

    fn open_side_file(&self, name: &str) -> Result<File, LayerError> {
        let path = self.dir.join(name);
        lock::open_file(&path).map_err(io_error("open", &path))
    }

    fn touch(&self, used: &File) {
        let _ = used.set_times(FileTimes::new().set_modified(SystemTime::now()));
    }

    /// Protects layers from being pruned until the result is dropped. Fails if one is missing.
    pub fn hold(&self, layers: &[PathBuf]) -> Result<LayerHold, LayerError> {
        let mut locks = Vec::new();
        for layer in layers {
            let name = layer.file_name().unwrap_or_default().to_string_lossy();
            let used = self.use_file(&name)?;
            used.lock_shared().map_err(io_error("lock", layer))?;
            fs::metadata(layer).map_err(io_error("find layer", layer))?;
            self.touch(&used);
            locks.push(used);
        }
        Ok(LayerHold { _locks: locks })
    }

    /// Removes layers that are not in use and whose last use was at least `unused` ago. Returns their number.
    pub fn prune(&self, unused: Duration) -> Result<usize, LayerError> {
        self.prune_until(unused, || false)
    }

    /// Like [`prune`](Self::prune), least recently used first, until `enough` returns true.
    pub fn prune_until(
        &self,
        unused: Duration,
        mut enough: impl FnMut() -> bool,
    ) -> Result<usize, LayerError> {
        let mut idle = Vec::new();
        let list = fs::read_dir(&self.dir).map_err(io_error("list", &self.dir))?;
        for entry in list.flatten() {
            let name = entry.file_name();
            let Some(name) = name.to_str() else {
                continue;
            };
            self.remove_leftover(name)?;
            if !is_layer(name) {
                continue;
            }
            let used = self.use_file(name)?;
            if used.try_lock().is_err() {
                // In use: set the time of last use to now.
                self.touch(&used);
                continue;
            }
            let last = used.metadata().and_then(|found| found.modified());
            idle.extend(last.ok().map(|last| (last, name.to_owned())));
        }
        idle.sort();
        let mut removed = 0;
        for (used, name) in idle {
            if used.elapsed().is_ok_and(|age| age < unused) || enough() {
                break;
            }
            let (lock, used) = (self.lock_file(&name)?, self.use_file(&name)?);
            if lock.try_lock().is_err() || used.try_lock().is_err() {
                continue;
            }
            self.remove_layer(&name)?;
            removed += 1;
        }
        Ok(removed)
    }

    /// Removes a layer; the caller holds its locks. Renames it first, so that an interrupted removal does not leave an
    /// incomplete layer under the layer's name.
    fn remove_layer(&self, name: &str) -> Result<(), LayerError> {
        let (path, old) = (self.dir.join(name), format!(".old-{name}"));
        remove(&self.dir, &old)?;
        fs::rename(&path, self.dir.join(&old)).map_err(io_error("remove", &path))?;
        remove(&self.dir, &old)
    }

    /// Removes `name` if it is a leftover of a killed unpack or removal.
    fn remove_leftover(&self, name: &str) -> Result<(), LayerError> {
        let part = name.strip_prefix(".old-").or(name.strip_prefix(".new-"));
        let Some(layer) = part.filter(|layer| is_layer(layer)) else {
            return Ok(());
        };
        let lock = self.lock_file(layer)?;
        if lock.try_lock().is_ok() {
            // A failure only wastes disk space.
            let _ = remove(&self.dir, name);
        }
        Ok(())
    }

    /// Removes all layers and the directory. The caller must be in the user namespace that the layers were unpacked in,
    /// and no layer may be in use.
    pub fn remove_all(self) -> Result<(), LayerError> {
        let parent = self.dir.parent().unwrap_or(Path::new("/"));
        let name = self.dir.file_name().unwrap_or_default();
        let dir = File::open(parent).map_err(io_error("open", parent))?;
        CString::new(name.as_bytes())
            .map_err(io::Error::from)
            .and_then(|name| linux::remove::tree_in(dir.as_fd(), &name))
            .map_err(io_error("remove", &self.dir))
    }
}

fn is_layer(name: &str) -> bool {
    name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn remove(dir: &Path, name: &str) -> Result<(), LayerError> {
    let path = dir.join(name);
    let open = File::open(dir).map_err(io_error("open", dir))?;
    CString::new(name)
        .map_err(io::Error::from)
        .and_then(|name| linux::remove::tree_in(open.as_fd(), &name))
        .map_err(io_error("remove", &path))
}

/// A layer while it is unpacked, under its lock. Dropping it unpublished removes it.
struct Staging<'a> {
    layers: &'a Layers,
    name: String,
    published: bool,
}

impl<'a> Staging<'a> {
    fn new(layers: &'a Layers, diff_id: Digest) -> Result<Staging<'a>, LayerError> {
        let name = format!(".new-{}", Layers::name(diff_id));
        // The leftover of a killed unpack.
        remove(&layers.dir, &name)?;
        let staging = Staging {
            layers,
            name,
            published: false,
        };
        let path = staging.path();
        DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .and_then(|()| fs::set_permissions(&path, Permissions::from_mode(0o755)))
            .map_err(io_error("create directory", &path))?;
        Ok(staging)
    }

    fn path(&self) -> PathBuf {
        self.layers.dir.join(&self.name)
    }

    fn publish(mut self, target: &Path) -> Result<(), LayerError> {
        fs::rename(self.path(), target).map_err(io_error("create", target))?;
        self.published = true;
        Ok(())
    }
}

impl Drop for Staging<'_> {
    fn drop(&mut self) {
        if !self.published {
            // A failure only wastes disk space, until `prune` removes the leftover.
            let _ = remove(&self.layers.dir, &self.name);
        }
    }
}

#[cfg(test)]
mod tests;
