//! The root that releases are installed into. A release appears there by one atomic rename.
//!
//! ```text
//! ROOT/v1.37.1/            a release; renamed into place when it is complete
//! ROOT/.new-XXXXXX/        a release that is being assembled
//! ROOT/.partial/KEY/       partial downloads of `fetch` (0700), kept to resume them
//! ROOT/.partial/KEY.lock   held by the `fetch` that writes to KEY
//! ```

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use indicatif::HumanBytes;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use tempfile::TempDir;

use crate::release::{self, Release};
use crate::version::ReleaseVersion;
use console::print_stderr;

/// Age at which leftovers of a killed `fetch` or `import` are removed.
const STALE_AFTER: Duration = Duration::from_secs(24 * 3600);

/// A root cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum ReleaseStoreError {
    /// The file system or the quota is full.
    #[error("no space is left in {}{}", .dir.display(), and_needed(.needed))]
    NoRoom {
        /// The directory.
        dir: PathBuf,
        /// The number of bytes still to be written, if known.
        needed: Option<u64>,
        /// The cause.
        source: io::Error,
    },
    /// No permission, or a read-only file system.
    #[error("{} cannot be written", .dir.display())]
    NotWritable {
        /// The directory.
        dir: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Neither XDG_DATA_HOME nor HOME is set.
    #[error(
        "no directory to install to: neither XDG_DATA_HOME nor HOME is set to an absolute path"
    )]
    NoRoot,
    /// Another I/O error.
    #[error("cannot {operation} {}", .path.display())]
    Io {
        /// The failed operation, as a verb.
        operation: &'static str,
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

fn and_needed(bytes: &Option<u64>) -> String {
    bytes.map_or_else(String::new, |bytes| {
        format!(", and {} more must be written", HumanBytes(bytes))
    })
}

impl ReleaseStoreError {
    /// Classifies an I/O error of writing `path`, with `needed` bytes still to come.
    pub fn writing(
        operation: &'static str,
        path: &Path,
        needed: Option<u64>,
        source: io::Error,
    ) -> ReleaseStoreError {
        Self::classify(
            operation,
            path,
            path.parent().unwrap_or(path),
            needed,
            source,
        )
    }

    /// Classifies an I/O error of creating `dir` or an entry in it.
    fn creating(dir: &Path, source: io::Error) -> ReleaseStoreError {
        Self::classify("make the directory", dir, dir, None, source)
    }

    fn classify(
        operation: &'static str,
        path: &Path,
        dir: &Path,
        needed: Option<u64>,
        source: io::Error,
    ) -> ReleaseStoreError {
        let (path, dir) = (path.to_path_buf(), dir.to_path_buf());
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::NoRoom {
                dir,
                needed,
                source,
            },
            io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
                Self::NotWritable { dir, source }
            }
            _ => Self::Io {
                operation,
                path,
                source,
            },
        }
    }

    /// A hint for the user.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::NoRoom { dir, .. } => Some(format!(
                "make room (`df -h {0}` and `quota -s` show what is used) and run the same command again, or install \
                 elsewhere with `--into DIR`, for which `coracle` then needs `--kubernetes DIR`",
                dir.display()
            )),
            Self::NotWritable { .. } | Self::NoRoot => Some(
                "install elsewhere with `--into DIR`; `coracle` then finds it with `--kubernetes DIR` or \
                 CORACLE_KUBERNETES=DIR"
                    .to_owned(),
            ),
            Self::Io { .. } => None,
        }
    }
}

/// A writable root.
#[derive(Debug)]
pub struct ReleaseStore {
    root: PathBuf,
}

/// A release that is being assembled. Dropping it removes it, unless it was published.
#[derive(Debug)]
pub struct StagedRelease {
    dir: TempDir,
}

/// The lock on the partial downloads of a release.
#[derive(Debug)]
pub struct DownloadLock {
    dir: PathBuf,
    _lock: Option<File>,
    /// A new directory instead of a locked one, if the file system has no locks.
    unlocked_dir: Option<TempDir>,
}

impl ReleaseStore {
    /// Opens `into`, or else the user's own root. Creates it if it is missing.
    pub fn open(into: Option<&Path>) -> Result<ReleaseStore, ReleaseStoreError> {
        let root = match into {
            Some(into) => std::path::absolute(into).map_err(|source| ReleaseStoreError::Io {
                operation: "resolve",
                path: into.to_path_buf(),
                source,
            })?,
            None => release::user_root().ok_or(ReleaseStoreError::NoRoot)?,
        };
        fs::create_dir_all(&root).map_err(|e| ReleaseStoreError::creating(&root, e))?;
        let store = ReleaseStore { root };
        store.remove_stale();
        Ok(store)
    }

