//! Unpacks one layer.
//!
//! An archive cannot write outside of the layer's directory, create devices, forge overlayfs's markers, or exceed its
//! budget. All other types of entries are supported.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use linux::file_id::FileId;
use linux::layer_merge::{OPAQUE_MARKER, WHITEOUT_PREFIX};
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, Timespec, Timestamps, XattrFlags, chownat, fchmod, fchown,
    fsetxattr, futimens, linkat, mknodat, openat, symlinkat, utimensat,
};
use rustix::io::Errno;

use super::ImageLimits;
use super::ids::IdMappings;
use super::layer_tree::{self, LayerTree};
use super::path::{PathComponents, components};
use super::tar::{EntryKind, TarEntry, TarReader};

/// Prefix of aufs's internal files.
const AUFS_PREFIX: &[u8] = b".wh..wh.";

/// Limit for the memory that holds the metadata of an image's directories during unpacking.
const MAX_DIRECTORY_MEMORY: u64 = 256 << 20;
/// Memory per directory, without its path.
const DIRECTORY_OVERHEAD: u64 = 128;

/// A layer cannot be unpacked.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// An entry is not allowed in a layer.
    #[error("entry {entry} of the layer is rejected: {reason}")]
    Rejected {
        /// The entry.
        entry: String,
        /// The reason.
        reason: String,
    },
    /// The layer is damaged or not a tar archive.
    #[error("cannot read the layer")]
    Damaged(#[source] io::Error),
    /// The layer exceeds the budget.
    #[error("the image is too large: {0}")]
    TooLarge(String),
    /// A file system operation failed.
    #[error("cannot unpack {entry}")]
    Io {
        /// The entry.
        entry: String,
        /// The error.
        source: io::Error,
    },
}

/// The remaining limits of an image. Concurrent unpacks of its layers share them.
#[derive(Debug)]
pub struct UnpackBudget {
    bytes: AtomicU64,
    entries: AtomicU64,
    pub(super) directory_memory: AtomicU64,
}

impl UnpackBudget {
    /// Starts with all of `limits`.
    pub fn new(limits: ImageLimits) -> UnpackBudget {
        UnpackBudget {
            bytes: limits.bytes.into(),
            entries: limits.entries.into(),
            directory_memory: MAX_DIRECTORY_MEMORY.into(),
        }
    }
}

/// Subtracts `amount`; false if less is left.
fn consume(remaining: &AtomicU64, amount: u64) -> bool {
    remaining
        .fetch_update(Relaxed, Relaxed, |left| left.checked_sub(amount))
        .is_ok()
}

/// The final mode and time of a directory. They are set when the directory is complete: a read-only mode would prevent
/// new entries, and new entries would change the time.
#[derive(Debug)]
struct DirectoryMetadata {
    path: Vec<u8>,
    mode: u32,
    times: Timestamps,
}

struct Unpacker<'a> {
    tree: LayerTree,
    ids: &'a IdMappings,
    /// False after the first chown that was not permitted.
    may_chown: bool,
    /// Whether some whiteouts are marker files, which a new entry of the same name must remove.
    has_whiteout_files: bool,
    pending: HashMap<FileId, DirectoryMetadata>,
    buffer: Vec<u8>,
}

/// Unpacks the archive `stream` into the empty directory `root`.
pub fn unpack(
    root: OwnedFd,
    stream: impl Read,
    ids: &IdMappings,
    budget: &UnpackBudget,
) -> Result<(), UnpackError> {
    let mut archive = TarReader::new(BudgetReader {
        inner: stream,
        remaining: &budget.bytes,
    });
    let mut unpacker = Unpacker {
        tree: LayerTree::new(root),
        ids,
        may_chown: true,
        has_whiteout_files: false,
        pending: HashMap::new(),
        buffer: vec![0; 128 << 10],
    };
    while let Some(entry) = archive.next().map_err(read_error)? {
        if !consume(&budget.entries, 1) {
            return Err(UnpackError::TooLarge(
                "it has more files than the limit".to_owned(),
            ));
        }
        let memory = DIRECTORY_OVERHEAD + entry.path.len() as u64;
        if entry.kind == EntryKind::Directory && !consume(&budget.directory_memory, memory) {
            return Err(UnpackError::TooLarge(
                "the paths of its directories need too much memory".to_owned(),
            ));
        }
        unpacker.unpack_entry(&entry, &mut archive)?;
    }
    // Bytes after the end marker count for the digest and for the budget.
    io::copy(&mut archive.into_inner(), &mut io::sink()).map_err(read_error)?;
    unpacker.finish()
}

