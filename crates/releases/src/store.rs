//! The root that releases are installed into, and how they get there in one step.
//!
//! ```text
//! ROOT/v1.37.1/            a release; appears by one rename, complete or not at all
//! ROOT/.new-XXXXXX/        a release being put together
//! ROOT/.partial/KEY/       what `fetch` has downloaded so far (0700), kept to resume
//! ROOT/.partial/KEY.lock   held by the `fetch` that writes there
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
use crate::version::Version;
use console::say;

/// Leftovers of a killed `fetch` or `import` that are older than this are removed by the next one.
const STALE: Duration = Duration::from_secs(24 * 3600);

/// A directory of releases can't be written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file system or the quota is full.
    #[error("there is no room left in {}{}", .dir.display(), and_needed(.needed))]
    NoRoom {
        /// Where.
        dir: PathBuf,
        /// How many more bytes have to be written there, if known.
        needed: Option<u64>,
        /// What the system said.
        source: io::Error,
    },
    /// No permission, or a read-only file system.
    #[error("{} can't be written", .dir.display())]
    NotWritable {
        /// Where.
        dir: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Neither XDG_DATA_HOME nor HOME is set.
    #[error(
        "there is no place to install to: neither XDG_DATA_HOME nor HOME is set to an absolute path"
    )]
    NoPlace,
    /// Anything else.
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

fn and_needed(bytes: &Option<u64>) -> String {
    bytes.map_or_else(String::new, |bytes| {
        format!(", and {} more must be written", HumanBytes(bytes))
    })
}

impl StoreError {
    /// Sorts an error of the system: `path` is what was being written, `needed` how much is missing.
    pub fn writing(
        doing: &'static str,
        path: &Path,
        needed: Option<u64>,
        source: io::Error,
    ) -> StoreError {
        Self::sort(doing, path, path.parent().unwrap_or(path), needed, source)
    }

    /// The same where `dir` itself, or something new in it, was to be made.
    fn making(dir: &Path, source: io::Error) -> StoreError {
        Self::sort("make the directory", dir, dir, None, source)
    }

    fn sort(
        doing: &'static str,
        path: &Path,
        dir: &Path,
        needed: Option<u64>,
        source: io::Error,
    ) -> StoreError {
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
                doing,
                path,
                source,
            },
        }
    }

    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::NoRoom { dir, .. } => Some(format!(
                "make room (`df -h {0}` and `quota -s` show what is used) and run the same command again, or install \
                 elsewhere with `--into DIR`, for which `coracle` then needs `--kubernetes DIR`",
                dir.display()
            )),
            Self::NotWritable { .. } | Self::NoPlace => Some(
                "install elsewhere with `--into DIR`; `coracle` then finds it with `--kubernetes DIR` or \
                 CORACLE_KUBERNETES=DIR"
                    .to_owned(),
            ),
            Self::Io { .. } => None,
        }
    }
}

/// A root that can be installed into.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
}

/// A release being put together. Dropped unpublished, it leaves nothing.
#[derive(Debug)]
pub struct Staging {
    dir: TempDir,
}

/// The right to write the partial downloads of one release.
#[derive(Debug)]
pub struct Claim {
    dir: PathBuf,
    _lock: Option<File>,
    /// Where the file system has no locks, a directory that nobody else knows.
    unshared: Option<TempDir>,
}

impl Store {
    /// Opens `into`, or the user's own root, and makes it if need be.
    pub fn open(into: Option<&Path>) -> Result<Store, StoreError> {
        let root = match into {
            Some(into) => std::path::absolute(into).map_err(|source| StoreError::Io {
                doing: "find",
                path: into.to_path_buf(),
                source,
            })?,
            None => release::user_root().ok_or(StoreError::NoPlace)?,
        };
        fs::create_dir_all(&root).map_err(|e| StoreError::making(&root, e))?;
        let store = Store { root };
        store.sweep();
        Ok(store)
    }

    /// The release of this version, if it is installed completely.
    pub fn installed(&self, version: &Version) -> Option<Release> {
        let release = self.release(version);
        release::missing(&release.dir).is_empty().then_some(release)
    }

    /// An empty directory to put a release together in.
    pub fn staging(&self) -> Result<Staging, StoreError> {
        let dir = tempfile::Builder::new()
            .prefix(".new-")
            .tempdir_in(&self.root);
        let dir = dir.map_err(|e| StoreError::making(&self.root, e))?;
        Ok(Staging { dir })
    }

    /// Puts what was staged in its place. A release that is there already is replaced; programs that
    /// run from it keep running.
    pub fn publish(
        &self,
        staging: Staging,
        version: &Version,
        about: &str,
    ) -> Result<Release, StoreError> {
        let release = self.release(version);
        let staged = staging.path();
        let failed = |doing, path: &Path| {
            let path = path.to_path_buf();
            move |e| StoreError::writing(doing, &path, None, e)
        };
        fs::write(staged.join("VERSION"), about)
            .map_err(failed("write", &staged.join("VERSION")))?;
        for entry in fs::read_dir(staged).map_err(failed("read", staged))? {
            let path = entry.map_err(failed("read", staged))?.path();
            if path.is_symlink() {
                continue;
            }
            // Before the rename: a crash of the machine must not leave a release of empty files.
            File::open(&path)
                .and_then(|file| file.sync_all())
                .map_err(failed("write", &path))?;
        }
        fs::set_permissions(staged, fs::Permissions::from_mode(0o755))
            .map_err(failed("change", staged))?;
        self.rename(staged, &release.dir)
            .map_err(failed("install", &release.dir))?;
        // After an exchange this is the old release; after a plain rename nothing.
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
        // NFS and others can't exchange: for a moment there is no release of this version.
        let old = tempfile::Builder::new()
            .prefix(".new-")
            .tempdir_in(&self.root)?;
        fs::rename(target, old.path())?;
        fs::rename(staged, target)
    }

