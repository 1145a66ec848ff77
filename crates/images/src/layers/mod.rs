//! Layers, unpacked once per node into local storage.
//!
//! ```text
//! DIR/0123456789abcdef0123456789abcdef   a layer, by the first half of its diff id; appears by one rename
//! DIR/.lock-0123…                        held alone to unpack or remove it, for as long as that takes
//! DIR/.from-0123…                        the digests of blobs that were seen to unpack to it, one per line
//! DIR/.use-0123…                         shared by whoever uses it, held alone to remove it; its modification
//!                                        time is when it was last used
//! DIR/.new-0123…                         being unpacked by whoever holds the lock
//! DIR/.old-0123…                         being removed by whoever holds it
//! ```
//!
//! Files belong to ids of the user namespace they were unpacked in, so they must be removed in it too.

mod ids;
mod path;
pub(crate) mod tar;
mod tree;
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

pub use unpack::{Allowance, UnpackError};

use crate::compression::decompress;
use crate::digest::{Digest, HashingReader};

/// The unpacked layers of one node.
#[derive(Debug, Clone)]
pub struct Layers {
    dir: PathBuf,
    limits: Limits,
}

/// How large an image may be when unpacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// All of its layers together.
    pub bytes: u64,
    /// Files, directories and links of all of its layers.
    pub entries: u64,
}

impl Default for Limits {
    /// More than any image of today, and less than what would hurt a node's disk for long.
    fn default() -> Self {
        Limits {
            bytes: 128 << 30,
            entries: 8_000_000,
        }
    }
}

/// A layer can't be unpacked or used.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    /// The archive is at fault, or the disk.
    #[error("layer {diff_id}")]
    Unpack {
        /// Which one.
        diff_id: Digest,
        /// Why.
        source: UnpackError,
    },
    /// It holds something else than the image says.
    #[error("layer {blob} unpacks to {got}, not to {diff_id} as the image's configuration says")]
    DiffId {
        /// The compressed layer.
        blob: Digest,
        /// What it should be.
        diff_id: Digest,
        /// What it is.
        got: Digest,
    },
    /// The system refused something.
    #[error("can't {doing} {}", .path.display())]
    Io {
        /// A verb.
        doing: &'static str,
        /// Its object.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl LayerError {
    /// Whether the archive may be damaged, as opposed to the disk being full and the like.
    pub fn blames_archive(&self) -> bool {
        matches!(
            self,
            LayerError::DiffId { .. }
                | LayerError::Unpack {
                    source: UnpackError::Damaged(_) | UnpackError::Refused { .. },
                    ..
                }
        )
    }
}

fn io_error<'a>(doing: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> LayerError + 'a {
    move |source| LayerError::Io {
        doing,
        path: path.to_path_buf(),
        source,
    }
}

/// As long as it lives, the layers it stands for are not removed.
#[derive(Debug)]
pub struct Held {
    _locks: Vec<File>,
}

