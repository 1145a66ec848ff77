//! Walks a directory tree that a container may be changing. The walk follows no symbolic link and enters no other mount.
//!
//! Every entry is opened relative to the descriptor of its directory (`O_NOFOLLOW`, `RESOLVE_NO_XDEV`), so a rename or
//! replacement of a directory cannot redirect the walk. The number of open descriptors is bounded; the depth is not.

use std::collections::HashSet;
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use crate::file_id::FileId;

/// Down to this depth every directory stays open. Below it only the deepest one is open, and the walk returns through `..`.
const OPEN_LEVELS: usize = 64;

/// How to handle an entry that cannot be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// Continue without it.
    Skip,
    /// Return the error.
    Fail,
}

/// Whether the walk visited the whole tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WalkOutcome {
    /// All of it.
    Complete,
    /// The tree has more entries than the limit, at which the walk stopped.
    LimitReached,
    /// Directories were moved during the walk, and some were missed.
    Changed,
}

/// Calls `visit` for everything below `root`, then for `root` itself; each directory comes after its content. Directories are
/// passed open for reading, other files as `O_PATH`.
///
/// Visits at most `max_entries` entries. Mount points, and entries that vanish meanwhile, are skipped.
pub fn walk(
    root: &Path,
    max_entries: u64,
    unreadable: Unreadable,
    visit: &mut dyn FnMut(BorrowedFd<'_>, &Stat) -> io::Result<()>,
) -> io::Result<WalkOutcome> {
    let flags = path_only() | OFlags::DIRECTORY;
    let root = rustix::fs::openat(CWD, root, flags, Mode::empty())?;
    let status = rustix::fs::fstat(&root)?;
    let mut current = Level::open(root.as_fd(), status)?;
    let mut parents: Vec<Parent> = Vec::new();
    let mut outcome = WalkOutcome::Complete;
    let mut seen: u64 = 1;
    loop {
        let Some(entry) = current.entries.read() else {
            visit(current.entries.fd()?, &current.status)?;
            let Some(parent) = parents.pop() else {
                return Ok(outcome);
            };
            current = match parent.reopen(&current) {
                Ok(parent) => parent,
                Err(_) => {
                    outcome = WalkOutcome::Changed;
                    match nearest_open(&mut parents) {
                        Some(level) => level,
                        None => return Ok(outcome),
                    }
                }
            };
            continue;
        };
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let (file, status) = match open_entry(current.entries.fd()?, name) {
            // The entry has vanished, or is a mount point.
            Err(Errno::NOENT | Errno::XDEV) => continue,
            Err(_) if unreadable == Unreadable::Skip => continue,
            found => found?,
        };
        seen += 1;
        if seen > max_entries {
            return Ok(WalkOutcome::LimitReached);
        }
        if FileType::from_raw_mode(status.st_mode) != FileType::Directory {
            visit(file.as_fd(), &status)?;
            continue;
        }
        match Level::open(file.as_fd(), status) {
            Ok(below) => {
                let above = std::mem::replace(&mut current, below);
                parents.push(Parent::new(above, entry.offset(), parents.len()));
            }
            Err(_) if unreadable == Unreadable::Skip => visit(file.as_fd(), &status)?,
            Err(error) => return Err(error.into()),
        }
    }
}

/// The directory that is being listed.
struct Level {
    status: Stat,
    entries: Dir,
}

impl Level {
    fn open(dir: BorrowedFd<'_>, status: Stat) -> Result<Self, Errno> {
        let entries = Dir::new(open_to_list(dir, c".")?)?;
        Ok(Self { status, entries })
    }
}

/// An ancestor of the directory that is being listed.
enum Parent {
    Open(Level),
    /// Its identity, and the position at which its listing continues.
    Closed(Stat, i64),
}

impl Parent {
    fn new(level: Level, next: i64, depth: usize) -> Self {
        if depth < OPEN_LEVELS {
            Self::Open(level)
        } else {
            Self::Closed(level.status, next)
        }
    }

    /// Reopens the directory to continue its listing. `below` is the child that was listed last; it may have been moved.
    fn reopen(self, below: &Level) -> Result<Level, Errno> {
        let (status, next) = match self {
            Self::Open(level) => return Ok(level),
            Self::Closed(status, next) => (status, next),
        };
        let dir = open_to_list(below.entries.fd()?, c"..")?;
        let found = rustix::fs::fstat(&dir)?;
        if FileId::from(&found) != FileId::from(&status) {
            return Err(Errno::STALE);
        }
        let mut entries = Dir::new(dir)?;
        entries.seek(next)?;
        Ok(Level { status, entries })
    }
}

fn nearest_open(parents: &mut Vec<Parent>) -> Option<Level> {
    std::iter::from_fn(|| parents.pop()).find_map(|parent| match parent {
        Parent::Open(level) => Some(level),
        Parent::Closed(..) => None,
    })
}

fn open_to_list(dir: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat2(dir, name, flags, Mode::empty(), ResolveFlags::NO_XDEV)
}

fn open_entry(dir: BorrowedFd<'_>, name: &CStr) -> Result<(OwnedFd, Stat), Errno> {
    let resolve = ResolveFlags::NO_XDEV;
    let file = rustix::fs::openat2(dir, name, path_only(), Mode::empty(), resolve)?;
    let status = rustix::fs::fstat(&file)?;
    Ok((file, status))
}

fn path_only() -> OFlags {
    OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC
}

/// Limits [`allocated_bytes`], because a container may create entries as fast as they are counted.
const MAX_COUNTED_ENTRIES: u64 = 10_000_000;

/// The allocated bytes of all files in `dir`; hard links count once. Unreadable directories are skipped, so this is a lower bound.
pub fn allocated_bytes(dir: &Path) -> u64 {
    let mut seen = HashSet::new();
    let mut blocks: u64 = 0;
    // An error or an incomplete walk only makes the bound lower.
    let _ = walk(
        dir,
        MAX_COUNTED_ENTRIES,
        Unreadable::Skip,
        &mut |_, status| {
            if status.st_nlink < 2 || seen.insert(FileId::from(status)) {
                blocks = blocks.saturating_add(u64::try_from(status.st_blocks).unwrap_or_default());
            }
            Ok(())
        },
    );
    blocks.saturating_mul(512)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::thread::UnshareFlags;

    use super::*;
    use crate::testing::swap_until;

    /// The total size of regular files, and the outcome of the walk.
    fn bytes(root: &Path, max_entries: u64) -> (i64, WalkOutcome) {
        let mut sum = 0;
        let outcome = walk(root, max_entries, Unreadable::Skip, &mut |_, status| {
            if FileType::from_raw_mode(status.st_mode) == FileType::RegularFile {
                sum += status.st_size;
            }
            Ok(())
        });
        (sum, outcome.unwrap())
    }

    #[test]
    fn files_at_any_depth_are_visited() {
        let home = tempfile::tempdir().unwrap();
        let mut at = rustix::fs::openat(CWD, home.path(), path_only(), Mode::empty()).unwrap();
        let create = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
        for _ in 0..3000 {
            for name in [c"before", c"d", c"zz"] {
                if name == c"d" {
                    rustix::fs::mkdirat(&at, name, Mode::RWXU).unwrap();
                } else {
                    let file = rustix::fs::openat(&at, name, create, Mode::RWXU).unwrap();
                    rustix::io::write(&file, b"12345").unwrap();
                }
            }
            at = rustix::fs::openat(&at, c"d", path_only(), Mode::empty()).unwrap();
        }
        assert_eq!(
            bytes(home.path(), u64::MAX),
            (30_000, WalkOutcome::Complete)
        );
        assert_eq!(bytes(home.path(), 100).1, WalkOutcome::LimitReached);
        crate::remove::tree(&home.path().join("d")).unwrap();
    }

    #[test]
    fn mounts_and_links_are_not_followed() {
        let seen = crate::testing::in_a_child(|| {
            crate::namespace::enter_as_root(UnshareFlags::NEWNS).unwrap();
            let home = tempfile::tempdir().unwrap();
            for dir in ["outside", "root/bound", "root/memory"] {
                fs::create_dir_all(home.path().join(dir)).unwrap();
            }
            for file in ["outside/file", "root/file", "root/bound-file"] {
                fs::write(home.path().join(file), "12345").unwrap();
            }
            let root = home.path().join("root");
            symlink("../outside", root.join("link")).unwrap();
            // A bind mount of the same device: only the mount id differs.
            crate::mount::bind(&home.path().join("outside"), &root.join("bound")).unwrap();
            let file = home.path().join("outside/file");
            crate::mount::bind(&file, &root.join("bound-file")).unwrap();
            crate::mount::tmpfs(&root.join("memory"), 1 << 20).unwrap();
            fs::write(root.join("memory/file"), "12345").unwrap();
            let found = bytes(&root, u64::MAX);
            for mount_point in ["bound", "bound-file", "memory"] {
                crate::mount::detach(&root.join(mount_point)).unwrap();
            }
            found == (5, WalkOutcome::Complete)
        });
        assert!(seen);
    }

    /// A container that repeatedly swaps a directory for a link never gets files outside counted.
    #[test]
    fn swapping_links_never_leads_outside() {
        let home = tempfile::tempdir().unwrap();
        let root = home.path().join("root");
        fs::create_dir_all(root.join("real")).unwrap();
        fs::create_dir(home.path().join("outside")).unwrap();
        fs::write(home.path().join("outside/file"), "12345").unwrap();
        symlink("../outside", root.join("evil")).unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| swap_until(&done, &root.join("real"), &root.join("evil")));
            let outside = (0..3000).map(|_| bytes(&root, u64::MAX).0).max();
            done.store(true, Ordering::Relaxed);
            assert_eq!(outside, Some(0));
        });
    }
}
