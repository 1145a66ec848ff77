//! Copies a stack of layers into one directory tree, with the result that overlayfs would show.
//!
//! For machines whose kernel has no overlayfs for unprivileged users. Layers come from images, which are untrusted: every
//! directory is opened below the top of its tree without following a link, only names are kept in memory, and holes in files stay
//! holes. Deletions are marked as overlayfs does (a character device 0/0, the attribute `user.overlay.opaque`) or, on file
//! systems that cannot hold these marks, as image archives do (`.wh.NAME`, `.wh..wh..opq`).

mod content;

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Timespec, Timestamps, Uid,
    XattrFlags,
};
use rustix::io::Errno;

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE_FILE: &[u8] = b".wh..wh..opq";
const OPAQUE: &str = "user.overlay.opaque";
/// Attributes that matter only for stacked layers, and are not copied.
const MARKS: [&[u8]; 2] = [b"user.overlay.", b"user.fuseoverlayfs."];
const BUFFER: usize = 128 << 10;

/// Copies the merged content of `layers`, the lowest first, into the empty directory `target`. Returns how many bytes it uses on
/// disk.
pub fn copy(layers: &[impl AsRef<Path>], target: &Path) -> io::Result<u64> {
    let open = |path: &Path| {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::openat(CWD, path, flags, Mode::empty())
    };
    let layers: Vec<OwnedFd> = layers
        .iter()
        .rev()
        .map(|layer| open(layer.as_ref()))
        .collect::<Result<_, _>>()?;
    let mut copier = Copier {
        target: open(target)?,
        layers,
        links: HashMap::new(),
        buffer: vec![0; BUFFER],
        taken: 0,
    };
    copier.all()?;
    Ok(copier.taken)
}

/// Copies the content and the attributes of the directory `from` to the directory `target`.
pub fn copy_directory(from: OwnedFd, target: &Path) -> io::Result<u64> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut copier = Copier {
        target: rustix::fs::openat(CWD, target, flags, Mode::empty())?,
        layers: vec![from],
        links: HashMap::new(),
        buffer: vec![0; BUFFER],
        taken: 0,
    };
    copier.all()?;
    Ok(copier.taken)
}

struct Copier {
    /// The uppermost first.
    layers: Vec<OwnedFd>,
    target: OwnedFd,
    /// Hard-linked files by layer and inode: the first name that was created.
    links: HashMap<(usize, u64), Vec<u8>>,
    buffer: Vec<u8>,
    taken: u64,
}

/// A directory of the result.
struct Place {
    /// The path from the top.
    path: Vec<u8>,
    /// The layers that contribute to it, the uppermost first.
    layers: Vec<usize>,
}

enum Step {
    /// Copy the content of the directory.
    Enter(Place),
    /// The content is complete: set owner, mode and times, which would have been overwritten or in the way before.
    Leave(Place),
}

impl Copier {
    fn all(&mut self) -> io::Result<()> {
        let every: Vec<usize> = (0..self.layers.len()).collect();
        let layers = self.shown(b"", &every)?;
        let path = Vec::new();
        let mut left = vec![Step::Enter(Place { path, layers })];
        while let Some(step) = left.pop() {
            let (Step::Enter(place) | Step::Leave(place)) = &step;
            let path = place.path.clone();
            let done = match step {
                Step::Enter(place) => self.enter(place, &mut left),
                Step::Leave(place) => self.leave(&place),
            };
            done.map_err(|error| named(&path, error))?;
        }
        Ok(())
    }

