//! Disk usage of directories and file systems.
//!
//! Directories are walked rarely, in the background, and only up to a number of files. For a whole file system statvfs() suffices, but
//! a file server may be slow to respond, or not respond at all.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use linux::file_id::FileId;
use linux::walk::{Unreadable, WalkOutcome};
use pod_protocol::usage::{DiskUsage, FileSystem, MAX_COUNTED_FILES};
use rustix::fs::FileType;
use tokio::sync::watch;

/// Minimum time between two walks of a directory.
const MIN_INTERVAL: Duration = Duration::from_secs(60);
/// At most 1/20 of the time is spent on walking.
const WALK_TIME_DIVISOR: u32 = 20;
/// How long a request waits for the first walk of a directory.
const FIRST_WALK_TIMEOUT: Duration = Duration::from_secs(2);

/// A cache of disk usage by directory.
#[derive(Clone, Default)]
pub struct DiskUsageCache(Rc<RefCell<HashMap<PathBuf, CachedUsage>>>);

/// Measures a directory. May block.
type Measure = fn(&Path) -> Option<DiskUsage>;

struct CachedUsage {
    /// `None` during the first walk, and if it failed.
    usage: Option<DiskUsage>,
    /// When to walk it again; `None` during a walk.
    due: Option<Instant>,
    /// Closed at the end of the last walk.
    walked: watch::Receiver<()>,
}

impl DiskUsageCache {
    /// The usage of a directory at its last walk. Waits a little for the first one.
    pub async fn directory(&self, dir: &Path) -> Option<DiskUsage> {
        self.cached(dir, walk).await
    }

    /// The usage of the file system that contains a directory.
    pub async fn file_system(&self, dir: &Path) -> Option<DiskUsage> {
        self.cached(dir, file_system_usage).await
    }

    async fn cached(&self, dir: &Path, measure: Measure) -> Option<DiskUsage> {
        let mut walked = self.walk_if_due(dir, measure);
        let is_first = self
            .0
            .borrow()
            .get(dir)
            .is_none_or(|cached| cached.usage.is_none() && cached.due.is_none());
        if is_first {
            // Returns when the sender is dropped, at the end of the walk.
            let _ = tokio::time::timeout(FIRST_WALK_TIMEOUT, walked.changed()).await;
        }
        self.0.borrow().get(dir)?.usage
    }

    /// Removes all other directories from the cache.
    pub fn retain(&self, dirs: &HashSet<PathBuf>) {
        self.0.borrow_mut().retain(|dir, cached| {
            // A directory that is being walked is removed by a later call.
            dirs.contains(dir) || cached.due.is_none()
        });
    }

    fn walk_if_due(&self, dir: &Path, measure: Measure) -> watch::Receiver<()> {
        let mut cache = self.0.borrow_mut();
        if let Some(cached) = cache.get(dir)
            && cached.due.is_none_or(|due| Instant::now() < due)
        {
            return cached.walked.clone();
        }
        let (done, walked) = watch::channel(());
        let usage = cache.get(dir).and_then(|cached| cached.usage);
        let cached = CachedUsage {
            usage,
            due: None,
            walked: walked.clone(),
        };
        cache.insert(dir.to_owned(), cached);
        let (cache, dir) = (Rc::clone(&self.0), dir.to_owned());
        tokio::task::spawn_local(async move {
            let start = Instant::now();
            let path = dir.clone();
            // Walking blocks, and the sandbox has one thread.
            let usage = tokio::task::spawn_blocking(move || measure(&path)).await;
            let pause = MIN_INTERVAL.max(start.elapsed() * WALK_TIME_DIVISOR);
            if let Some(cached) = cache.borrow_mut().get_mut(&dir) {
                cached.usage = usage.ok().flatten();
                cached.due = Some(Instant::now() + pause);
            }
            drop(done);
        });
        walked
    }
}

/// The file system that contains `path`.
fn file_system(path: &Path) -> Option<FileSystem> {
    let status = rustix::fs::statvfs(path).ok()?;
    Some(FileSystem {
        capacity: status.f_blocks.saturating_mul(status.f_frsize),
        available: status.f_bavail.saturating_mul(status.f_frsize),
        inodes: status.f_files,
        inodes_free: status.f_ffree,
    })
}

