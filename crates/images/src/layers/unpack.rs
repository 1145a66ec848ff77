//! Unpacks one layer.
//!
//! What the archive may not do: lead out of the directory, make devices, forge the marks of overlayfs,
//! or use more room than it is given. What it may: everything else that a file system is made of.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use linux::file_id::FileId;
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, Timespec, Timestamps, XattrFlags, chownat, fchmod, fchown,
    fsetxattr, futimens, linkat, mknodat, openat, symlinkat, utimensat,
};
use rustix::io::Errno;

use super::Limits;
use super::ids::Ids;
use super::path::{Components, components};
use super::tar::{Archive, Entry, Kind};
use super::tree::{self, Tree};

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// aufs kept its own records under such names.
const RESERVED: &[u8] = b".wh..wh.";

/// Directories of an image are remembered while it is unpacked, in at most so many bytes of memory.
const MOST_PENDING: u64 = 256 << 20;
/// What one takes beside its name.
const PENDING: u64 = 128;

/// A layer can't be unpacked.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// It does what no layer may.
    #[error("{entry} in the layer is refused: {reason}")]
    Refused {
        /// Which entry.
        entry: String,
        /// Why.
        reason: String,
    },
    /// It is damaged, or no tar archive at all.
    #[error("the layer can't be read")]
    Damaged(#[source] io::Error),
    /// It is too large.
    #[error("the image is larger than is allowed: {0}")]
    TooLarge(String),
    /// The file system refused something.
    #[error("can't unpack {entry}")]
    Io {
        /// Which entry.
        entry: String,
        /// What the system said.
        source: io::Error,
    },
}

/// What is left of the room that an image is given; its layers may be unpacked at the same time.
#[derive(Debug)]
pub struct Allowance {
    bytes: AtomicU64,
    entries: AtomicU64,
    pub(super) pending: AtomicU64,
}

impl Allowance {
    /// As much as `limits` says.
    pub fn new(limits: Limits) -> Allowance {
        Allowance {
            bytes: limits.bytes.into(),
            entries: limits.entries.into(),
            pending: MOST_PENDING.into(),
        }
    }
}

/// Says whether there was so much left.
fn take(what: &AtomicU64, amount: u64) -> bool {
    what.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(amount))
        .is_ok()
}

/// When directories are complete they get their mode and time, which both would be in the way before.
#[derive(Debug)]
struct Pending {
    path: Vec<u8>,
    mode: u32,
    times: Timestamps,
}

struct Unpacking<'a> {
    tree: Tree,
    ids: &'a Ids,
    /// False as soon as the system refused to change an owner.
    may_chown: bool,
    /// Some deletions are marked by files, which go where something new comes.
    marks_by_files: bool,
    pending: HashMap<FileId, Pending>,
    buffer: Vec<u8>,
}

/// Unpacks the archive `stream` into the empty directory `root`.
pub fn unpack(
    root: OwnedFd,
    stream: impl Read,
    ids: &Ids,
    allowance: &Allowance,
) -> Result<(), UnpackError> {
    let mut archive = Archive::new(Bounded {
        inner: stream,
        left: &allowance.bytes,
    });
    let mut unpacking = Unpacking {
        tree: Tree::new(root),
        ids,
        may_chown: true,
        marks_by_files: false,
        pending: HashMap::new(),
        buffer: vec![0; 128 << 10],
    };
    while let Some(entry) = archive.next().map_err(reading)? {
        if !take(&allowance.entries, 1) {
            return Err(UnpackError::TooLarge(
                "it has more files than may be unpacked".to_owned(),
            ));
        }
        let pending = PENDING + entry.path.len() as u64;
        if entry.kind == Kind::Directory && !take(&allowance.pending, pending) {
            return Err(UnpackError::TooLarge(
                "the names of its directories take too much memory".to_owned(),
            ));
        }
        unpacking.entry(&entry, &mut archive)?;
    }
    // What follows the end belongs to the digest, and to the room that is used.
    io::copy(&mut archive.into_inner(), &mut io::sink()).map_err(reading)?;
    unpacking.finish()
}

/// Reads the archive `stream` to its end, and unpacks nothing. What is read counts as if it were unpacked.
pub fn read_through(stream: impl Read, allowance: &Allowance) -> Result<(), UnpackError> {
    let mut stream = Bounded {
        inner: stream,
        left: &allowance.bytes,
    };
    io::copy(&mut stream, &mut io::sink()).map_err(reading)?;
    Ok(())
}

fn reading(error: io::Error) -> UnpackError {
    match error.downcast::<UnpackError>() {
        Ok(ours) => ours,
        Err(error) => UnpackError::Damaged(error),
    }
}

