//! What directories take: walked seldom, never in the way of an answer, and only so far. Of a file system that is told of as a
//! whole nothing is walked, but its server may be as slow to answer, or not answer at all.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use linux::file_id::FileId;
use linux::walk::{Extent, Unreadable};
use rustix::fs::FileType;
use tokio::sync::watch;

use super::{DiskUsage, FileSystem};

/// A directory is not walked again sooner.
const FRESH: Duration = Duration::from_secs(60);
/// Walking takes at most this part of the time.
const PART: u32 = 20;
/// What has more files than this is not told of, rather than walked for minutes.
const MOST_FILES: u64 = 500_000;
/// How long a first answer waits for directories that were never walked.
const FIRST_PATIENCE: Duration = Duration::from_secs(2);

/// What is known of the sizes of directories.
#[derive(Clone, Default)]
pub struct Disk(Rc<Inner>);

#[derive(Default)]
struct Inner {
    known: RefCell<HashMap<PathBuf, Known>>,
}

/// How it is found out what a directory takes. May block.
type Look = fn(&Path) -> Option<DiskUsage>;

struct Known {
    /// `None` while it is walked for the first time, and if it has too many files.
    usage: Option<DiskUsage>,
    /// Not walked again before; `None` while it is being walked.
    due: Option<Instant>,
    walked: watch::Receiver<()>,
}

impl Disk {
    /// What a directory takes, by the newest walk. Waits a little for the first.
    pub async fn usage(&self, dir: &Path) -> Option<DiskUsage> {
        self.newest(dir, walk).await
    }

    /// What is used of the whole file system that a directory is on.
    pub async fn whole(&self, dir: &Path) -> Option<DiskUsage> {
        self.newest(dir, whole).await
    }

    async fn newest(&self, dir: &Path, look: Look) -> Option<DiskUsage> {
        let mut walked = self.walk_if_due(dir, look);
        let first = self
            .0
            .known
            .borrow()
            .get(dir)
            .is_none_or(|known| known.usage.is_none() && known.due.is_none());
        if first {
            // The sender is dropped when the walk is done.
            let _ = tokio::time::timeout(FIRST_PATIENCE, walked.changed()).await;
        }
        self.0.known.borrow().get(dir)?.usage
    }

    /// Forgets directories that are not among these.
    pub fn retain(&self, dirs: &HashSet<PathBuf>) {
        self.0.known.borrow_mut().retain(|dir, known| {
            // One that is being walked is looked at when that is done.
            dirs.contains(dir) || known.due.is_none()
        });
    }

    fn walk_if_due(&self, dir: &Path, look: Look) -> watch::Receiver<()> {
        let mut all = self.0.known.borrow_mut();
        if let Some(known) = all.get(dir)
            && known.due.is_none_or(|due| Instant::now() < due)
        {
            return known.walked.clone();
        }
        let (done, walked) = watch::channel(());
        let usage = all.get(dir).and_then(|known| known.usage);
        let known = Known {
            usage,
            due: None,
            walked: walked.clone(),
        };
        all.insert(dir.to_owned(), known);
        let (inner, dir) = (Rc::clone(&self.0), dir.to_owned());
        tokio::task::spawn_local(async move {
            let began = Instant::now();
            let path = dir.clone();
            // Walking blocks, and this thread is the pod's only one.
            let usage = tokio::task::spawn_blocking(move || look(&path)).await;
            let pause = FRESH.max(began.elapsed() * PART);
            if let Some(known) = inner.known.borrow_mut().get_mut(&dir) {
                known.usage = usage.ok().flatten();
                known.due = Some(Instant::now() + pause);
            }
            drop(done);
        });
        walked
    }
}

/// The file system that `path` is on.
fn file_system(path: &Path) -> Option<FileSystem> {
    let status = rustix::fs::statvfs(path).ok()?;
    Some(FileSystem {
        capacity: status.f_blocks.saturating_mul(status.f_frsize),
        available: status.f_bavail.saturating_mul(status.f_frsize),
        inodes: status.f_files,
        inodes_free: status.f_ffree,
    })
}

