//! Seeds: prepared stores that new clusters start from (see `control_plane::seed`).
//!
//! A seed belongs to a release and a service range. It lies beside the release if that directory is writable
//! (as when the release was imported), and in the user's cache otherwise. If neither is writable, clusters start from an
//! empty store, some two seconds slower. A damaged seed is made again; a seed that other users can write to is not
//! used ([`trust`]).

mod digest;
mod trust;

use std::error::Error;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use console::Phases;

use crate::{Release, ReleaseComponent};
use trust::TrustedUids;

/// Increased when the way of making seeds changes.
const FORMAT: u32 = 2;
/// The files of a seed: the etcd data directory, and its digest.
const STORE: &str = "store";
const DIGEST: &str = "digest";
/// Prefix of an incomplete seed's name.
const STAGING_PREFIX: &str = ".new-";
/// Incomplete seeds that are older than this belong to killed processes: making one takes five seconds.
const STALE_AFTER: Duration = Duration::from_secs(600);

/// A seed could not be made.
#[derive(Debug, thiserror::Error)]
pub enum SeedError {
    /// There is no directory for seeds.
    #[error("neither the release's directory nor a cache directory can hold it")]
    NoDirectory,
    /// The directory for seeds, or the seed in it, cannot be written or trusted.
    #[error("cannot write to {}: {source}", .dir.display())]
    Directory {
        /// The directory.
        dir: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The control plane did not make one.
    #[error("{0}")]
    Boot(Box<dyn Error + Send + Sync>),
}

/// The store for clusters of `release` to start from; `boot` makes it, as a new directory, if it is missing.
/// `None` if it cannot be made; the user then sees a warning.
///
/// With `prefer_cache` a new seed goes to the user's cache: the release's directory is about to be removed.
pub async fn ensure(
    release: &Release,
    service_cidr: &str,
    prefer_cache: bool,
    phases: &mut Phases,
    boot: impl AsyncFnOnce(&Path) -> Result<(), Box<dyn Error + Send + Sync>>,
) -> Option<PathBuf> {
    let mut candidates = candidates(release, service_cidr, prefer_cache);
    let trusted = TrustedUids::for_release(&release.dir);
    for parent in candidates.iter().filter_map(|seed| seed.parent()) {
        trust::remove_write_of_others(parent);
    }
    for seed in candidates.iter().filter(|seed| seed.is_dir()) {
        let problem = match trusted.check(seed) {
            Err(error) => format!("not used: {error}"),
            Ok(()) if is_intact(seed) => return Some(seed.join(STORE)),
            Ok(()) => "damaged".to_owned(),
        };
        let removed = is_own(seed) && std::fs::remove_dir_all(seed).is_ok();
        phases.print(&format!(
            "warning: the prepared store {} is {problem}{}",
            seed.display(),
            if removed { "; it is made again" } else { "" }
        ));
    }
    candidates.retain(|seed| !seed.exists());
    phases.begin("prepared the store of new clusters, once for this release");
    let made = make(&candidates, trusted, boot).await;
    // Another user may have published a seed in the meantime.
    let checked = made.and_then(|seed| match trusted.check(&seed) {
        Ok(()) => Ok(seed),
        Err(source) => Err(SeedError::Directory { dir: seed, source }),
    });
    match checked {
        Ok(seed) => Some(seed.join(STORE)),
        Err(error) => {
            phases.cancel();
            phases.print(&format!(
                "warning: cannot keep a prepared store, so every cluster starts slower: {error}"
            ));
            None
        }
    }
}

/// The seed for clusters of `release`, if there is one.
pub fn find(release: &Release, service_cidr: &str) -> Option<PathBuf> {
    let trusted = TrustedUids::for_release(&release.dir);
    let mut candidates = candidates(release, service_cidr, false).into_iter();
    candidates.find(|seed| trusted.check(seed).is_ok() && is_intact(seed))
}

fn is_own(dir: &Path) -> bool {
    let own_uid = rustix::process::geteuid().as_raw();
    dir.symlink_metadata()
        .is_ok_and(|metadata| metadata.uid() == own_uid)
}

fn is_intact(seed: &Path) -> bool {
    let expected = std::fs::read_to_string(seed.join(DIGEST));
    let actual = digest::of_tree(&seed.join(STORE));
    matches!((expected, actual), (Ok(expected), Ok(actual)) if expected == actual)
}

/// Paths where a seed may be, in order of preference.
fn candidates(release: &Release, service_cidr: &str, prefer_cache: bool) -> Vec<PathBuf> {
    let name = name(release, service_cidr);
    // Absolute, because the control plane, which writes it, has another working directory.
    let dir = std::path::absolute(&release.dir).unwrap_or_else(|_| release.dir.clone());
    let beside = dir.join("seeds").join(&name);
    let cache = cache_dir().map(|cache| cache.join("coracle/seeds").join(&name));
    let mut candidates: Vec<PathBuf> = std::iter::once(beside).chain(cache).collect();
    if prefer_cache {
        candidates.reverse();
    }
    candidates
}

/// The name of a seed: version and size of the API server that wrote it, and the service range.
fn name(release: &Release, service_cidr: &str) -> String {
    let program = release.component(ReleaseComponent::ApiServer);
    let size = program.metadata().map_or(0, |meta| meta.len());
    let cidr = service_cidr.replace('/', "-");
    format!("{}-{size}-{cidr}-{FORMAT}", release.version)
}

fn cache_dir() -> Option<PathBuf> {
    let given = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    given
        .filter(|dir| dir.is_absolute())
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))
}