    /// The release of this version, if it is complete.
    pub fn installed(&self, version: &ReleaseVersion) -> Option<Release> {
        let release = self.release(version);
        release::missing_components(&release.dir)
            .is_empty()
            .then_some(release)
    }

    /// Creates an empty directory to assemble a release in.
    pub fn staging(&self) -> Result<StagedRelease, ReleaseStoreError> {
        let dir = tempfile::Builder::new()
            .prefix(".new-")
            .tempdir_in(&self.root);
        let dir = dir.map_err(|e| ReleaseStoreError::creating(&self.root, e))?;
        Ok(StagedRelease { dir })
    }

    /// Renames an assembled release into place. It replaces an existing one; programs that run from that keep running.
    pub fn publish(
        &self,
        staging: StagedRelease,
        version: &ReleaseVersion,
        about: &str,
    ) -> Result<Release, ReleaseStoreError> {
        let release = self.release(version);
        let staged = staging.path();
        let failed = |operation, path: &Path| {
            let path = path.to_path_buf();
            move |e| ReleaseStoreError::writing(operation, &path, None, e)
        };
        fs::write(staged.join("VERSION"), about)
            .map_err(failed("write", &staged.join("VERSION")))?;
        for entry in fs::read_dir(staged).map_err(failed("read", staged))? {
            let path = entry.map_err(failed("read", staged))?.path();
            if path.is_symlink() {
                continue;
            }
            // Before the rename, so that a crash of the host cannot leave a release of empty files.
            File::open(&path)
                .and_then(|file| file.sync_all())
                .map_err(failed("write", &path))?;
        }
        fs::set_permissions(staged, fs::Permissions::from_mode(0o755))
            .map_err(failed("change", staged))?;
        self.rename(staged, &release.dir)
            .map_err(failed("install", &release.dir))?;
        // After an exchange, this removes the old release.
        drop(staging);
        Ok(release)
    }

