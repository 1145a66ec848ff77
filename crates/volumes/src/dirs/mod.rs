//! Sources → directories on the node.
//!
//! ```text
//!   writer.rs      files that change all at once: the `..data` swap
//!   ownership.rs   fsGroup
//!   host_path.rs   what must be at a hostPath
//!   nfs.rs         directories of servers that the node has mounted
//!   usage.rs       how much of the disk a volume takes
//!   tree.rs        owners and permission bits of what a descriptor stands for
//! ```
//!
//! All of this runs as the root of the node's user namespace. Where only one id is mapped, files can't be given to
//! another user or group; then they stay as they are, for the one id is every container's, and owns them.

mod host_path;
mod nfs;
mod ownership;
mod tree;
mod usage;
mod writer;

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use crate::content::ContentError;
use crate::{HostPathKind, Ownership, Source};

pub use usage::of_directory as disk_usage;

/// What everybody may do with an emptyDir: containers run as any user.
const EMPTY_DIR_MODE: u32 = 0o777;

/// A volume that is ready to be mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// What to mount: a directory, or whatever a hostPath is.
    pub path: PathBuf,
    /// No container may write to it, whatever its mount says.
    pub read_only: bool,
}

/// Why a volume can't be had. The words are those that follow `MountVolume.SetUp failed for volume "x" : `.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// The name can't be a directory's.
    #[error("{0:?} can't be the name of a volume")]
    Name(String),
    /// A file of the volume has a path that leads out of it.
    #[error(transparent)]
    Content(#[from] ContentError),
    /// A hostPath isn't what it should be.
    #[error("hostPath type check failed: {path} is not a {expected}{}", what_is_there(.found))]
    HostPath {
        /// Where.
        path: PathBuf,
        /// What should be there.
        expected: &'static str,
        /// What is there, or why that can't be told.
        found: Result<&'static str, io::Error>,
    },
    /// A persistent volume's directory isn't there.
    #[error("path {0:?} does not exist on this node")]
    Missing(PathBuf),
    /// An NFS directory isn't mounted here.
    #[error(
        "nfs {server}:{path} is not mounted on this node, and Coracle can't mount it; if it is mounted under another name, say where in the annotation {} of the PersistentVolume",
        crate::MOUNTED_AT
    )]
    NotMounted {
        /// The server.
        server: String,
        /// The directory there.
        path: String,
    },
    /// A symbolic link is on the way to an NFS directory.
    #[error(
        "nfs {server}:{path} leads through a symbolic link, which may lead out of the export; name the directory that it stands for"
    )]
    NfsLink {
        /// The server.
        server: String,
        /// The directory there.
        path: String,
    },
    /// Below an NFS directory the node has mounted something that is not the server's.
    #[error(
        "nfs {server}:{path} holds {}, where this node has mounted something else; name a directory below that doesn't", .other.display()
    )]
    NfsHoldsOther {
        /// The server.
        server: String,
        /// The directory there.
        path: String,
        /// What is mounted.
        other: PathBuf,
    },
    /// Images are not this crate's.
    #[error("the image {0:?} is not a directory")]
    Image(String),
    /// The kernel refused something.
    #[error("can't {action} {}: {source}", .path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

fn what_is_there(found: &Result<&'static str, io::Error>) -> String {
    match found {
        Ok(kind) => format!(", it's a {kind}"),
        Err(error) => format!(", unable to determine its type: {error}"),
    }
}

/// Makes an [`io::Error`] tell what was tried on what.
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
pub struct Volumes {
    disk_dir: PathBuf,
    memory_dir: PathBuf,
}

impl Volumes {
    /// `disk_dir` is on the node's disk, `memory_dir` on a tmpfs that only the node's mount namespace has; both are this
    /// pod's alone, and are made when first needed.
    pub fn new(disk_dir: impl Into<PathBuf>, memory_dir: impl Into<PathBuf>) -> Self {
        Self {
            disk_dir: disk_dir.into(),
            memory_dir: memory_dir.into(),
        }
    }