/// What is used of the whole file system that `path` is on.
fn whole(path: &Path) -> Option<DiskUsage> {
    let status = rustix::fs::statvfs(path).ok()?;
    let blocks = status.f_blocks.saturating_sub(status.f_bfree);
    Some(DiskUsage {
        used: blocks.saturating_mul(status.f_frsize),
        inodes: status.f_files.saturating_sub(status.f_ffree),
        file_system: file_system(path)?,
    })
}

/// Adds up a directory; `None` if it has too many files or isn't there. What can't be read counts as nothing, and what is
/// mounted in it is not part of it.
fn walk(dir: &Path) -> Option<DiskUsage> {
    let mut usage = DiskUsage {
        used: 0,
        inodes: 0,
        file_system: file_system(dir)?,
    };
    let mut linked = HashSet::new();
    let extent = linux::walk::walk(dir, MOST_FILES, Unreadable::Skip, &mut |_, found| {
        let is_dir = FileType::from_raw_mode(found.st_mode) == FileType::Directory;
        let has_names = found.st_nlink > 1 && !is_dir;
        if has_names && !linked.insert(FileId::from(found)) {
            return Ok(());
        }
        let blocks = u64::try_from(found.st_blocks).unwrap_or_default();
        usage.used = usage.used.saturating_add(blocks.saturating_mul(512));
        usage.inodes += 1;
        Ok(())
    });
    match extent.ok()? {
        Extent::Whole | Extent::Changed => Some(usage),
        Extent::TooMany => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_directory_is_walked_and_then_left_alone() {
        let local = tokio::task::LocalSet::new();
        local
            .run_until(async {
                let home = tempfile::tempdir().unwrap();
                let file = home.path().join("a/file");
                std::fs::create_dir(home.path().join("a")).unwrap();
                std::fs::write(&file, vec![1; 100 << 10]).unwrap();
                std::fs::hard_link(&file, home.path().join("again")).unwrap();
                std::os::unix::fs::symlink("/usr", home.path().join("link")).unwrap();

                let disk = Disk::default();
                let first = disk.usage(home.path()).await.unwrap();
                assert!((100 << 10..200 << 10).contains(&first.used), "{first:?}");
                assert_eq!(first.inodes, 4);
                assert!(first.file_system.capacity > 0);
                std::fs::write(home.path().join("more"), vec![1; 100 << 10]).unwrap();
                assert_eq!(disk.usage(home.path()).await, Some(first));
                disk.retain(&HashSet::new());
                assert!(disk.usage(home.path()).await.unwrap().used > first.used);
                assert_eq!(disk.usage(&home.path().join("none")).await, None);
                let whole = Disk::default().whole(home.path()).await.unwrap();
                assert!(whole.used > first.used && whole.inodes > 4);
            })
            .await;
    }

    #[tokio::test]
    async fn a_server_that_does_not_answer_is_asked_once() {
        use std::sync::atomic::{AtomicU32, Ordering};
        use std::sync::{Barrier, LazyLock};
        static ASKED: AtomicU32 = AtomicU32::new(0);
        static ANSWER: LazyLock<Barrier> = LazyLock::new(|| Barrier::new(2));
        fn hangs(_: &Path) -> Option<DiskUsage> {
            ASKED.fetch_add(1, Ordering::Relaxed);
            ANSWER.wait();
            None
        }
        let local = tokio::task::LocalSet::new();
        local
            .run_until(async {
                let disk = Disk::default();
                for _ in 0..2 {
                    assert_eq!(disk.newest(Path::new("/"), hangs).await, None);
                }
                assert_eq!(ASKED.load(Ordering::Relaxed), 1);
                ANSWER.wait();
            })
            .await;
    }
}