impl Unpacking<'_> {
    fn entry(&mut self, entry: &Entry, data: &mut impl Read) -> Result<(), UnpackError> {
        let shown = || entry.path.escape_ascii().to_string();
        let refused = |reason: &str| UnpackError::Refused {
            entry: shown(),
            reason: reason.to_owned(),
        };
        let failed = |source| UnpackError::Io {
            entry: shown(),
            source,
        };
        let path = components(&entry.path).map_err(refused)?;
        let Some((name, parents)) = path.split_last() else {
            return match entry.kind {
                Kind::Directory => self.root(entry).map_err(failed),
                _ => Err(refused("the root of a layer is a directory")),
            };
        };
        if *name == OPAQUE {
            let dir = self.tree.directory(parents).map_err(failed)?;
            return tree::make_opaque(dir).map_err(failed);
        }
        if path.iter().any(|component| component.starts_with(RESERVED)) {
            return Ok(());
        }
        if let Some(hidden) = name.strip_prefix(WHITEOUT) {
            if matches!(hidden, b"" | b"." | b"..") {
                return Err(refused("it hides a name that no file has"));
            }
            let dir = self.tree.directory(parents).map_err(failed)?;
            self.marks_by_files |= tree::white_out(dir, hidden).map_err(failed)?;
            return Ok(());
        }
        match entry.kind {
            Kind::File => self.file(&path, entry, data),
            Kind::Directory => self.directory(&path, entry).map_err(failed),
            Kind::Symlink => self.symlink(&path, entry).map_err(failed),
            Kind::Fifo => self.fifo(&path, entry).map_err(failed),
            Kind::HardLink => {
                let target = components(&entry.link).map_err(|reason| {
                    refused(&reason.replace("its name", "the name it links to"))
                })?;
                match self.hard_link(&path, &target) {
                    Ok(true) => Ok(()),
                    Ok(false) => Err(refused(&format!(
                        "it is a hard link to {}, which isn't a file of this layer",
                        entry.link.escape_ascii()
                    ))),
                    Err(error) => Err(failed(error)),
                }
            }
            // An ordinary user can make none, and a container has its own /dev.
            Kind::Device => Ok(()),
        }
    }

    fn root(&mut self, entry: &Entry) -> io::Result<()> {
        let root = self.tree.root().try_clone_to_owned()?;
        self.dress_directory(root.as_fd(), b"", entry)
    }

    fn directory(&mut self, path: &Components<'_>, entry: &Entry) -> io::Result<()> {
        let Some((name, parents)) = path.split_last() else {
            return Ok(());
        };
        let parent = self.tree.directory(parents)?;
        tree::make_directory(parent, name)?;
        let made = tree::open(parent, name)?;
        self.dress_directory(made.as_fd(), &path.join(&b"/"[..]), entry)
    }

    fn dress_directory(
        &mut self,
        dir: BorrowedFd<'_>,
        path: &[u8],
        entry: &Entry,
    ) -> io::Result<()> {
        set_user_xattrs(dir, entry);
        self.chown(entry, |uid, gid| fchown(dir, uid, gid))?;
        let pending = Pending {
            path: path.to_vec(),
            mode: entry.mode,
            times: times(entry),
        };
        self.pending.insert(FileId::of(dir)?, pending);
        Ok(())
    }

    fn file(
        &mut self,
        path: &Components<'_>,
        entry: &Entry,
        data: &mut impl Read,
    ) -> Result<(), UnpackError> {
        let failed = |source| UnpackError::Io {
            entry: entry.path.escape_ascii().to_string(),
            source,
        };
        let mut file = self
            .place(path, |dir, name| {
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
        self.dress_file(&file, entry).map_err(failed)
    }

    fn dress_file(&mut self, file: &File, entry: &Entry) -> io::Result<()> {
        set_user_xattrs(file.as_fd(), entry);
        self.chown(entry, |uid, gid| fchown(file, uid, gid))?;
        // After the owner: changing that takes setuid bits and capabilities away.
        fchmod(file, Mode::from_raw_mode(entry.mode))?;
        for (name, value) in &entry.xattrs {
            if name == b"security.capability" {
                // Without the right to give capabilities, programs must do without.
                let _ = fsetxattr(file, name.as_slice(), value, XattrFlags::empty());
            }
        }
        Ok(futimens(file, &times(entry))?)
    }

    fn symlink(&mut self, path: &Components<'_>, entry: &Entry) -> io::Result<()> {
        self.place(path, |dir, name| {
            symlinkat(entry.link.as_slice(), dir, name)
        })?;
        self.dress(path, entry)
    }

    fn fifo(&mut self, path: &Components<'_>, entry: &Entry) -> io::Result<()> {
        self.place(path, |dir, name| {
            mknodat(dir, name, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
        })?;
        if let Some((name, parents)) = path.split_last() {
            let dir = self.tree.directory(parents)?;
            // It was made a moment ago and is no symlink.
            rustix::fs::chmodat(
                dir,
                *name,
                Mode::from_raw_mode(entry.mode),
                AtFlags::empty(),
            )?;
        }
        self.dress(path, entry)
    }

    /// Owner and time of what can't be opened.
    fn dress(&mut self, path: &Components<'_>, entry: &Entry) -> io::Result<()> {
        let Some((name, parents)) = path.split_last() else {
            return Ok(());
        };
        let dir = self.tree.directory(parents)?.try_clone_to_owned()?;
        let no_follow = AtFlags::SYMLINK_NOFOLLOW;
        self.chown(entry, |uid, gid| chownat(&dir, *name, uid, gid, no_follow))?;
        Ok(utimensat(&dir, *name, &times(entry), no_follow)?)
    }

    /// Says whether the target is something that can be linked to.
    fn hard_link(&mut self, path: &Components<'_>, target: &Components<'_>) -> io::Result<bool> {
        let Some((target_name, target_parents)) = target.split_last() else {
            return Ok(false);
        };
        let from = match self.tree.open_directory(&target_parents.join(&b"/"[..])) {
            Ok(from) => from,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        let Some(found) = tree::stat(from.as_fd(), target_name)? else {
            return Ok(false);
        };
        if tree::kind(&found) == FileType::Directory || tree::is_whiteout(&found) {
            return Ok(false);
        }
        // A link to itself must not remove what it links to.
        let there = self.tree.stat(path)?;
        if there.is_some_and(|there| FileId::from(&there) == FileId::from(&found)) {
            return Ok(true);
        }
        self.place(path, |dir, name| {
            linkat(&from, *target_name, dir, name, AtFlags::empty())
        })?;
        Ok(true)
    }

    /// Makes something new, in the place of what may be there already: the last entry of a name counts.
    fn place<T>(
        &mut self,
        path: &Components<'_>,
        make: impl Fn(BorrowedFd<'_>, &[u8]) -> rustix::io::Result<T>,
    ) -> io::Result<T> {
        let Some((name, parents)) = path.split_last() else {
            return Err(Errno::ISDIR.into());
        };
        let dir = self.tree.directory(parents)?;
        if self.marks_by_files {
            tree::take_mark(dir, name)?;
        }
        match make(dir, name) {
            Err(Errno::EXIST) => {}
            done => return Ok(done?),
        }
        tree::clear(dir, name)?;
        let made = make(dir, name);
        self.tree.forget();
        Ok(made?)
    }

    fn chown(
        &mut self,
        entry: &Entry,
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
        // The deepest first: the time of a directory changes when something in it does, and
        // one without permissions can't be entered any more.
        let mut pending: Vec<_> = self.pending.drain().collect();
        pending.sort_by_key(|(_, directory)| std::cmp::Reverse(directory.path.len()));
        for (id, directory) in pending {
            self.complete(id, &directory)
                .map_err(|source| UnpackError::Io {
                    entry: directory.path.escape_ascii().to_string(),
                    source,
                })?;
        }
        Ok(())
    }

    fn complete(&self, id: FileId, directory: &Pending) -> io::Result<()> {
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

/// Copies exactly `length` bytes, and tells an archive that can't be read from a disk that can't be written.
fn copy(
    from: &mut impl Read,
    to: &mut File,
    length: u64,
    buffer: &mut [u8],
    failed: impl Fn(io::Error) -> UnpackError,
) -> Result<(), UnpackError> {
    let mut left = length;
    while left > 0 {
        let most = buffer
            .len()
            .min(usize::try_from(left).unwrap_or(usize::MAX));
        let n = match from.read(&mut buffer[..most]) {
            Ok(0) => return Err(UnpackError::Damaged(io::ErrorKind::UnexpectedEof.into())),
            Ok(n) => n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(reading(error)),
        };
        to.write_all(&buffer[..n]).map_err(&failed)?;
        left -= n as u64;
    }
    Ok(())
}

/// Sets the attributes that mean nothing to the kernel. Those of overlay file systems could forge what a
/// lower layer holds; the others are not ours to set.
fn set_user_xattrs(fd: BorrowedFd<'_>, entry: &Entry) {
    for (name, value) in &entry.xattrs {
        let forging = [
            &b"user.overlay."[..],
            b"user.fuseoverlayfs.",
            b"user.containers.",
        ];
        if name.starts_with(b"user.")
            && !name.contains(&0)
            && !forging.iter().any(|prefix| name.starts_with(prefix))
        {
            // Many file systems have none; programs live with that.
            let _ = fsetxattr(fd, name.as_slice(), value, XattrFlags::empty());
        }
    }
}

fn times(entry: &Entry) -> Timestamps {
    let time = Timespec {
        tv_sec: entry.mtime.0,
        tv_nsec: entry.mtime.1.into(),
    };
    Timestamps {
        last_access: time,
        last_modification: time,
    }
}

/// Ends with an error, and not quietly, where a stream is longer than allowed.
struct Bounded<'a, R> {
    inner: R,
    left: &'a AtomicU64,
}

impl<R: Read> Read for Bounded<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        match take(self.left, n as u64) {
            true => Ok(n),
            false => Err(io::Error::other(UnpackError::TooLarge(
                "its layers hold more bytes than may be unpacked".to_owned(),
            ))),
        }
    }
}
