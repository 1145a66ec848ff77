//! Copies the layers of an image into one directory tree, with the content that an overlay mount of them would have.
//!
//! For machines whose kernel has no overlayfs for unprivileged users. Layers come from images, which are untrusted: every
//! directory is opened below the top of its tree without following a link, only names are kept in memory, and holes in files stay
//! holes. Deletions are marked as overlayfs does (a character device 0/0, the attribute `user.overlay.opaque`) or, on file
//! systems that cannot hold these marks, as image archives do (`.wh.NAME`, `.wh..wh..opq`).

mod file_content;

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

/// Marks an opaque directory for overlayfs mounted with `userxattr`.
pub const OPAQUE_XATTR: &str = "user.overlay.opaque";
/// OCI's marker of an opaque directory, for file systems without xattrs. overlayfs ignores marker files, but it cannot use such a
/// file system for a root anyway; fuse-overlayfs and [`merge_layers`] understand them. No file of a layer has such a name.
pub const OPAQUE_MARKER: &[u8] = b".wh..wh..opq";
/// OCI's prefix of the marker of a deleted file, for file systems without device nodes.
pub const WHITEOUT_PREFIX: &[u8] = b".wh.";
/// Prefixes of attributes that have a meaning only in a layer. They are not copied.
const OVERLAY_XATTRS: [&[u8]; 2] = [b"user.overlay.", b"user.fuseoverlayfs."];
const BUFFER_SIZE: usize = 128 << 10;

/// Copies the merged content of `layers`, the lowest first, into the empty directory `target`. Returns how many bytes it uses on
/// disk.
pub fn merge_layers(layers: &[impl AsRef<Path>], target: &Path) -> io::Result<u64> {
    let open = |path: &Path| {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::openat(CWD, path, flags, Mode::empty())
    };
    let layers: Vec<OwnedFd> = layers
        .iter()
        .rev()
        .map(|layer| open(layer.as_ref()))
        .collect::<Result<_, _>>()?;
    let mut merger = Merger {
        target: open(target)?,
        layers,
        links: HashMap::new(),
        buffer: vec![0; BUFFER_SIZE],
        disk_bytes: 0,
    };
    merger.run()?;
    Ok(merger.disk_bytes)
}

/// Copies the content and the attributes of the directory `from` to the directory `target`.
pub fn copy_directory(from: OwnedFd, target: &Path) -> io::Result<u64> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut merger = Merger {
        target: rustix::fs::openat(CWD, target, flags, Mode::empty())?,
        layers: vec![from],
        links: HashMap::new(),
        buffer: vec![0; BUFFER_SIZE],
        disk_bytes: 0,
    };
    merger.run()?;
    Ok(merger.disk_bytes)
}

struct Merger {
    /// The uppermost first.
    layers: Vec<OwnedFd>,
    target: OwnedFd,
    /// Hard-linked files by layer and inode: the first name that was created.
    links: HashMap<(usize, u64), Vec<u8>>,
    buffer: Vec<u8>,
    disk_bytes: u64,
}

/// A directory of the merged tree.
struct MergedDir {
    /// Its path relative to the target.
    path: Vec<u8>,
    /// The layers that contribute to it, the uppermost first.
    layers: Vec<usize>,
}

enum Step {
    /// Copy the content of the directory.
    Enter(MergedDir),
    /// All content is copied: set owner, mode and times last, because copying changes times and needs write permission.
    Leave(MergedDir),
}

impl Merger {
    fn run(&mut self) -> io::Result<()> {
        let all: Vec<usize> = (0..self.layers.len()).collect();
        let layers = self.contributing_layers(b"", &all)?;
        let path = Vec::new();
        let mut pending = vec![Step::Enter(MergedDir { path, layers })];
        while let Some(step) = pending.pop() {
            let (Step::Enter(dir) | Step::Leave(dir)) = &step;
            let path = dir.path.clone();
            let done = match step {
                Step::Enter(dir) => self.enter(dir, &mut pending),
                Step::Leave(dir) => self.leave(&dir),
            };
            done.map_err(|error| with_path(&path, error))?;
        }
        Ok(())
    }

