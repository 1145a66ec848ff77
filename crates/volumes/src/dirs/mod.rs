//! Prepares directories on the node for volumes.
//!
//! ```text
//!   writer.rs      files with atomic updates: the `..data` symlink
//!   ownership.rs   fsGroup
//!   host_path.rs   type check of a hostPath
//!   nfs.rs         directories of NFS servers that the node has mounted
//!   usage.rs       disk usage of a volume
//!   opath.rs       chmod and chown by O_PATH descriptor
//! ```
//!
//! This code runs as root of the node's user namespace. If that maps only one id, owners and groups cannot change; that
//! one id then owns all files and runs all containers.

mod host_path;
mod nfs;
mod opath;
mod ownership;
mod usage;
mod writer;

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use crate::content::ContentError;
use crate::{FsGroupPolicy, HostPathKind, MappedPath, VolumeSource};

/// The mode of an emptyDir: containers may run as any user.
const EMPTY_DIR_MODE: u32 = 0o777;

/// A volume that is ready to be mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreparedVolume {
    /// The path to mount: a directory, or any file type for a hostPath.
    pub path: PathBuf,
    /// Whether all mounts are read-only, regardless of the container's spec.
    pub read_only: bool,
}

/// A volume cannot be prepared. The message follows upstream's `MountVolume.SetUp failed for volume "x" : `.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// The volume's name is not a valid directory name.
    #[error("invalid volume name {0:?}")]
    Name(String),
    /// A file's path leaves the volume.
    #[error(transparent)]
    Content(#[from] ContentError),
    /// A hostPath has the wrong file type.
    #[error("hostPath type check failed: {path} is not a {expected}{}", actual_type(.found))]
    HostPath {
        /// The path.
        path: PathBuf,
        /// The expected type.
        expected: &'static str,
        /// The actual type, or the error of determining it.
        found: Result<&'static str, io::Error>,
    },
    /// The directory of a persistent volume is missing.
    #[error("path {0:?} does not exist on this node")]
    Missing(PathBuf),
    /// This node has not mounted the NFS directory.
    #[error(
        "nfs {server}:{path} is not mounted on this node, and Coracle cannot mount it; if it is mounted under another name, set the annotation {} of the PersistentVolume to its mount point",
        crate::MOUNTED_AT_ANNOTATION
    )]
    NotMounted {
        /// The server.
        server: String,
        /// The directory on the server.
        path: String,
    },
    /// The path of an NFS directory contains a symlink.
    #[error(
        "nfs {server}:{path} contains a symbolic link, which may lead out of the export; use the path of the link's target"
    )]
    NfsLink {
        /// The server.
        server: String,
        /// The directory on the server.
        path: String,
    },
    /// The node has mounted another file system below the NFS directory.
    #[error(
        "nfs {server}:{path} contains {}, where this node has mounted another file system; use a subdirectory without such a mount", .other.display()
    )]
    NfsContainsMount {
        /// The server.
        server: String,
        /// The directory on the server.
        path: String,
        /// The mount point of the other file system.
        other: PathBuf,
    },
    /// This crate does not prepare image volumes.
    #[error("image volume {0:?} cannot be prepared as a directory")]
    Image(String),
    /// A system call failed.
    #[error("cannot {action} {}: {source}", .path.display())]
    Io {
        /// The operation, as a verb.
        action: &'static str,
        /// Its object.
        path: PathBuf,
        /// The error.
        #[source]
        source: io::Error,
    },
}

fn actual_type(found: &Result<&'static str, io::Error>) -> String {
    match found {
        Ok(kind) => format!(", it's a {kind}"),
        Err(error) => format!(", unable to determine its type: {error}"),
    }
}

/// Adds the operation and the path to an [`io::Error`].
pub(crate) fn failed<'a>(
    action: &'static str,
    path: &'a Path,
) -> impl FnOnce(io::Error) -> VolumeError + 'a {
    move |source| VolumeError::Io {
        action,
        path: path.to_owned(),
        source,
    }
}