/// The usage of the whole file system that contains `path`.
fn file_system_usage(path: &Path) -> Option<DiskUsage> {
    let status = rustix::fs::statvfs(path).ok()?;
    let blocks = status.f_blocks.saturating_sub(status.f_bfree);
    Some(DiskUsage {
        used: blocks.saturating_mul(status.f_frsize),
        inodes: status.f_files.saturating_sub(status.f_ffree),
        file_system: file_system(path)?,
    })
}

/// Sums up a directory; `None` if it does not exist. Unreadable files and mounts below it do not count.
fn walk(dir: &Path) -> Option<DiskUsage> {
    walk_up_to(MAX_COUNTED_FILES, dir)
}

/// Sums up a directory of at most `max_files` files. If there are more, `used` is a lower bound, and `inodes` is `max_files`.
fn walk_up_to(max_files: u64, dir: &Path) -> Option<DiskUsage> {
    let mut usage = DiskUsage {
        used: 0,
        inodes: 0,
        file_system: file_system(dir)?,
    };
    let mut linked = HashSet::new();
    let extent = linux::walk::walk(dir, max_files, Unreadable::Skip, &mut |_, found| {
        let is_dir = FileType::from_raw_mode(found.st_mode) == FileType::Directory;
        let has_links = found.st_nlink > 1 && !is_dir;
        if has_links && !linked.insert(FileId::from(found)) {
            return Ok(());
        }
        let blocks = u64::try_from(found.st_blocks).unwrap_or_default();
        usage.used = usage.used.saturating_add(blocks.saturating_mul(512));
        usage.inodes += 1;
        Ok(())
    });
    if extent.ok()? == WalkOutcome::LimitReached {
        // Hard links count once, so fewer may have been counted.
        usage.inodes = max_files;
    }
    Some(usage)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn usage_is_cached_until_due() {
        let local = tokio::task::LocalSet::new();
        local
            .run_until(async {
                let home = tempfile::tempdir().unwrap();
                let file = home.path().join("a/file");
                std::fs::create_dir(home.path().join("a")).unwrap();
                std::fs::write(&file, vec![1; 100 << 10]).unwrap();
                std::fs::hard_link(&file, home.path().join("again")).unwrap();
                std::os::unix::fs::symlink("/usr", home.path().join("link")).unwrap();

                let cache = DiskUsageCache::default();
                let first = cache.directory(home.path()).await.unwrap();
                assert!((100 << 10..200 << 10).contains(&first.used), "{first:?}");
                assert_eq!(first.inodes, 4);
                assert!(first.file_system.capacity > 0);
                std::fs::write(home.path().join("more"), vec![1; 100 << 10]).unwrap();
                assert_eq!(cache.directory(home.path()).await, Some(first));
                cache.retain(&HashSet::new());
                assert!(cache.directory(home.path()).await.unwrap().used > first.used);
                assert_eq!(cache.directory(&home.path().join("none")).await, None);
                let file_system = DiskUsageCache::default().file_system(home.path()).await;
                let file_system = file_system.unwrap();
                assert!(file_system.used > first.used && file_system.inodes > 4);
            })
            .await;
    }

    #[test]
    fn files_are_counted_up_to_the_limit() {
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join("0");
        std::fs::write(&file, vec![1; 64 << 10]).unwrap();
        for name in 1..10 {
            std::fs::hard_link(&file, home.path().join(name.to_string())).unwrap();
        }
        let whole = walk_up_to(11, home.path()).unwrap();
        assert_eq!(whole.inodes, 2);
        let part = walk_up_to(10, home.path()).unwrap();
        assert!((64 << 10..=whole.used).contains(&part.used), "{part:?}");
        assert_eq!(part.inodes, 10);
    }

    #[tokio::test]
    async fn unresponsive_file_server_is_queried_once() {
        use std::sync::atomic::{AtomicU32, Ordering};
        use std::sync::{Barrier, LazyLock};
        static CALLS: AtomicU32 = AtomicU32::new(0);
        static RELEASE: LazyLock<Barrier> = LazyLock::new(|| Barrier::new(2));
        fn hangs(_: &Path) -> Option<DiskUsage> {
            CALLS.fetch_add(1, Ordering::Relaxed);
            RELEASE.wait();
            None
        }
        let local = tokio::task::LocalSet::new();
        local
            .run_until(async {
                let cache = DiskUsageCache::default();
                for _ in 0..2 {
                    assert_eq!(cache.cached(Path::new("/"), hangs).await, None);
                }
                assert_eq!(CALLS.load(Ordering::Relaxed), 1);
                RELEASE.wait();
            })
            .await;
    }
}
