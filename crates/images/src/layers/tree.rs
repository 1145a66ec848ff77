//! The directory that a layer is unpacked into. Every name is resolved by the kernel as if that
//! directory were the root (openat2), so that no symlink in it, however made, leads out.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat, XattrFlags, fchmod, fsetxattr, fstat,
    mkdirat, mknodat, openat, openat2, readlinkat, statat, unlinkat,
};
use rustix::io::Errno;

/// As many as the kernel follows itself.
const MOST_LINKS: usize = 40;

/// Tells overlayfs, mounted with `userxattr`, that a directory hides those below it.
const OPAQUE: &str = "user.overlay.opaque";

/// The same marks as image archives make them, for file systems that can hold no others. overlayfs doesn't know them, but
/// it can't use such a file system for a root anyway; fuse-overlayfs and `linux::stack` do. No file of a layer has such a name.
const OPAQUE_FILE: &[u8] = b".wh..wh..opq";
const WHITEOUT: &[u8] = b".wh.";

/// A directory to unpack into.
#[derive(Debug)]
pub struct Tree {
    root: OwnedFd,
    /// The directory that was used last: most entries lie beside the one before.
    last: Option<(Vec<u8>, OwnedFd)>,
}

impl Tree {
    /// Unpacks into `root`.
    pub fn new(root: OwnedFd) -> Tree {
        Tree { root, last: None }
    }

    /// The directory itself.
    pub fn root(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }

    /// Opens the directory of these components, and makes what is missing of it.
    pub fn directory(&mut self, components: &[&[u8]]) -> io::Result<BorrowedFd<'_>> {
        let path = components.join(&b"/"[..]);
        if self.last.as_ref().is_none_or(|(last, _)| *last != path) {
            let dir = match self.open_directory(&path) {
                // Something is missing, or a whiteout stands there.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                    ) =>
                {
                    self.make_directories(components)?
                }
                done => done?,
            };
            self.last = Some((path, dir));
        }
        match &self.last {
            Some((_, dir)) => Ok(dir.as_fd()),
            None => Err(Errno::NOENT.into()),
        }
    }

    /// Opens an existing directory.
    pub fn open_directory(&self, path: &[u8]) -> io::Result<OwnedFd> {
        let path = if path.is_empty() { b"." } else { path };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        // EAGAIN: something was renamed anywhere on the machine, and the kernel wants to look again.
        loop {
            match openat2(&self.root, path, flags, Mode::empty(), resolve) {
                Err(Errno::AGAIN) => {}
                done => return Ok(done?),
            }
        }
    }

    /// Something that is not followed if it is a symlink; its directory must exist.
    pub fn stat(&self, components: &[&[u8]]) -> io::Result<Option<Stat>> {
        let Some((name, parents)) = components.split_last() else {
            return Ok(Some(fstat(&self.root)?));
        };
        match self.open_directory(&parents.join(&b"/"[..])) {
            Ok(dir) => stat(dir.as_fd(), name),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// What was opened before may have been replaced.
    pub fn forget(&mut self) {
        self.last = None;
    }

    /// Walks through the components, and makes directories as they are missing. Symlinks are followed by
    /// hand, since what they point to may be missing too.
    fn make_directories(&self, components: &[&[u8]]) -> io::Result<OwnedFd> {
        let mut todo: Vec<Vec<u8>> = components.iter().rev().map(|c| c.to_vec()).collect();
        // No symlinks and no `..`: from the root to where we are.
        let mut done: Vec<Vec<u8>> = Vec::new();
        let mut links = 0;
        let mut at = self.open_directory(b"")?;
        while let Some(component) = todo.pop() {
            match component.as_slice() {
                b"" | b"." => continue,
                b".." => {
                    done.pop();
                    at = self.open_directory(&done.join(&b"/"[..]))?;
                    continue;
                }
                _ => {}
            }
            let found = stat(at.as_fd(), &component)?;
            match found.as_ref().map(kind) {
                None => make_unmentioned(at.as_fd(), &component)?,
                Some(FileType::Directory) => {}
                Some(FileType::Symlink) => {
                    links += 1;
                    if links > MOST_LINKS {
                        return Err(Errno::LOOP.into());
                    }
                    let target = readlinkat(&at, component.as_slice(), Vec::new())?.into_bytes();
                    if target.starts_with(b"/") {
                        done.clear();
                        at = self.open_directory(b"")?;
                    }
                    todo.extend(target.split(|byte| *byte == b'/').rev().map(<[u8]>::to_vec));
                    continue;
                }
                Some(_) if found.as_ref().is_some_and(is_whiteout) => {
                    make_unmentioned(at.as_fd(), &component)?;
                }
                Some(_) => return Err(Errno::NOTDIR.into()),
            }
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            at = openat(&at, component.as_slice(), flags, Mode::empty())?;
            done.push(component);
        }
        Ok(at)
    }
}

/// Makes a directory that the archive doesn't mention itself, or only later.
fn make_unmentioned(dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<()> {
    make_directory(dir, name)?;
    // Whatever our umask is.
    Ok(fchmod(open(dir, name)?, Mode::from_raw_mode(0o755))?)
}

/// What is at `name`, not followed if it is a symlink.
pub fn stat(dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<Option<Stat>> {
    match statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(found) => Ok(Some(found)),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// What kind of file it is.
pub fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

/// Whether it hides what lies below it.
pub fn is_whiteout(stat: &Stat) -> bool {
    kind(stat) == FileType::CharacterDevice && stat.st_rdev == 0
}

/// Makes way for a new entry at `name`.
pub fn clear(dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<()> {
    match unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(_) => linux::remove::tree_in(dir, &CString::new(name)?),
    }
}

/// Makes a directory, or finds one. It hides those below it if a whiteout was there.
pub fn make_directory(dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<()> {
    match mkdirat(dir, name, Mode::RWXU) {
        Err(Errno::EXIST) => {}
        Ok(()) if take_mark(dir, name)? => return make_opaque(open(dir, name)?.as_fd()),
        done => return Ok(done?),
    }
    match stat(dir, name)? {
        Some(found) if kind(&found) == FileType::Directory => Ok(()),
        found => {
            clear(dir, name)?;
            mkdirat(dir, name, Mode::RWXU)?;
            if found.as_ref().is_some_and(is_whiteout) {
                make_opaque(open(dir, name)?.as_fd())?;
            }
            Ok(())
        }
    }
}

/// Opens a directory that isn't a symlink.
pub fn open(dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(dir, name, flags, Mode::empty())?)
}

/// Hides `name` of the layers below. What this layer itself has there stays. Says whether it took a file to do so.
pub fn white_out(dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<bool> {
    match stat(dir, name)? {
        Some(found) if kind(&found) == FileType::Directory => {
            make_opaque(open(dir, name)?.as_fd())?;
            return Ok(false);
        }
        Some(_) => return Ok(false),
        None => {}
    }
    // Everybody may make this one device, since Linux 5.8, on file systems that know devices.
    match mknodat(dir, name, FileType::CharacterDevice, Mode::empty(), 0) {
        Ok(()) => Ok(false),
        Err(error) if can_not(error) => make_mark(dir, &[WHITEOUT, name].concat()).map(|()| true),
        Err(error) => Err(error.into()),
    }
}

/// Hides the whole content that the layers below have in this directory.
pub fn make_opaque(dir: BorrowedFd<'_>) -> io::Result<()> {
    match fsetxattr(dir, OPAQUE, b"y", XattrFlags::empty()) {
        Err(error) if can_not(error) => make_mark(dir, OPAQUE_FILE),
        done => Ok(done?),
    }
}

/// Takes the file away that hides `name`, where there is something new now. Says whether there was one.
pub fn take_mark(dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<bool> {
    match unlinkat(dir, [WHITEOUT, name].concat(), AtFlags::empty()) {
        Ok(()) => Ok(true),
        Err(Errno::NOENT | Errno::NAMETOOLONG) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Whether this is how a file system says that it has no such thing, rather than that it is full or broken.
fn can_not(error: Errno) -> bool {
    matches!(
        error,
        Errno::PERM | Errno::ACCESS | Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS
    )
}

fn make_mark(dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(dir, name, flags, Mode::RUSR)?;
    Ok(())
}