    /// Which of `candidates` contribute to the directory at `path`. The search ends at a layer that has a non-directory there, a
    /// whiteout, or an opaque directory.
    fn shown(&self, path: &[u8], candidates: &[usize]) -> io::Result<Vec<usize>> {
        let mut shown = Vec::new();
        for &layer in candidates {
            let top = &self.layers[layer];
            match open_directory(top, path) {
                Ok(dir) => {
                    shown.push(layer);
                    if is_opaque(&dir)? {
                        break;
                    }
                }
                Err(Errno::NOENT) if !is_marked(top, path)? => {}
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(shown)
    }

    fn enter(&mut self, place: Place, left: &mut Vec<Step>) -> io::Result<()> {
        let to = open_directory(&self.target, &place.path)?;
        let mut below = Vec::new();
        let mut seen = HashSet::new();
        for (at, &layer) in place.layers.iter().enumerate() {
            let from = open_directory(&self.layers[layer], &place.path)?;
            // Whiteouts of a layer apply only to the layers below it.
            let mut hidden = Vec::new();
            for entry in Dir::read_from(&from)? {
                let entry = entry?;
                let name = entry.file_name().to_bytes();
                if matches!(name, b"." | b"..") {
                    continue;
                }
                if let Some(name) = name.strip_prefix(WHITEOUT) {
                    hidden.push(name.to_vec());
                    continue;
                }
                if place.layers.len() > 1 && !seen.insert(name.to_vec()) {
                    continue;
                }
                let path = join(&place.path, name);
                let found = rustix::fs::statat(&from, name, AtFlags::SYMLINK_NOFOLLOW)?;
                if kind(&found) == FileType::Directory {
                    rustix::fs::mkdirat(&to, name, Mode::RWXU)?;
                    let layers = self.shown(&path, &place.layers[at..])?;
                    below.push(Step::Enter(Place { path, layers }));
                } else {
                    let made = self.file(layer, (&from, &to), name, &found);
                    if made.map_err(|error| named(&path, error))? {
                        self.remember(layer, &found, path);
                    }
                }
            }
            seen.extend(hidden);
        }
        left.push(Step::Leave(place));
        left.append(&mut below);
        Ok(())
    }

    fn leave(&mut self, place: &Place) -> io::Result<()> {
        let Some(&layer) = place.layers.first() else {
            return Ok(());
        };
        let from = open_directory(&self.layers[layer], &place.path)?;
        let to = open_directory(&self.target, &place.path)?;
        self.dress(&from, &to, &rustix::fs::fstat(&from)?)
    }

    fn remember(&mut self, layer: usize, found: &Stat, path: Vec<u8>) {
        if found.st_nlink > 1 {
            self.links.entry((layer, found.st_ino)).or_insert(path);
        }
    }

    /// Creates any file that is not a directory. Returns whether there was one to create.
    fn file(
        &mut self,
        layer: usize,
        (from, to): (&OwnedFd, &OwnedFd),
        name: &[u8],
        found: &Stat,
    ) -> io::Result<bool> {
        if let Some(first) = self.links.get(&(layer, found.st_ino)) {
            // We created all directories in this path, so it contains no link to follow.
            let empty = AtFlags::empty();
            match rustix::fs::linkat(&self.target, first.as_slice(), to, name, empty) {
                Err(Errno::MLINK) => {}
                done => return Ok(done.map(|()| true)?),
            }
        }
        let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match kind(found) {
            FileType::RegularFile => {
                let none = Mode::empty();
                let source = rustix::fs::openat(from, name, flags | OFlags::RDONLY, none)?;
                let new = flags | OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
                let file = rustix::fs::openat(to, name, new, Mode::RUSR | Mode::WUSR)?;
                let size = u64::try_from(found.st_size).unwrap_or_default();
                content::copy(&source, &file, size, &mut self.buffer)?;
                self.dress(&source, &file, found)?;
            }
            FileType::Symlink => {
                let link = rustix::fs::readlinkat(from, name, Vec::new())?;
                rustix::fs::symlinkat(&link, to, name)?;
                dress_unopened(to, name, found)?;
            }
            FileType::Fifo => {
                let mode = Mode::from_raw_mode(found.st_mode & 0o7777);
                rustix::fs::mknodat(to, name, FileType::Fifo, Mode::RUSR, 0)?;
                rustix::fs::chmodat(to, name, mode, AtFlags::empty())?;
                dress_unopened(to, name, found)?;
            }
            // A whiteout; layers contain no other devices, and no sockets.
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Copies owner, mode, attributes and times.
    fn dress(&mut self, from: &OwnedFd, to: &OwnedFd, found: &Stat) -> io::Result<()> {
        let (uid, gid) = owner(found);
        allowed(rustix::fs::fchown(to, uid, gid))?;
        // After the owner, because chown clears setuid bits and capabilities.
        rustix::fs::fchmod(to, Mode::from_raw_mode(found.st_mode & 0o7777))?;
        self.attributes(from, to);
        rustix::fs::futimens(to, &times(found))?;
        let blocks = rustix::fs::fstat(to)?.st_blocks;
        self.taken += u64::try_from(blocks).unwrap_or_default() * 512;
        Ok(())
    }

    /// Copies extended attributes, except those that the file system or the permissions do not allow.
    fn attributes(&mut self, from: &OwnedFd, to: &OwnedFd) {
        let Ok(length) = rustix::fs::flistxattr(from, &mut self.buffer[..]) else {
            return;
        };
        let names = self.buffer[..length].to_vec();
        for name in names.split(|byte| *byte == 0).filter(|n| !n.is_empty()) {
            if MARKS.iter().any(|mark| name.starts_with(mark)) {
                continue;
            }
            if let Ok(length) = rustix::fs::fgetxattr(from, name, &mut self.buffer[..]) {
                let value = &self.buffer[..length];
                let _ = rustix::fs::fsetxattr(to, name, value, XattrFlags::empty());
            }
        }
    }
}

/// Copies owner and times of a file that cannot be opened.
fn dress_unopened(dir: &OwnedFd, name: &[u8], found: &Stat) -> io::Result<()> {
    let (uid, gid) = owner(found);
    let no_follow = AtFlags::SYMLINK_NOFOLLOW;
    allowed(rustix::fs::chownat(dir, name, uid, gid, no_follow))?;
    Ok(rustix::fs::utimensat(dir, name, &times(found), no_follow)?)
}

fn owner(found: &Stat) -> (Option<Uid>, Option<Gid>) {
    (
        Some(Uid::from_raw(found.st_uid)),
        Some(Gid::from_raw(found.st_gid)),
    )
}

/// Ignores errors of chown where only one id is available.
fn allowed(changed: rustix::io::Result<()>) -> io::Result<()> {
    match changed {
        Err(Errno::PERM | Errno::INVAL) => Ok(()),
        done => Ok(done?),
    }
}

fn times(found: &Stat) -> Timestamps {
    let time = |seconds, nanoseconds: u64| Timespec {
        tv_sec: seconds,
        tv_nsec: i64::try_from(nanoseconds).unwrap_or_default(),
    };
    Timestamps {
        last_access: time(found.st_atime, found.st_atime_nsec),
        last_modification: time(found.st_mtime, found.st_mtime_nsec),
    }
}

fn kind(found: &Stat) -> FileType {
    FileType::from_raw_mode(found.st_mode)
}

/// Opens a directory below `top`; no component of the path may be a symbolic link.
fn open_directory(top: &OwnedFd, path: &[u8]) -> rustix::io::Result<OwnedFd> {
    open_below(top, path, OFlags::RDONLY | OFlags::DIRECTORY)
}

fn open_below(top: &OwnedFd, path: &[u8], flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let path = if path.is_empty() { b"." } else { path };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let flags = flags | OFlags::CLOEXEC;
    // EAGAIN: a rename anywhere on the machine interfered with the path lookup.
    loop {
        match rustix::fs::openat2(top, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN) => {}
            done => return done,
        }
    }
}

/// Whether a directory covers the directories of the layers below.
fn is_opaque(dir: &OwnedFd) -> io::Result<bool> {
    let mut value = [0; 1];
    if rustix::fs::fgetxattr(dir, OPAQUE, &mut value[..]).is_ok_and(|n| n == 1) && value == *b"y" {
        return Ok(true);
    }
    match rustix::fs::statat(dir, OPAQUE_FILE, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(_) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Whether a `.wh.` file beside `path`, which does not exist in this layer, marks it as deleted.
fn is_marked(top: &OwnedFd, path: &[u8]) -> io::Result<bool> {
    let cut = path.iter().rposition(|byte| *byte == b'/');
    let (parent, name) = match cut {
        Some(cut) => (&path[..cut], &path[cut + 1..]),
        None => (&b""[..], path),
    };
    let mark = join(parent, &[WHITEOUT, name].concat());
    match open_below(top, &mark, OFlags::PATH) {
        Ok(_) => Ok(true),
        // If the name with the prefix is too long, no such file can exist.
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NAMETOOLONG) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn join(parent: &[u8], name: &[u8]) -> Vec<u8> {
    match parent {
        b"" => name.to_vec(),
        _ => [parent, b"/", name].concat(),
    }
}

/// Adds the path to an error, once: the innermost path is the useful one.
fn named(path: &[u8], error: io::Error) -> io::Error {
    if error.raw_os_error().is_none() {
        return error;
    }
    let path = OsStr::from_bytes(path).display();
    io::Error::new(error.kind(), format!("/{path}: {error}"))
}

#[cfg(test)]
mod tests;