/// The volumes of one pod on this node.
#[derive(Clone, Debug)]
pub struct PodVolumes {
    disk_dir: PathBuf,
    memory_dir: PathBuf,
}

impl PodVolumes {
    /// The volumes in `disk_dir`, on the node's disk, and in `memory_dir`, on a tmpfs in a private mount namespace. Both
    /// directories are for this pod only, and are created when needed.
    pub fn new(disk_dir: impl Into<PathBuf>, memory_dir: impl Into<PathBuf>) -> Self {
        Self {
            disk_dir: disk_dir.into(),
            memory_dir: memory_dir.into(),
        }
    }

    /// Prepares a volume for mounting. Idempotent: emptyDirs keep their content, and files are updated atomically.
    pub fn prepare(
        &self,
        name: &str,
        source: &VolumeSource,
        fs_group: Option<i64>,
    ) -> Result<PreparedVolume, VolumeError> {
        if name.is_empty() || name.starts_with('.') || name.contains(['/', '\0']) {
            return Err(VolumeError::Name(name.to_owned()));
        }
        let (path, read_only) = match source {
            VolumeSource::EmptyDir { memory: false, .. } => {
                let path = self.disk_dir.join(name);
                if create_dir(&path, EMPTY_DIR_MODE)? {
                    apply_fs_group(&path, fs_group, false)?;
                }
                (path, false)
            }
            VolumeSource::EmptyDir {
                memory: true,
                size_limit,
            } => (self.prepare_tmpfs(name, *size_limit, fs_group)?, false),
            VolumeSource::Files(payload) => {
                // Never on disk: the files may be secret.
                let path = self.memory_dir.join(name);
                create_dir(&path, EMPTY_DIR_MODE)?;
                writer::write(&path, payload, |dir| apply_fs_group(dir, fs_group, true))?;
                (path, true)
            }
            VolumeSource::HostPath {
                path,
                kind,
                read_only,
                mapped,
            } => {
                let path = MappedPath::choose(mapped.as_ref(), path);
                host_path::check(path, *kind)?;
                (path.to_owned(), *read_only)
            }
            VolumeSource::Nfs {
                server,
                path,
                mounted_at,
                read_only,
            } => {
                let path = match mounted_at {
                    Some(mount_point) => {
                        nfs::check(mount_point)?;
                        host_path::check(mount_point, HostPathKind::Directory)?;
                        mount_point.clone()
                    }
                    None => self.mount_copy(name, || nfs::open(server, path))?,
                };
                (path, *read_only)
            }
            VolumeSource::Directory {
                path,
                read_only,
                ownership,
                create,
            } => {
                if *create {
                    create_dir(path, EMPTY_DIR_MODE)?;
                }
                let fs_group = fs_group.filter(|_| !read_only);
                (prepare_directory(path, *ownership, fs_group)?, *read_only)
            }
            VolumeSource::Image { reference } => {
                return Err(VolumeError::Image(reference.clone()));
            }
        };
        Ok(PreparedVolume { path, read_only })
    }

    fn prepare_tmpfs(
        &self,
        name: &str,
        size_limit: Option<u64>,
        fs_group: Option<i64>,
    ) -> Result<PathBuf, VolumeError> {
        let path = self.memory_dir.join(name);
        create_dir(&path, EMPTY_DIR_MODE)?;
        let mounted = linux::tmpfs::is_mount_point(&path);
        if !mounted.map_err(failed("stat", &path))? {
            let size = size_limit.filter(|&bytes| bytes > 0);
            linux::tmpfs::mount(&path, size, 0o1777).map_err(failed("mount a tmpfs on", &path))?;
            apply_fs_group(&path, fs_group, false)?;
        }
        Ok(path)
    }