    fn rename(&self, staged: &Path, target: &Path) -> io::Result<()> {
        match fs::rename(staged, target) {
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists
                ) => {}
            result => return result,
        }
        if renameat_with(CWD, staged, CWD, target, RenameFlags::EXCHANGE).is_ok() {
            return Ok(());
        }
        // NFS and others do not support RENAME_EXCHANGE. For a moment there is no release of this version.
        let old = tempfile::Builder::new()
            .prefix(".new-")
            .tempdir_in(&self.root)?;
        fs::rename(target, old.path())?;
        fs::rename(staged, target)
    }

    /// Waits until no other process downloads `key`, then returns the locked directory.
    pub async fn lock_downloads(&self, key: &str) -> Result<DownloadLock, ReleaseStoreError> {
        let partial = self.root.join(".partial");
        private_dir(&partial)?;
        let path = partial.join(format!("{key}.lock"));
        let lock =
            File::create(&path).map_err(|e| ReleaseStoreError::writing("write", &path, None, e))?;
        let mut is_announced = false;
        loop {
            match lock.try_lock() {
                Ok(()) => {
                    let dir = partial.join(key);
                    private_dir(&dir)?;
                    return Ok(DownloadLock {
                        dir,
                        _lock: Some(lock),
                        unlocked_dir: None,
                    });
                }
                Err(TryLockError::WouldBlock) => {
                    if !is_announced {
                        print_stderr(format_args!(
                            "another coracle is downloading {key} to {}; waiting for it",
                            self.root.display()
                        ));
                        is_announced = true;
                    }
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
                Err(TryLockError::Error(error)) => {
                    print_stderr(format_args!(
                        "the file system of {} has no locks ({error}): an interrupted download cannot be resumed",
                        self.root.display()
                    ));
                    let staging = self.staging()?;
                    let dir = staging.path().to_path_buf();
                    return Ok(DownloadLock {
                        dir,
                        _lock: None,
                        unlocked_dir: Some(staging.dir),
                    });
                }
            }
        }
    }

    fn release(&self, version: &ReleaseVersion) -> Release {
        Release {
            dir: self.root.join(version.to_string()),
            version: version.to_string(),
        }
    }

    fn remove_stale(&self) {
        let stale = |entry: &fs::DirEntry| {
            let age = entry
                .metadata()
                .and_then(|m| m.modified())
                .map(|at| SystemTime::now().duration_since(at));
            entry.file_name().to_string_lossy().starts_with(".new-")
                && matches!(age, Ok(Ok(age)) if age > STALE_AFTER)
        };
        for entry in fs::read_dir(&self.root)
            .into_iter()
            .flatten()
            .flatten()
            .filter(stale)
        {
            // A failure only wastes space.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

impl StagedRelease {
    /// The directory to assemble the release in.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

impl DownloadLock {
    /// The directory for the downloads.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Removes the directory, whose files are no longer needed.
    pub fn remove_dir(self) {
        if self.unlocked_dir.is_none() {
            // Keep the lock file: after its removal, two processes could lock different files.
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

/// Creates a directory with mode 0700.
fn private_dir(dir: &Path) -> Result<(), ReleaseStoreError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .and_then(|()| fs::set_permissions(dir, fs::Permissions::from_mode(0o700)))
        .map_err(|e| ReleaseStoreError::creating(dir, e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::release::ReleaseComponent;

    fn stage(store: &ReleaseStore, content: &str) -> StagedRelease {
        let staging = store.staging().unwrap();
        for component in ReleaseComponent::ALL {
            let path = staging.path().join(component.name());
            fs::write(&path, content).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        staging
    }

    #[test]
    fn release_is_replaced_atomically() {
        let dir = tempfile::tempdir().unwrap();
        let store = ReleaseStore::open(Some(&dir.path().join("a/root"))).unwrap();
        let version = "v1.37.1".parse().unwrap();
        assert_eq!(store.installed(&version), None);
        for content in ["old", "new"] {
            let release = store
                .publish(stage(&store, content), &version, "kubernetes v1.37.1\n")
                .unwrap();
            assert_eq!(store.installed(&version), Some(release.clone()));
            assert_eq!(
                fs::read_to_string(release.component(ReleaseComponent::Etcd)).unwrap(),
                content
            );
            assert_eq!(
                fs::metadata(&release.dir).unwrap().permissions().mode() & 0o777,
                0o755
            );
        }
        let left: Vec<_> = fs::read_dir(dir.path().join("a/root"))
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        assert_eq!(left, ["v1.37.1"]);
    }

    #[test]
    fn incomplete_release_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let store = ReleaseStore::open(Some(dir.path())).unwrap();
        let version = "v1.37.1".parse().unwrap();
        fs::create_dir(dir.path().join("v1.37.1")).unwrap();
        fs::write(dir.path().join("v1.37.1/etcd"), "half").unwrap();
        store.publish(stage(&store, "new"), &version, "").unwrap();
        assert!(store.installed(&version).is_some());
    }

    #[test]
    fn second_lock_waits_for_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let store = ReleaseStore::open(Some(dir.path())).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let first = store.lock_downloads("v1.37.1-amd64").await.unwrap();
            assert_eq!(
                fs::metadata(first.dir()).unwrap().permissions().mode() & 0o777,
                0o700
            );
            let second = tokio::time::timeout(
                Duration::from_millis(300),
                store.lock_downloads("v1.37.1-amd64"),
            );
            assert!(second.await.is_err());
            store.lock_downloads("v1.38.0-amd64").await.unwrap();
            first.remove_dir();
            assert!(
                store
                    .lock_downloads("v1.37.1-amd64")
                    .await
                    .unwrap()
                    .dir()
                    .is_dir()
            );
        });
    }

    #[test]
    fn io_errors_are_classified() {
        let classified = |errno: rustix::io::Errno| {
            ReleaseStoreError::writing(
                "write",
                Path::new("/data/file"),
                Some(3 << 20),
                io::Error::from(errno),
            )
        };
        for full in [rustix::io::Errno::NOSPC, rustix::io::Errno::DQUOT] {
            let error = classified(full);
            assert_eq!(
                error.to_string(),
                "no space is left in /data, and 3.00 MiB more must be written"
            );
            assert!(error.hint().unwrap().contains("--into DIR"));
        }
        assert_eq!(
            classified(rustix::io::Errno::ROFS).to_string(),
            "/data cannot be written"
        );
        assert_eq!(
            classified(rustix::io::Errno::ACCESS).to_string(),
            "/data cannot be written"
        );
        assert_eq!(
            classified(rustix::io::Errno::IO).to_string(),
            "cannot write /data/file"
        );
    }
}