    /// Waits until no other process downloads `key`, then returns the directory to do it in.
    pub async fn claim(&self, key: &str) -> Result<Claim, StoreError> {
        let partial = self.root.join(".partial");
        private_dir(&partial)?;
        let path = partial.join(format!("{key}.lock"));
        let lock = File::create(&path).map_err(|e| StoreError::writing("write", &path, None, e))?;
        let mut said = false;
        loop {
            match lock.try_lock() {
                Ok(()) => {
                    let dir = partial.join(key);
                    private_dir(&dir)?;
                    return Ok(Claim {
                        dir,
                        _lock: Some(lock),
                        unshared: None,
                    });
                }
                Err(TryLockError::WouldBlock) => {
                    if !said {
                        say(format_args!(
                            "another coracle is downloading {key} to {}; waiting for it",
                            self.root.display()
                        ));
                        said = true;
                    }
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
                Err(TryLockError::Error(error)) => {
                    say(format_args!(
                        "{} has no locks ({error}): if interrupted, this can't resume",
                        self.root.display()
                    ));
                    let staging = self.staging()?;
                    let dir = staging.path().to_path_buf();
                    return Ok(Claim {
                        dir,
                        _lock: None,
                        unshared: Some(staging.dir),
                    });
                }
            }
        }
    }

    fn release(&self, version: &Version) -> Release {
        Release {
            dir: self.root.join(version.to_string()),
            version: version.to_string(),
        }
    }

    fn sweep(&self) {
        let stale = |entry: &fs::DirEntry| {
            let age = entry
                .metadata()
                .and_then(|m| m.modified())
                .map(|at| SystemTime::now().duration_since(at));
            entry.file_name().to_string_lossy().starts_with(".new-")
                && matches!(age, Ok(Ok(age)) if age > STALE)
        };
        for entry in fs::read_dir(&self.root)
            .into_iter()
            .flatten()
            .flatten()
            .filter(stale)
        {
            // Only room is lost if this fails.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

impl Staging {
    /// Where to put the files.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

impl Claim {
    /// The directory.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Removes the directory: everything in it has been used.
    pub fn done(self) {
        if self.unshared.is_none() {
            // The lock file stays: removing it would let two others lock different files.
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

/// Makes a directory that nobody else may enter.
fn private_dir(dir: &Path) -> Result<(), StoreError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .and_then(|()| fs::set_permissions(dir, fs::Permissions::from_mode(0o700)))
        .map_err(|e| StoreError::making(dir, e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::release::Component;

    fn stage(store: &Store, content: &str) -> Staging {
        let staging = store.staging().unwrap();
        for component in Component::ALL {
            let path = staging.path().join(component.name());
            fs::write(&path, content).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        staging
    }

    #[test]
    fn published_in_one_step_and_replaced_without_a_trace() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(Some(&dir.path().join("a/root"))).unwrap();
        let version = "v1.37.1".parse().unwrap();
        assert_eq!(store.installed(&version), None);
        for content in ["old", "new"] {
            let release = store
                .publish(stage(&store, content), &version, "kubernetes v1.37.1\n")
                .unwrap();
            assert_eq!(store.installed(&version), Some(release.clone()));
            assert_eq!(
                fs::read_to_string(release.component(Component::Etcd)).unwrap(),
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
    fn an_incomplete_release_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(Some(dir.path())).unwrap();
        let version = "v1.37.1".parse().unwrap();
        fs::create_dir(dir.path().join("v1.37.1")).unwrap();
        fs::write(dir.path().join("v1.37.1/etcd"), "half").unwrap();
        store.publish(stage(&store, "new"), &version, "").unwrap();
        assert!(store.installed(&version).is_some());
    }

    #[test]
    fn a_second_claim_waits_for_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(Some(dir.path())).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let first = store.claim("v1.37.1-amd64").await.unwrap();
            assert_eq!(
                fs::metadata(first.path()).unwrap().permissions().mode() & 0o777,
                0o700
            );
            let second =
                tokio::time::timeout(Duration::from_millis(300), store.claim("v1.37.1-amd64"));
            assert!(second.await.is_err());
            store.claim("v1.38.0-amd64").await.unwrap();
            first.done();
            assert!(store.claim("v1.37.1-amd64").await.unwrap().path().is_dir());
        });
    }

    #[test]
    fn errors_of_the_system_are_told_apart() {
        let sort = |errno: rustix::io::Errno| {
            StoreError::writing(
                "write",
                Path::new("/data/file"),
                Some(3 << 20),
                io::Error::from(errno),
            )
        };
        for full in [rustix::io::Errno::NOSPC, rustix::io::Errno::DQUOT] {
            let error = sort(full);
            assert_eq!(
                error.to_string(),
                "there is no room left in /data, and 3.00 MiB more must be written"
            );
            assert!(error.hint().unwrap().contains("--into DIR"));
        }
        assert_eq!(
            sort(rustix::io::Errno::ROFS).to_string(),
            "/data can't be written"
        );
        assert_eq!(
            sort(rustix::io::Errno::ACCESS).to_string(),
            "/data can't be written"
        );
        assert_eq!(
            sort(rustix::io::Errno::IO).to_string(),
            "can't write /data/file"
        );
    }
}