/// Reads the archive `stream` to its end without unpacking it. The bytes count against the budget.
pub fn read_through(stream: impl Read, budget: &UnpackBudget) -> Result<(), UnpackError> {
    let mut stream = BudgetReader {
        inner: stream,
        remaining: &budget.bytes,
    };
    io::copy(&mut stream, &mut io::sink()).map_err(read_error)?;
    Ok(())
}

fn read_error(error: io::Error) -> UnpackError {
    match error.downcast::<UnpackError>() {
        Ok(unpack_error) => unpack_error,
        Err(error) => UnpackError::Damaged(error),
    }
}

impl Unpacker<'_> {
    fn unpack_entry(&mut self, entry: &TarEntry, data: &mut impl Read) -> Result<(), UnpackError> {
        let display = || entry.path.escape_ascii().to_string();
        let rejected = |reason: &str| UnpackError::Rejected {
            entry: display(),
            reason: reason.to_owned(),
        };
        let failed = |source| UnpackError::Io {
            entry: display(),
            source,
        };
        let path = components(&entry.path).map_err(rejected)?;
        let Some((name, parents)) = path.split_last() else {
            return match entry.kind {
                EntryKind::Directory => self.root(entry).map_err(failed),
                _ => Err(rejected("the root of a layer must be a directory")),
            };
        };
        if *name == OPAQUE_MARKER {
            let dir = self.tree.directory(parents).map_err(failed)?;
            return layer_tree::set_opaque(dir).map_err(failed);
        }
        if path
            .iter()
            .any(|component| component.starts_with(AUFS_PREFIX))
        {
            return Ok(());
        }
        if let Some(hidden) = name.strip_prefix(WHITEOUT_PREFIX) {
            if matches!(hidden, b"" | b"." | b"..") {
                return Err(rejected("it is a whiteout of an invalid name"));
            }
            let dir = self.tree.directory(parents).map_err(failed)?;
            self.has_whiteout_files |= layer_tree::add_whiteout(dir, hidden).map_err(failed)?;
            return Ok(());
        }
        match entry.kind {
            EntryKind::File => self.file(&path, entry, data),
            EntryKind::Directory => self.directory(&path, entry).map_err(failed),
            EntryKind::Symlink => self.symlink(&path, entry).map_err(failed),
            EntryKind::Fifo => self.fifo(&path, entry).map_err(failed),
            EntryKind::HardLink => {
                let target = components(&entry.link)
                    .map_err(|reason| rejected(&reason.replace("its name", "the target's name")))?;
                match self.hard_link(&path, &target) {
                    Ok(true) => Ok(()),
                    Ok(false) => Err(rejected(&format!(
                        "it is a hard link to {}, which is not a file of this layer",
                        entry.link.escape_ascii()
                    ))),
                    Err(error) => Err(failed(error)),
                }
            }
            // Unprivileged users cannot create devices, and a container has its own /dev.
            EntryKind::Device => Ok(()),
        }
    }

    fn root(&mut self, entry: &TarEntry) -> io::Result<()> {
        let root = self.tree.root().try_clone_to_owned()?;
        self.set_directory_metadata(root.as_fd(), b"", entry)
    }

    fn directory(&mut self, path: &PathComponents<'_>, entry: &TarEntry) -> io::Result<()> {
        let Some((name, parents)) = path.split_last() else {
            return Ok(());
        };
        let parent = self.tree.directory(parents)?;
        layer_tree::make_directory(parent, name)?;
        let created = layer_tree::open(parent, name)?;
        self.set_directory_metadata(created.as_fd(), &path.join(&b"/"[..]), entry)
    }

    fn set_directory_metadata(
        &mut self,
        dir: BorrowedFd<'_>,
        path: &[u8],
        entry: &TarEntry,
    ) -> io::Result<()> {
        set_user_xattrs(dir, entry);
        self.chown(entry, |uid, gid| fchown(dir, uid, gid))?;
        let pending = DirectoryMetadata {
            path: path.to_vec(),
            mode: entry.mode,
            times: times(entry),
        };
        self.pending.insert(FileId::of(dir)?, pending);
        Ok(())
    }

    fn file(
        &mut self,
        path: &PathComponents<'_>,
        entry: &TarEntry,
        data: &mut impl Read,
    ) -> Result<(), UnpackError> {
        let failed = |source| UnpackError::Io {
            entry: entry.path.escape_ascii().to_string(),
            source,
        };
        let mut file = self
            .replace_entry(path, |dir, name| {
                let flags = OFlags::WRONLY
                    | OFlags::CREATE
                    | OFlags::EXCL
                    | OFlags::NOFOLLOW
                    | OFlags::CLOEXEC;
                openat(dir, name, flags, Mode::RUSR | Mode::WUSR)
            })
            .map(File::from)
            .map_err(failed)?;
        match &entry.segments {
            None => copy(data, &mut file, entry.size, &mut self.buffer, failed)?,
            Some(segments) => {
                file.set_len(entry.size).map_err(failed)?;
                for segment in segments {
                    file.seek(SeekFrom::Start(segment.offset)).map_err(failed)?;
                    copy(data, &mut file, segment.length, &mut self.buffer, failed)?;
                }
            }
        }
        self.set_file_metadata(&file, entry).map_err(failed)
    }

    fn set_file_metadata(&mut self, file: &File, entry: &TarEntry) -> io::Result<()> {
        set_user_xattrs(file.as_fd(), entry);
        self.chown(entry, |uid, gid| fchown(file, uid, gid))?;
        // After chown, which clears setuid bits and capabilities.
        fchmod(file, Mode::from_raw_mode(entry.mode))?;
        for (name, value) in &entry.xattrs {
            if name == b"security.capability" {
                // Fails without CAP_SETFCAP; then the program has no capabilities.
                let _ = fsetxattr(file, name.as_slice(), value, XattrFlags::empty());
            }
        }
        Ok(futimens(file, &times(entry))?)
    }

    fn symlink(&mut self, path: &PathComponents<'_>, entry: &TarEntry) -> io::Result<()> {
        self.replace_entry(path, |dir, name| {
            symlinkat(entry.link.as_slice(), dir, name)
        })?;
        self.set_owner_and_time(path, entry)
    }

    fn fifo(&mut self, path: &PathComponents<'_>, entry: &TarEntry) -> io::Result<()> {
        self.replace_entry(path, |dir, name| {
            mknodat(dir, name, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
        })?;
        if let Some((name, parents)) = path.split_last() {
            let dir = self.tree.directory(parents)?;
            // It was just created, so it is not a symlink.
            rustix::fs::chmodat(
                dir,
                *name,
                Mode::from_raw_mode(entry.mode),
                AtFlags::empty(),
            )?;
        }
        self.set_owner_and_time(path, entry)
    }

    /// Sets owner and time of a symlink or FIFO, which cannot be opened.
    fn set_owner_and_time(
        &mut self,
        path: &PathComponents<'_>,
        entry: &TarEntry,
    ) -> io::Result<()> {
        let Some((name, parents)) = path.split_last() else {
            return Ok(());
        };
        let dir = self.tree.directory(parents)?.try_clone_to_owned()?;
        let no_follow = AtFlags::SYMLINK_NOFOLLOW;
        self.chown(entry, |uid, gid| chownat(&dir, *name, uid, gid, no_follow))?;
        Ok(utimensat(&dir, *name, &times(entry), no_follow)?)
    }

    /// Returns false if the target is missing or cannot be linked to.
    fn hard_link(
        &mut self,
        path: &PathComponents<'_>,
        target: &PathComponents<'_>,
    ) -> io::Result<bool> {
        let Some((target_name, target_parents)) = target.split_last() else {
            return Ok(false);
        };
        let from = match self.tree.open_directory(&target_parents.join(&b"/"[..])) {
            Ok(from) => from,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        let Some(found) = layer_tree::stat(from.as_fd(), target_name)? else {
            return Ok(false);
        };
        if layer_tree::kind(&found) == FileType::Directory || layer_tree::is_whiteout(&found) {
            return Ok(false);
        }
        // A link to itself must not remove its target.
        let existing = self.tree.stat(path)?;
        if existing.is_some_and(|existing| FileId::from(&existing) == FileId::from(&found)) {
            return Ok(true);
        }
        self.replace_entry(path, |dir, name| {
            linkat(&from, *target_name, dir, name, AtFlags::empty())
        })?;
        Ok(true)
    }

    /// Creates an entry and replaces an earlier one of the same name: the last entry wins.
    fn replace_entry<T>(
        &mut self,
        path: &PathComponents<'_>,
        create: impl Fn(BorrowedFd<'_>, &[u8]) -> rustix::io::Result<T>,
    ) -> io::Result<T> {
        let Some((name, parents)) = path.split_last() else {
            return Err(Errno::ISDIR.into());
        };
        let dir = self.tree.directory(parents)?;
        if self.has_whiteout_files {
            layer_tree::remove_whiteout_file(dir, name)?;
        }
        match create(dir, name) {
            Err(Errno::EXIST) => {}
            done => return Ok(done?),
        }
        layer_tree::remove_entry(dir, name)?;
        let created = create(dir, name);
        self.tree.clear_cache();
        Ok(created?)
    }

    fn chown(
        &mut self,
        entry: &TarEntry,
        change: impl FnOnce(Option<rustix::fs::Uid>, Option<rustix::fs::Gid>) -> rustix::io::Result<()>,
    ) -> io::Result<()> {
        let (uid, gid) = self.ids.owner(entry.uid, entry.gid);
        if !self.may_chown || (uid.is_none() && gid.is_none()) {
            return Ok(());
        }
        match change(uid, gid) {
            Err(Errno::PERM | Errno::INVAL) => {
                self.may_chown = false;
                Ok(())
            }
            done => Ok(done?),
        }
    }

    fn finish(mut self) -> Result<(), UnpackError> {
        // Deepest first: a change in a directory changes its time, and a directory without permissions
        // cannot be entered.
        let mut pending: Vec<_> = self.pending.drain().collect();
        pending.sort_by_key(|(_, directory)| std::cmp::Reverse(directory.path.len()));
        for (id, directory) in pending {
            self.set_mode_and_time(id, &directory)
                .map_err(|source| UnpackError::Io {
                    entry: directory.path.escape_ascii().to_string(),
                    source,
                })?;
        }
        Ok(())
    }

    fn set_mode_and_time(&self, id: FileId, directory: &DirectoryMetadata) -> io::Result<()> {
        let dir = match self.tree.open_directory(&directory.path) {
            Ok(dir) => dir,
            Err(error) => {
                return match error.kind() {
                    // Replaced by a later entry.
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Ok(()),
                    _ => Err(error),
                };
            }
        };
        if FileId::of(&dir)? != id {
            return Ok(());
        }
        fchmod(&dir, Mode::from_raw_mode(directory.mode))?;
        Ok(futimens(&dir, &directory.times)?)
    }
}

/// Copies exactly `length` bytes, and distinguishes read errors of the archive from write errors of the disk.
fn copy(
    from: &mut impl Read,
    to: &mut File,
    length: u64,
    buffer: &mut [u8],
    failed: impl Fn(io::Error) -> UnpackError,
) -> Result<(), UnpackError> {
    let mut left = length;
    while left > 0 {
        let limit = buffer
            .len()
            .min(usize::try_from(left).unwrap_or(usize::MAX));
        let n = match from.read(&mut buffer[..limit]) {
            Ok(0) => return Err(UnpackError::Damaged(io::ErrorKind::UnexpectedEof.into())),
            Ok(n) => n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(read_error(error)),
        };
        to.write_all(&buffer[..n]).map_err(&failed)?;
        left -= n as u64;
    }
    Ok(())
}

/// Sets `user.*` attributes except those of overlay file systems, which could forge the content of lower layers.
fn set_user_xattrs(fd: BorrowedFd<'_>, entry: &TarEntry) {
    for (name, value) in &entry.xattrs {
        let overlay_prefixes = [
            &b"user.overlay."[..],
            b"user.fuseoverlayfs.",
            b"user.containers.",
        ];
        if name.starts_with(b"user.")
            && !name.contains(&0)
            && !overlay_prefixes
                .iter()
                .any(|prefix| name.starts_with(prefix))
        {
            // Ignore errors: many file systems have no xattrs.
            let _ = fsetxattr(fd, name.as_slice(), value, XattrFlags::empty());
        }
    }
}

fn times(entry: &TarEntry) -> Timestamps {
    let time = Timespec {
        tv_sec: entry.mtime.0,
        tv_nsec: entry.mtime.1.into(),
    };
    Timestamps {
        last_access: time,
        last_modification: time,
    }
}

/// Fails when the budget is exceeded, instead of reporting the end of the file.
struct BudgetReader<'a, R> {
    inner: R,
    remaining: &'a AtomicU64,
}

impl<R: Read> Read for BudgetReader<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        match consume(self.remaining, n as u64) {
            true => Ok(n),
            false => Err(io::Error::other(UnpackError::TooLarge(
                "its layers have more bytes than the limit".to_owned(),
            ))),
        }
    }
}