/// Makes a seed at the first of `candidates` whose parent directory can be written.
async fn make(
    candidates: &[PathBuf],
    trusted: TrustedUids,
    boot: impl AsyncFnOnce(&Path) -> Result<(), Box<dyn Error + Send + Sync>>,
) -> Result<PathBuf, SeedError> {
    let mut problem = SeedError::NoDirectory;
    for seed in candidates {
        let Some(parent) = seed.parent() else {
            continue;
        };
        match stage(parent, trusted) {
            Ok(staging) => {
                let booted = boot(&staging.path().join(STORE)).await;
                let published = booted.map_err(SeedError::Boot).and_then(|()| {
                    publish(staging.path(), seed).map_err(|source| SeedError::Directory {
                        dir: seed.clone(),
                        source,
                    })
                });
                drop(staging);
                // Removes the directory only if it is empty.
                let _ = std::fs::remove_dir(parent);
                return published.map(|()| seed.clone());
            }
            Err(source) => {
                let dir = parent.to_owned();
                problem = SeedError::Directory { dir, source };
            }
        }
    }
    Err(problem)
}

/// A new directory below `parent`, after removing the leftovers of killed processes.
fn stage(parent: &Path, trusted: TrustedUids) -> io::Result<tempfile::TempDir> {
    remove_stale(parent);
    std::fs::create_dir_all(parent)?;
    trust::remove_write_of_others(parent);
    trusted.check_parent(parent)?;
    tempfile::Builder::new()
        .prefix(STAGING_PREFIX)
        .tempdir_in(parent)
}

fn remove_stale(dir: &Path) {
    let is_stale = |path: &Path| {
        let age = path.metadata().and_then(|meta| meta.modified()).ok();
        age.and_then(|time| time.elapsed().ok())
            .is_some_and(|age| age > STALE_AFTER)
    };
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let unfinished = entry
            .file_name()
            .to_string_lossy()
            .starts_with(STAGING_PREFIX);
        if unfinished && is_stale(&entry.path()) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Renames the seed into place, readable by all users: it holds no secret.
fn publish(staged: &Path, seed: &Path) -> io::Result<()> {
    std::fs::write(staged.join(DIGEST), digest::of_tree(&staged.join(STORE))?)?;
    make_world_readable(staged)?;
    match std::fs::rename(staged, seed) {
        // Another process has published the same seed.
        Err(_) if seed.is_dir() => Ok(()),
        other => other,
    }
}

fn make_world_readable(path: &Path) -> std::io::Result<()> {
    let mode = if path.is_dir() { 0o755 } else { 0o644 };
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    if path.is_dir() {
        for entry in std::fs::read_dir(path)? {
            make_world_readable(&entry?.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::chown;

    const CIDR: &str = "100.96.0.0/16";
    const OTHER_UID: u32 = 2002;

    /// A release with a seed beside it.
    fn release_with_seed(dir: &Path) -> (Release, PathBuf) {
        let release = Release {
            dir: dir.to_owned(),
            version: "v1".into(),
        };
        let seed = dir.join("seeds").join(name(&release, CIDR));
        std::fs::create_dir_all(seed.join("store/member")).unwrap();
        std::fs::write(seed.join("store/member/db"), "data").unwrap();
        std::fs::write(
            seed.join(DIGEST),
            digest::of_tree(&seed.join(STORE)).unwrap(),
        )
        .unwrap();
        make_world_readable(&seed).unwrap();
        (release, seed)
    }

    fn mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn seeds_that_others_can_write_are_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let (release, seed) = release_with_seed(dir.path());
        let found = || find(&release, CIDR);
        let parent = seed.parent().unwrap();
        mode(parent, 0o755);
        assert_eq!(found().as_ref(), Some(&seed));
        for (path, open, closed) in [
            (seed.join("store/member/db"), 0o664, 0o644),
            (seed.join(DIGEST), 0o646, 0o644),
            (seed.join("store/member"), 0o775, 0o755),
            (seed.clone(), 0o777, 0o755),
            (parent.to_owned(), 0o777, 0o755),
        ] {
            mode(&path, open);
            assert_eq!(found(), None, "{}", path.display());
            mode(&path, closed);
            assert_eq!(found().as_ref(), Some(&seed), "{}", path.display());
        }
        // Sticky: other users cannot rename entries.
        mode(parent, 0o1777);
        assert_eq!(found().as_ref(), Some(&seed));
        mode(parent, 0o775);
        trust::remove_write_of_others(parent);
        assert_eq!(found().as_ref(), Some(&seed));

        let link = seed.join("store/link");
        std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
        assert_eq!(found(), None, "a link");
        std::fs::remove_file(&link).unwrap();
        if !rustix::process::geteuid().is_root() {
            return;
        }
        for path in [seed.join("store/member/db"), seed.clone()] {
            chown(&path, Some(OTHER_UID), None).unwrap();
            assert_eq!(found(), None, "{} of another user", path.display());
            // The owner of the release may write the seed too: that user's programs are executed anyway.
            chown(dir.path(), Some(OTHER_UID), None).unwrap();
            assert_eq!(found().as_ref(), Some(&seed));
            chown(dir.path(), Some(0), None).unwrap();
            chown(&path, Some(0), None).unwrap();
        }
    }
}