    /// The layers of `candidates` that contribute to the directory at `path`. The search ends at a layer that has a non-directory
    /// there, a whiteout, or an opaque directory.
    fn contributing_layers(&self, path: &[u8], candidates: &[usize]) -> io::Result<Vec<usize>> {
        let mut contributing = Vec::new();
        for &layer in candidates {
            let top = &self.layers[layer];
            match open_directory(top, path) {
                Ok(dir) => {
                    contributing.push(layer);
                    if is_opaque(&dir)? {
                        break;
                    }
                }
                Err(Errno::NOENT) if !is_whited_out(top, path)? => {}
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(contributing)
    }

    fn enter(&mut self, dir: MergedDir, pending: &mut Vec<Step>) -> io::Result<()> {
        let to = open_directory(&self.target, &dir.path)?;
        let mut subdirs = Vec::new();
        let mut seen = HashSet::new();
        for (at, &layer) in dir.layers.iter().enumerate() {
            let from = open_directory(&self.layers[layer], &dir.path)?;
            // Whiteouts of a layer apply only to the layers below it.
            let mut whited_out = Vec::new();
            for entry in Dir::read_from(&from)? {
                let entry = entry?;
                let name = entry.file_name().to_bytes();
                if matches!(name, b"." | b"..") {
                    continue;
                }
                if let Some(name) = name.strip_prefix(WHITEOUT_PREFIX) {
                    whited_out.push(name.to_vec());
                    continue;
                }
                if dir.layers.len() > 1 && !seen.insert(name.to_vec()) {
                    continue;
                }
                let path = join(&dir.path, name);
                let stat = rustix::fs::statat(&from, name, AtFlags::SYMLINK_NOFOLLOW)?;
                if kind(&stat) == FileType::Directory {
                    rustix::fs::mkdirat(&to, name, Mode::RWXU)?;
                    let layers = self.contributing_layers(&path, &dir.layers[at..])?;
                    subdirs.push(Step::Enter(MergedDir { path, layers }));
                } else {
                    let copied = self.copy_file(layer, (&from, &to), name, &stat);
                    if copied.map_err(|error| with_path(&path, error))? {
                        self.record_hard_link(layer, &stat, path);
                    }
                }
            }
            seen.extend(whited_out);
        }
        pending.push(Step::Leave(dir));
        pending.append(&mut subdirs);
        Ok(())
    }

    fn leave(&mut self, dir: &MergedDir) -> io::Result<()> {
        let Some(&layer) = dir.layers.first() else {
            return Ok(());
        };
        let from = open_directory(&self.layers[layer], &dir.path)?;
        let to = open_directory(&self.target, &dir.path)?;
        self.copy_metadata(&from, &to, &rustix::fs::fstat(&from)?)
    }

    fn record_hard_link(&mut self, layer: usize, stat: &Stat, path: Vec<u8>) {
        if stat.st_nlink > 1 {
            self.links.entry((layer, stat.st_ino)).or_insert(path);
        }
    }

    /// Copies a file that is not a directory. Returns false for a whiteout, which is not copied.
    fn copy_file(
        &mut self,
        layer: usize,
        (from, to): (&OwnedFd, &OwnedFd),
        name: &[u8],
        stat: &Stat,
    ) -> io::Result<bool> {
        if let Some(first) = self.links.get(&(layer, stat.st_ino)) {
            // We created all directories in this path, so it contains no link to follow.
            let empty = AtFlags::empty();
            match rustix::fs::linkat(&self.target, first.as_slice(), to, name, empty) {
                Err(Errno::MLINK) => {}
                done => return Ok(done.map(|()| true)?),
            }
        }
        let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match kind(stat) {
            FileType::RegularFile => {
                let none = Mode::empty();
                let source = rustix::fs::openat(from, name, flags | OFlags::RDONLY, none)?;
                let new = flags | OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
                let file = rustix::fs::openat(to, name, new, Mode::RUSR | Mode::WUSR)?;
                let size = u64::try_from(stat.st_size).unwrap_or_default();
                file_content::copy(&source, &file, size, &mut self.buffer)?;
                self.copy_metadata(&source, &file, stat)?;
            }
            FileType::Symlink => {
                let link = rustix::fs::readlinkat(from, name, Vec::new())?;
                rustix::fs::symlinkat(&link, to, name)?;
                copy_owner_and_times(to, name, stat)?;
            }
            FileType::Fifo => {
                let mode = Mode::from_raw_mode(stat.st_mode & 0o7777);
                rustix::fs::mknodat(to, name, FileType::Fifo, Mode::RUSR, 0)?;
                rustix::fs::chmodat(to, name, mode, AtFlags::empty())?;
                copy_owner_and_times(to, name, stat)?;
            }
            // A whiteout; layers contain no other devices, and no sockets.
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Copies owner, mode, attributes and times.
    fn copy_metadata(&mut self, from: &OwnedFd, to: &OwnedFd, stat: &Stat) -> io::Result<()> {
        let (uid, gid) = owner(stat);
        ignore_unmapped_ids(rustix::fs::fchown(to, uid, gid))?;
        // After the owner, because chown clears setuid bits and capabilities.
        rustix::fs::fchmod(to, Mode::from_raw_mode(stat.st_mode & 0o7777))?;
        self.copy_xattrs(from, to);
        rustix::fs::futimens(to, &times(stat))?;
        let blocks = rustix::fs::fstat(to)?.st_blocks;
        self.disk_bytes += u64::try_from(blocks).unwrap_or_default() * 512;
        Ok(())
    }

    /// Copies extended attributes, except those that the file system or the permissions do not allow.
    fn copy_xattrs(&mut self, from: &OwnedFd, to: &OwnedFd) {
        let Ok(length) = rustix::fs::flistxattr(from, &mut self.buffer[..]) else {
            return;
        };
        let names = self.buffer[..length].to_vec();
        for name in names.split(|byte| *byte == 0).filter(|n| !n.is_empty()) {
            if OVERLAY_XATTRS.iter().any(|prefix| name.starts_with(prefix)) {
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
fn copy_owner_and_times(dir: &OwnedFd, name: &[u8], stat: &Stat) -> io::Result<()> {
    let (uid, gid) = owner(stat);
    let no_follow = AtFlags::SYMLINK_NOFOLLOW;
    ignore_unmapped_ids(rustix::fs::chownat(dir, name, uid, gid, no_follow))?;
    Ok(rustix::fs::utimensat(dir, name, &times(stat), no_follow)?)
}

fn owner(stat: &Stat) -> (Option<Uid>, Option<Gid>) {
    (
        Some(Uid::from_raw(stat.st_uid)),
        Some(Gid::from_raw(stat.st_gid)),
    )
}

/// Ignores the errors that chown returns if the namespace does not map the id.
fn ignore_unmapped_ids(changed: rustix::io::Result<()>) -> io::Result<()> {
    match changed {
        Err(Errno::PERM | Errno::INVAL) => Ok(()),
        done => Ok(done?),
    }
}

fn times(stat: &Stat) -> Timestamps {
    let time = |seconds, nanoseconds: u64| Timespec {
        tv_sec: seconds,
        tv_nsec: i64::try_from(nanoseconds).unwrap_or_default(),
    };
    Timestamps {
        last_access: time(stat.st_atime, stat.st_atime_nsec),
        last_modification: time(stat.st_mtime, stat.st_mtime_nsec),
    }
}

fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
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
    if rustix::fs::fgetxattr(dir, OPAQUE_XATTR, &mut value[..]).is_ok_and(|n| n == 1)
        && value == *b"y"
    {
        return Ok(true);
    }
    match rustix::fs::statat(dir, OPAQUE_MARKER, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(_) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Whether a `.wh.` file beside `path`, which does not exist in this layer, marks it as deleted.
fn is_whited_out(top: &OwnedFd, path: &[u8]) -> io::Result<bool> {
    let cut = path.iter().rposition(|byte| *byte == b'/');
    let (parent, name) = match cut {
        Some(cut) => (&path[..cut], &path[cut + 1..]),
        None => (&b""[..], path),
    };
    let whiteout = join(parent, &[WHITEOUT_PREFIX, name].concat());
    match open_below(top, &whiteout, OFlags::PATH) {
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
fn with_path(path: &[u8], error: io::Error) -> io::Error {
    if error.raw_os_error().is_none() {
        return error;
    }
    let path = OsStr::from_bytes(path).display();
    io::Error::new(error.kind(), format!("/{path}: {error}"))
}

#[cfg(test)]
mod tests;
