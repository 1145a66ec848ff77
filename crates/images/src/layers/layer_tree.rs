//! The directory that a layer is unpacked into. The kernel resolves every path with that directory as the root
//! (openat2 with RESOLVE_IN_ROOT), so no symlink leads out of it.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use linux::layer_merge::{OPAQUE_MARKER, OPAQUE_XATTR, WHITEOUT_PREFIX};
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat, XattrFlags, fchmod, fsetxattr, fstat,
    mkdirat, mknodat, openat, openat2, readlinkat, statat, unlinkat,
};
use rustix::io::Errno;

/// The kernel's own limit for symlinks in a path.
const MAX_SYMLINKS: usize = 40;

/// The root directory of a layer that is being unpacked.
#[derive(Debug)]
pub struct LayerTree {
    root: OwnedFd,
    /// The most recently opened directory: consecutive entries are mostly in the same one.
    last: Option<(Vec<u8>, OwnedFd)>,
}

impl LayerTree {
    /// Unpacks into `root`.
    pub fn new(root: OwnedFd) -> LayerTree {
        LayerTree { root, last: None }
    }

    /// The root directory.
    pub fn root(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }

    /// Opens the directory at this path, and creates missing directories.
    pub fn directory(&mut self, components: &[&[u8]]) -> io::Result<BorrowedFd<'_>> {
        let path = components.join(&b"/"[..]);
        if self.last.as_ref().is_none_or(|(last, _)| *last != path) {
            let dir = match self.open_directory(&path) {
                // A component is missing or is a whiteout.
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
        // EAGAIN: a rename anywhere on the machine raced with the lookup.
        loop {
            match openat2(&self.root, path, flags, Mode::empty(), resolve) {
                Err(Errno::AGAIN) => {}
                done => return Ok(done?),
            }
        }
    }

    /// Stats an entry without following a symlink; `None` if it or its directory is missing.
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

    /// Drops the cached directory, which may have been replaced.
    pub fn clear_cache(&mut self) {
        self.last = None;
    }

    /// Walks the components and creates missing directories. Follows symlinks itself, since their targets may be
    /// missing too.
    fn make_directories(&self, components: &[&[u8]]) -> io::Result<OwnedFd> {
        let mut remaining: Vec<Vec<u8>> = components.iter().rev().map(|c| c.to_vec()).collect();
        // The resolved path from the root to `at`, without symlinks and `..`.
        let mut resolved: Vec<Vec<u8>> = Vec::new();
        let mut links = 0;
        let mut at = self.open_directory(b"")?;
        while let Some(component) = remaining.pop() {
            match component.as_slice() {
                b"" | b"." => continue,
                b".." => {
                    resolved.pop();
                    at = self.open_directory(&resolved.join(&b"/"[..]))?;
                    continue;
                }
                _ => {}
            }
            let found = stat(at.as_fd(), &component)?;
            match found.as_ref().map(kind) {
                None => make_implicit_directory(at.as_fd(), &component)?,
                Some(FileType::Directory) => {}
                Some(FileType::Symlink) => {
                    links += 1;
                    if links > MAX_SYMLINKS {
                        return Err(Errno::LOOP.into());
                    }
                    let target = readlinkat(&at, component.as_slice(), Vec::new())?.into_bytes();
                    if target.starts_with(b"/") {
                        resolved.clear();
                        at = self.open_directory(b"")?;
                    }
                    remaining.extend(target.split(|byte| *byte == b'/').rev().map(<[u8]>::to_vec));
                    continue;
                }
                Some(_) if found.as_ref().is_some_and(is_whiteout) => {
                    make_implicit_directory(at.as_fd(), &component)?;
                }
                Some(_) => return Err(Errno::NOTDIR.into()),
            }
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            at = openat(&at, component.as_slice(), flags, Mode::empty())?;
            resolved.push(component);
        }
        Ok(at)
    }
}

/// Creates a parent directory for which the archive has no entry, or only a later one.
fn make_implicit_directory(dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<()> {
    make_directory(dir, name)?;
    // Overrides the umask.
    Ok(fchmod(open(dir, name)?, Mode::from_raw_mode(0o755))?)
}

/// Stats `name` without following a symlink.
pub fn stat(dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<Option<Stat>> {
    match statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(found) => Ok(Some(found)),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The file type.
pub fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

/// Whether this is overlayfs's whiteout: a character device 0/0.
pub fn is_whiteout(stat: &Stat) -> bool {
    kind(stat) == FileType::CharacterDevice && stat.st_rdev == 0
}

/// Removes `name`, recursively, to make room for a new entry.
pub fn remove_entry(dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<()> {
    match unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(_) => linux::remove::tree_in(dir, &CString::new(name)?),
    }
}

/// Creates a directory unless it exists. The directory becomes opaque if it replaces a whiteout.
pub fn make_directory(dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<()> {
    match mkdirat(dir, name, Mode::RWXU) {
        Err(Errno::EXIST) => {}
        Ok(()) if remove_whiteout_file(dir, name)? => return set_opaque(open(dir, name)?.as_fd()),
        done => return Ok(done?),
    }
    match stat(dir, name)? {
        Some(found) if kind(&found) == FileType::Directory => Ok(()),
        found => {
            remove_entry(dir, name)?;
            mkdirat(dir, name, Mode::RWXU)?;
            if found.as_ref().is_some_and(is_whiteout) {
                set_opaque(open(dir, name)?.as_fd())?;
            }
            Ok(())
        }
    }
}

/// Opens a directory; fails for a symlink.
pub fn open(dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(dir, name, flags, Mode::empty())?)
}

/// Hides `name` of lower layers, but not this layer's own entry of that name. Returns whether it created a marker file.
pub fn add_whiteout(dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<bool> {
    match stat(dir, name)? {
        Some(found) if kind(&found) == FileType::Directory => {
            set_opaque(open(dir, name)?.as_fd())?;
            return Ok(false);
        }
        Some(_) => return Ok(false),
        None => {}
    }
    // Since Linux 5.8 unprivileged users may create this device, on file systems that support devices.
    match mknodat(dir, name, FileType::CharacterDevice, Mode::empty(), 0) {
        Ok(()) => Ok(false),
        Err(error) if is_unsupported(error) => {
            create_marker(dir, &[WHITEOUT_PREFIX, name].concat()).map(|()| true)
        }
        Err(error) => Err(error.into()),
    }
}

/// Makes a directory opaque: it hides the content of the same directory in lower layers.
pub fn set_opaque(dir: BorrowedFd<'_>) -> io::Result<()> {
    match fsetxattr(dir, OPAQUE_XATTR, b"y", XattrFlags::empty()) {
        Err(error) if is_unsupported(error) => create_marker(dir, OPAQUE_MARKER),
        done => Ok(done?),
    }
}

/// Removes the marker file that hides `name`, because this layer now has an entry of that name. Returns whether the marker
/// existed.
pub fn remove_whiteout_file(dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<bool> {
    match unlinkat(dir, [WHITEOUT_PREFIX, name].concat(), AtFlags::empty()) {
        Ok(()) => Ok(true),
        Err(Errno::NOENT | Errno::NAMETOOLONG) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Whether the file system lacks the feature, as opposed to being full or broken.
fn is_unsupported(error: Errno) -> bool {
    matches!(
        error,
        Errno::PERM | Errno::ACCESS | Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS
    )
}

fn create_marker(dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(dir, name, flags, Mode::RUSR)?;
    Ok(())
}
