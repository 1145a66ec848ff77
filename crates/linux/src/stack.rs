//! What overlayfs would show of a stack of layers, made by copying them into one tree.
//!
//! For machines whose kernel doesn't stack directories for an ordinary user. Layers come from images, which nobody
//! should trust: every directory is opened below the top of its tree without following a link, nothing is held in
//! memory but names, and holes stay holes. A deletion is marked as overlayfs does it (a character device 0/0, the attribute
//! `user.overlay.opaque`) or, on file systems that can't hold these marks, as image archives do (`.wh.NAME`, `.wh..wh..opq`).

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
/// Attributes that mean something to those who stack layers, and nothing in a tree that is whole.
const MARKS: [&[u8]; 2] = [b"user.overlay.", b"user.fuseoverlayfs."];
const BUFFER: usize = 128 << 10;

/// Copies what `layers`, the lowest first, show when stacked into the empty directory `target`. Says how many bytes that
/// takes on the disk.
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

/// Copies what is in the directory `from` into the directory `target`, which becomes like it.
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
    /// Files with several names, by layer and inode: the first name that was made.
    links: HashMap<(usize, u64), Vec<u8>>,
    buffer: Vec<u8>,
    taken: u64,
}

/// A directory of the result.
struct Place {
    /// From the top.
    path: Vec<u8>,
    /// The layers that show something in it, the uppermost first.
    layers: Vec<usize>,
}

enum Step {
    /// Copy what is in it.
    Enter(Place),
    /// All of it is there: owner, mode and times would have been in the way before.
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

    /// Which of `candidates` show something in the directory at `path`; the first that has something else, or hides what
    /// lies below, ends them.
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
            // Of a layer's own files none is hidden by its own marks.
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

    /// Makes anything but a directory; says whether there was anything to make.
    fn file(
        &mut self,
        layer: usize,
        (from, to): (&OwnedFd, &OwnedFd),
        name: &[u8],
        found: &Stat,
    ) -> io::Result<bool> {
        if let Some(first) = self.links.get(&(layer, found.st_ino)) {
            // All directories on its way were made here, so there is no link to follow.
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
            // A whiteout: layers hold no other devices, nor sockets.
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Owner, mode, attributes and times.
    fn dress(&mut self, from: &OwnedFd, to: &OwnedFd, found: &Stat) -> io::Result<()> {
        let (uid, gid) = owner(found);
        allowed(rustix::fs::fchown(to, uid, gid))?;
        // After the owner: changing that takes setuid bits and capabilities away.
        rustix::fs::fchmod(to, Mode::from_raw_mode(found.st_mode & 0o7777))?;
        self.attributes(from, to);
        rustix::fs::futimens(to, &times(found))?;
        let blocks = rustix::fs::fstat(to)?.st_blocks;
        self.taken += u64::try_from(blocks).unwrap_or_default() * 512;
        Ok(())
    }

    /// As far as the file system has them and the user may set them.
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

/// Owner and times of what can't be opened.
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

/// Where there is one id only, owners stay as they are.
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

/// Opens a directory below `top`; no component of the path may be a link.
fn open_directory(top: &OwnedFd, path: &[u8]) -> rustix::io::Result<OwnedFd> {
    open_below(top, path, OFlags::RDONLY | OFlags::DIRECTORY)
}

fn open_below(top: &OwnedFd, path: &[u8], flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let path = if path.is_empty() { b"." } else { path };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let flags = flags | OFlags::CLOEXEC;
    // EAGAIN: something was renamed anywhere on the machine, and the kernel wants to look again.
    loop {
        match rustix::fs::openat2(top, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN) => {}
            done => return done,
        }
    }
}

/// Whether a directory hides those below it.
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

/// Whether a file beside `path`, which is not there, says that it was deleted.
fn is_marked(top: &OwnedFd, path: &[u8]) -> io::Result<bool> {
    let cut = path.iter().rposition(|byte| *byte == b'/');
    let (parent, name) = match cut {
        Some(cut) => (&path[..cut], &path[cut + 1..]),
        None => (&b""[..], path),
    };
    let mark = join(parent, &[WHITEOUT, name].concat());
    match open_below(top, &mark, OFlags::PATH) {
        Ok(_) => Ok(true),
        // A name that is too long with the mark can't have one.
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

/// Once: the innermost name is the one that helps.
fn named(path: &[u8], error: io::Error) -> io::Error {
    if error.raw_os_error().is_none() {
        return error;
    }
    let path = OsStr::from_bytes(path).display();
    io::Error::new(error.kind(), format!("/{path}: {error}"))
}

#[cfg(test)]
mod tests;