    /// Opens a directory and mounts it below `memory_dir`, because the original path may lead to another directory later.
    fn mount_copy(
        &self,
        name: &str,
        open: impl FnOnce() -> Result<OwnedFd, VolumeError>,
    ) -> Result<PathBuf, VolumeError> {
        let mount_point = self.memory_dir.join(name);
        create_dir(&mount_point, 0o700)?;
        if !linux::tmpfs::is_mount_point(&mount_point).map_err(failed("stat", &mount_point))? {
            let dir = open()?;
            linux::mount_tree::MountTree::copy_open(&dir, true)
                .and_then(|tree| tree.attach(&mount_point))
                .map_err(failed("mount a directory on", &mount_point))?;
        }
        Ok(mount_point)
    }

    /// Updates a prepared volume. Only [`VolumeSource::Files`] changes; other sources are left alone.
    pub fn update(
        &self,
        name: &str,
        source: &VolumeSource,
        fs_group: Option<i64>,
    ) -> Result<(), VolumeError> {
        match source {
            VolumeSource::Files(_) => self.prepare(name, source, fs_group).map(|_| ()),
            _ => Ok(()),
        }
    }

    /// The bytes of disk or memory that an emptyDir uses; 0 for other sources.
    pub fn usage(&self, name: &str) -> u64 {
        let on_disk = self.disk_dir.join(name);
        if on_disk.is_dir() {
            return linux::walk::allocated_bytes(&on_disk);
        }
        let in_memory = self.memory_dir.join(name);
        match linux::tmpfs::is_mount_point(&in_memory) {
            Ok(true) => usage::of_file_system(&in_memory),
            _ => 0,
        }
    }

    /// Removes all directories of this pod's volumes. Paths of the node and persistent volumes stay.
    ///
    /// Continues after an error and returns the first one.
    pub fn remove_all(&self) -> Result<(), VolumeError> {
        let mut first = Ok(());
        let mut keep_first = |result: Result<(), VolumeError>| {
            if first.is_ok() {
                first = result;
            }
        };
        for entry in std::fs::read_dir(&self.memory_dir)
            .into_iter()
            .flatten()
            .flatten()
        {
            let path = entry.path();
            // Mounts may be stacked: unmount all.
            while let Ok(true) = linux::tmpfs::is_mount_point(&path) {
                if let Err(error) = linux::tmpfs::unmount(&path) {
                    keep_first(Err(failed("unmount", &path)(error)));
                    break;
                }
            }
        }
        for dir in [&self.memory_dir, &self.disk_dir] {
            keep_first(linux::remove::tree(dir).map_err(failed("remove", dir)));
        }
        first
    }
}

/// Creates a directory with exactly this mode. Returns false if it exists.
fn create_dir(path: &Path, mode: u32) -> Result<bool, VolumeError> {
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt};

    if let Some(parent) = path.parent() {
        // Other users of the node cannot enter the parent directory.
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(parent)
            .map_err(failed("create", parent))?;
    }
    match std::fs::create_dir(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {
            return Ok(false);
        }
        Err(error) => return Err(failed("create", path)(error)),
    }
    // Overrides the umask.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
        .map_err(failed("set the mode of", path))?;
    Ok(true)
}

/// Checks a directory of the host, and applies the fsGroup by the policy of the volume. Returns its canonical path.
fn prepare_directory(
    path: &Path,
    ownership: FsGroupPolicy,
    fs_group: Option<i64>,
) -> Result<PathBuf, VolumeError> {
    if !path.exists() {
        return Err(VolumeError::Missing(path.to_owned()));
    }
    host_path::check(path, HostPathKind::Directory)?;
    // The volume's path may be a symlink; symlinks within the volume are never followed.
    let path = std::fs::canonicalize(path).map_err(failed("resolve", path))?;
    let skip = match ownership {
        FsGroupPolicy::Keep => true,
        FsGroupPolicy::Always => false,
        FsGroupPolicy::OnRootMismatch => {
            fs_group.is_some_and(|group| ownership::root_matches(&path, group))
        }
    };
    if !skip {
        apply_fs_group(&path, fs_group, false)?;
    }
    Ok(path)
}

fn apply_fs_group(dir: &Path, fs_group: Option<i64>, read_only: bool) -> Result<(), VolumeError> {
    match fs_group {
        Some(group) => ownership::apply(dir, group, read_only),
        None => Ok(()),
    }
}