impl Layers {
    /// Opens the directory `dir`, and makes it if need be.
    pub fn open(dir: &Path) -> Result<Layers, LayerError> {
        let dir = std::path::absolute(dir).map_err(io_error("find", dir))?;
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)
            .map_err(io_error("make the directory", &dir))?;
        Ok(Layers {
            dir,
            limits: Limits::default(),
        })
    }

    /// Bounds the size of images.
    pub fn with_limits(self, limits: Limits) -> Layers {
        Layers { limits, ..self }
    }

    /// The bounds.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    fn name(diff_id: Digest) -> String {
        diff_id.hex()[..32].to_owned()
    }

    /// Where this layer is, or would be.
    pub fn layer_path(&self, diff_id: Digest) -> PathBuf {
        self.dir.join(Self::name(diff_id))
    }

    /// Whether this blob was unpacked to this layer, or seen to be the same. That a configuration names a layer beside a blob
    /// proves nothing: whoever wrote it may not have the layer.
    pub fn has(&self, diff_id: Digest, blob: Digest) -> bool {
        self.is_unpacked(diff_id) && self.is_from(diff_id, blob)
    }

    fn is_unpacked(&self, diff_id: Digest) -> bool {
        self.layer_path(diff_id).is_dir()
    }

    fn origins_path(&self, diff_id: Digest) -> PathBuf {
        self.dir.join(format!(".from-{}", Self::name(diff_id)))
    }

    fn is_from(&self, diff_id: Digest, blob: Digest) -> bool {
        let origins = fs::read_to_string(self.origins_path(diff_id)).unwrap_or_default();
        origins.lines().any(|line| line == blob.hex())
    }

    /// Notes that a blob unpacks to a layer, which stays true whatever becomes of both. To be called by who holds the lock.
    fn note_origin(&self, diff_id: Digest, blob: Digest) -> Result<(), LayerError> {
        if self.is_from(diff_id, blob) {
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

    /// Unpacks the blob `digest`, at `blob`, unless that was done already. Waits for whoever does it now. If the layer was unpacked
    /// from another blob, this one is read to see that it holds the same.
    pub fn unpack(
        &self,
        blob: &Path,
        digest: Digest,
        diff_id: Digest,
        allowance: &Allowance,
    ) -> Result<PathBuf, LayerError> {
        let target = self.layer_path(diff_id);
        let lock = self.lock_file(&Self::name(diff_id))?;
        lock.lock().map_err(io_error("lock", &target))?;
        // From now on it is young, so that nobody removes it before it is held.
        self.touch(&self.use_file(&Self::name(diff_id))?);
        if self.has(diff_id, digest) {
            return Ok(target);
        }
        let wrong = |source| LayerError::Unpack { diff_id, source };
        let file = File::open(blob).map_err(io_error("read", blob))?;
        let damaged = |error| wrong(UnpackError::Damaged(error));
        let (_, stream) = decompress(file).map_err(damaged)?;
        let mut stream = HashingReader::new(stream);
        let staging = match self.is_unpacked(diff_id) {
            true => {
                unpack::read_through(&mut stream, allowance).map_err(wrong)?;
                None
            }
            false => {
                let staging = Staging::new(self, diff_id)?;
                let root = staging.path();
                let root = File::open(&root).map_err(io_error("open", &root))?;
                let ids = ids::Ids::of_this_process();
                unpack::unpack(root.into(), &mut stream, &ids, allowance).map_err(wrong)?;
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
        self.note_origin(diff_id, digest)?;
        if let Some(staging) = staging {
            staging.publish(&target)?;
        }
        self.touch(&self.use_file(&Self::name(diff_id))?);
        Ok(target)
    }

    fn lock_file(&self, name: &str) -> Result<File, LayerError> {
        self.file_beside(&format!(".lock-{name}"))
    }

    fn use_file(&self, name: &str) -> Result<File, LayerError> {
        self.file_beside(&format!(".use-{name}"))
    }

    fn file_beside(&self, name: &str) -> Result<File, LayerError> {
        let path = self.dir.join(name);
        OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(io_error("open", &path))
    }

    fn touch(&self, used: &File) {
        let _ = used.set_times(FileTimes::new().set_modified(SystemTime::now()));
    }

    /// Keeps these layers from being pruned, as long as the result lives. Fails if one isn't there.
    pub fn hold(&self, layers: &[PathBuf]) -> Result<Held, LayerError> {
        let mut locks = Vec::new();
        for layer in layers {
            let name = layer.file_name().unwrap_or_default().to_string_lossy();
            let used = self.use_file(&name)?;
            used.lock_shared().map_err(io_error("lock", layer))?;
            fs::metadata(layer).map_err(io_error("find the layer", layer))?;
            self.touch(&used);
            locks.push(used);
        }
        Ok(Held { _locks: locks })
    }

    /// Removes layers that nobody holds and that were not used for `unused`. Says how many went.
    pub fn prune(&self, unused: Duration) -> Result<usize, LayerError> {
        self.free(unused, || false)
    }

    /// The same, the least recently used first, and only until there is `enough` room.
    pub fn free(
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
            self.sweep(name)?;
            if !is_layer(name) {
                continue;
            }
            let used = self.use_file(name)?;
            if used.try_lock().is_err() {
                // In use until now, at least.
                self.touch(&used);
                continue;
            }
            let last = used.metadata().and_then(|found| found.modified());
            idle.extend(last.ok().map(|last| (last, name.to_owned())));
        }
        idle.sort();
        let mut gone = 0;
        for (used, name) in idle {
            if used.elapsed().is_ok_and(|age| age < unused) || enough() {
                break;
            }
            let (lock, used) = (self.lock_file(&name)?, self.use_file(&name)?);
            if lock.try_lock().is_err() || used.try_lock().is_err() {
                continue;
            }
            self.take_away(&name)?;
            gone += 1;
        }
        Ok(gone)
    }

    /// Removes a layer whose locks are held. Its name goes first: who is killed, or fails, in the middle must not leave a
    /// part of a layer that passes for all of it.
    fn take_away(&self, name: &str) -> Result<(), LayerError> {
        let (path, old) = (self.dir.join(name), format!(".old-{name}"));
        remove(&self.dir, &old)?;
        fs::rename(&path, self.dir.join(&old)).map_err(io_error("remove", &path))?;
        remove(&self.dir, &old)
    }

    /// Removes `name` if it is what a killed process left of a layer.
    fn sweep(&self, name: &str) -> Result<(), LayerError> {
        let part = name.strip_prefix(".old-").or(name.strip_prefix(".new-"));
        let Some(layer) = part.filter(|layer| is_layer(layer)) else {
            return Ok(());
        };
        let lock = self.lock_file(layer)?;
        if lock.try_lock().is_ok() {
            // Only room is lost if this fails.
            let _ = remove(&self.dir, name);
        }
        Ok(())
    }

    /// Removes everything, and the directory itself. To be called in the user namespace that the
    /// layers were unpacked in, when nothing uses them any more.
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

/// A layer being unpacked, by whoever holds its lock. Dropped unpublished, it is removed.
struct Staging<'a> {
    layers: &'a Layers,
    name: String,
    published: bool,
}

impl<'a> Staging<'a> {
    fn new(layers: &'a Layers, diff_id: Digest) -> Result<Staging<'a>, LayerError> {
        let name = format!(".new-{}", Layers::name(diff_id));
        // What a killed process left.
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
            .map_err(io_error("make the directory", &path))?;
        Ok(staging)
    }

    fn path(&self) -> PathBuf {
        self.layers.dir.join(&self.name)
    }

    fn publish(mut self, target: &Path) -> Result<(), LayerError> {
        fs::rename(self.path(), target).map_err(io_error("make", target))?;
        self.published = true;
        Ok(())
    }
}

impl Drop for Staging<'_> {
    fn drop(&mut self) {
        if !self.published {
            // Only room is lost if this fails; the directory goes with the node's.
            let _ = remove(&self.layers.dir, &self.name);
        }
    }
}

#[cfg(test)]
mod tests;