    /// Makes a volume ready. What an earlier call has made is kept: emptyDirs keep their content, files are brought up to
    /// date all at once.
    pub fn prepare(
        &self,
        name: &str,
        source: &Source,
        fs_group: Option<i64>,
    ) -> Result<Prepared, VolumeError> {
        if name.is_empty() || name.starts_with('.') || name.contains(['/', '\0']) {
            return Err(VolumeError::Name(name.to_owned()));
        }
        match source {
            Source::EmptyDir { memory: false, .. } => {
                let path = self.disk_dir.join(name);
                if make_dir(&path, EMPTY_DIR_MODE)? {
                    apply(&path, fs_group, false)?;
                }
                Ok(Prepared {
                    path,
                    read_only: false,
                })
            }
            Source::EmptyDir {
                memory: true,
                size_limit,
            } => {
                let path = self.memory_dir.join(name);
                make_dir(&path, EMPTY_DIR_MODE)?;
                let mounted = linux::tmpfs::is_mount_point(&path);
                if !mounted.map_err(failed("look at", &path))? {
                    let size = size_limit.filter(|&bytes| bytes > 0);
                    linux::tmpfs::mount(&path, size, 0o1777)
                        .map_err(failed("mount memory on", &path))?;
                    apply(&path, fs_group, false)?;
                }
                Ok(Prepared {
                    path,
                    read_only: false,
                })
            }
            Source::Files(payload) => {
                // Never on disk: it may be a secret.
                let path = self.memory_dir.join(name);
                make_dir(&path, EMPTY_DIR_MODE)?;
                writer::write(&path, payload, |dir| apply(dir, fs_group, true))?;
                Ok(Prepared {
                    path,
                    read_only: true,
                })
            }
            Source::HostPath {
                path,
                kind,
                read_only,
            } => {
                host_path::check(path, *kind)?;
                Ok(Prepared {
                    path: path.clone(),
                    read_only: *read_only,
                })
            }
            Source::Nfs {
                server,
                path,
                mounted_at,
                read_only,
            } => {
                let path = match mounted_at {
                    Some(place) => {
                        let place = nfs::told(place)?;
                        host_path::check(&place, HostPathKind::Directory)?;
                        place
                    }
                    None => self.show(name, || nfs::open(server, path))?,
                };
                Ok(Prepared {
                    path,
                    read_only: *read_only,
                })
            }
            Source::Directory {
                path,
                read_only,
                ownership,
                create,
            } => {
                if *create {
                    make_dir(path, EMPTY_DIR_MODE)?;
                }
                if !path.exists() {
                    return Err(VolumeError::Missing(path.clone()));
                }
                host_path::check(path, HostPathKind::Directory)?;
                // A link to a volume is as good as the volume; those within it are never followed.
                let path = std::fs::canonicalize(path).map_err(failed("look at", path))?;
                let skip = match ownership {
                    Ownership::Keep => true,
                    Ownership::Always => false,
                    Ownership::OnRootMismatch => {
                        fs_group.is_some_and(|group| ownership::root_matches(&path, group))
                    }
                };
                if !skip && !read_only {
                    apply(&path, fs_group, false)?;
                }
                Ok(Prepared {
                    path,
                    read_only: *read_only,
                })
            }
            Source::Image { reference, .. } => Err(VolumeError::Image(reference.clone())),
        }
    }

    /// Mounts a directory that was found, and may not be found by its path again, on one of ours.
    fn show(
        &self,
        name: &str,
        find: impl FnOnce() -> Result<OwnedFd, VolumeError>,
    ) -> Result<PathBuf, VolumeError> {
        let place = self.memory_dir.join(name);
        make_dir(&place, 0o700)?;
        if !linux::tmpfs::is_mount_point(&place).map_err(failed("look at", &place))? {
            let found = find()?;
            linux::tree::Tree::copy_open(&found, true)
                .and_then(|tree| tree.put(&place))
                .map_err(failed("mount a directory on", &place))?;
        }
        Ok(place)
    }

    /// Brings a volume that was prepared up to date. Only files change; every other source stays what it was.
    pub fn update(
        &self,
        name: &str,
        source: &Source,
        fs_group: Option<i64>,
    ) -> Result<(), VolumeError> {
        match source {
            Source::Files(_) => self.prepare(name, source, fs_group).map(|_| ()),
            _ => Ok(()),
        }
    }

    /// How many bytes of the disk, or of memory, an emptyDir takes now; 0 for any other source.
    pub fn usage(&self, name: &str) -> u64 {
        let on_disk = self.disk_dir.join(name);
        if on_disk.is_dir() {
            return usage::of_directory(&on_disk);
        }
        let in_memory = self.memory_dir.join(name);
        match linux::tmpfs::is_mount_point(&in_memory) {
            Ok(true) => usage::of_file_system(&in_memory),
            _ => 0,
        }
    }

    /// Removes everything that was made here; what belongs to the node or to a persistent volume stays.
    ///
    /// Goes on after an error, so that as little as possible is left, and reports the first.
    pub fn remove_all(&self) -> Result<(), VolumeError> {
        let mut first = Ok(());
        let mut note = |result: Result<(), VolumeError>| {
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
            // Somebody may have mounted more on top; each goes.
            while let Ok(true) = linux::tmpfs::is_mount_point(&path) {
                if let Err(error) = linux::tmpfs::unmount(&path) {
                    note(Err(failed("unmount", &path)(error)));
                    break;
                }
            }
        }
        for dir in [&self.memory_dir, &self.disk_dir] {
            note(linux::remove::tree(dir).map_err(failed("remove", dir)));
        }
        first
    }
}

/// Makes a directory with these very permission bits, and says whether it is new.
fn make_dir(path: &Path, mode: u32) -> Result<bool, VolumeError> {
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt};

    if let Some(parent) = path.parent() {
        // Nobody but the owner finds their way to the volumes from outside.
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(parent)
            .map_err(failed("make", parent))?;
    }
    match std::fs::create_dir(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {
            return Ok(false);
        }
        Err(error) => return Err(failed("make", path)(error)),
    }
    // Whatever the umask is.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
        .map_err(failed("set the mode of", path))?;
    Ok(true)
}

fn apply(dir: &Path, fs_group: Option<i64>, read_only: bool) -> Result<(), VolumeError> {
    match fs_group {
        Some(group) => ownership::apply(dir, group, read_only),
        None => Ok(()),
    }
}
