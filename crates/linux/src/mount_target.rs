//! Opens the mount points of a container: resolves a path in another root directory as programs in that root would, and creates it
//! if it is missing.
//!
//! This module reads each symbolic link itself, and the kernel follows none. So no link leads out of the root, the targets of
//! dangling links can be created, and magic links of `/proc` (`/proc/1/root`) are resolved by their text only.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// The kernel's own limit on symbolic links.
const MAX_LINKS: usize = 40;

/// Retries for openat2, which returns EAGAIN if directories are renamed meanwhile.
const ATTEMPTS: usize = 64;

/// The kind of file to create if the path is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetKind {
    /// A directory.
    Directory,
    /// An empty file; missing parent directories are created too.
    File,
}

/// Opens `path` in the directory `root` as `O_PATH`; missing components are created.
pub fn open_or_create(root: &Path, path: &Path, kind: TargetKind) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(CWD, root, flags, Mode::empty())?;
    // The directories between the root and the current position.
    let mut ancestors: Vec<OwnedFd> = Vec::new();
    let mut remaining = components(path);
    let mut links = 0;
    while let Some(name) = remaining.pop_front() {
        if name == "/" {
            ancestors.clear();
            continue;
        }
        if name == ".." {
            ancestors.pop();
            continue;
        }
        let dir = ancestors.last().unwrap_or(&root);
        let kind = if remaining.is_empty() {
            kind
        } else {
            TargetKind::Directory
        };
        let found = open_or_create_entry(dir, &name, kind)?;
        if !is_link(&found)? {
            ancestors.push(found);
            continue;
        }
        links += 1;
        if links > MAX_LINKS {
            return Err(Errno::LOOP.into());
        }
        let text = rustix::fs::readlinkat(&found, "", Vec::new())?;
        let mut expanded = components(Path::new(OsStr::from_bytes(text.as_bytes())));
        expanded.append(&mut remaining);
        remaining = expanded;
    }
    Ok(ancestors.pop().unwrap_or(root))
}

/// Opens `path` below `dir` as `O_PATH`; `None` if it does not exist. A symbolic link in the path, also as its last component, is
/// an error.
pub fn open_beneath(dir: impl AsFd, path: &Path) -> io::Result<Option<OwnedFd>> {
    if path.as_os_str().is_empty() {
        return Ok(Some(dir.as_fd().try_clone_to_owned()?));
    }
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    for _ in 0..ATTEMPTS {
        match rustix::fs::openat2(dir.as_fd(), path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
            opened => return Ok(Some(opened?)),
        }
    }
    Err(Errno::AGAIN.into())
}

/// Changes the working directory to `path`, unless the path contains a magic link of `/proc`: a container must not reach
/// descriptors that its process holds open before exec.
pub fn chdir_without_magic_links(path: &Path) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::NO_MAGICLINKS;
    let dir = rustix::fs::openat2(CWD, path, flags, Mode::empty(), resolve)?;
    Ok(rustix::process::fchdir(dir)?)
}

fn components(path: &Path) -> VecDeque<OsString> {
    let names = path
        .components()
        .filter(|part| *part != Component::CurDir)
        .map(|part| part.as_os_str().to_owned());
    names.collect()
}

fn open_or_create_entry(dir: &OwnedFd, name: &OsStr, kind: TargetKind) -> Result<OwnedFd, Errno> {
    let open = || {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(dir, name, flags, Mode::empty())
    };
    match open() {
        Err(Errno::NOENT) => {}
        opened => return opened,
    }
    let created = match kind {
        TargetKind::Directory => rustix::fs::mkdirat(dir, name, Mode::from_raw_mode(0o755)),
        TargetKind::File => {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            rustix::fs::openat(dir, name, flags, Mode::from_raw_mode(0o644)).map(drop)
        }
    };
    match created {
        // EEXIST: another process was faster.
        Ok(()) | Err(Errno::EXIST) => open(),
        Err(error) => Err(error),
    }
}

fn is_link(file: &OwnedFd) -> Result<bool, Errno> {
    let mode = rustix::fs::fstat(file)?.st_mode;
    Ok(FileType::from_raw_mode(mode).is_symlink())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_resolve_within_the_root() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap().join("root");
        fs::create_dir_all(root.join("var/lib")).unwrap();
        fs::create_dir(root.join("run")).unwrap();
        fs::create_dir(root.join("etc")).unwrap();
        fs::write(root.join("etc/file"), "kept").unwrap();
        symlink("/run", root.join("var/run")).unwrap();
        symlink("../run/deep/stub.conf", root.join("etc/resolv.conf")).unwrap();
        symlink("../../../../../outside", root.join("var/lib/up")).unwrap();
        symlink("lib", root.join("var/link")).unwrap();
        symlink("loop", root.join("loop")).unwrap();
        let at = |path: &str, kind| {
            let found = open_or_create(&root, Path::new(path), kind)?;
            fs::read_link(format!("/proc/self/fd/{}", found.as_raw_fd()))
        };
        for (path, kind, resolved) in [
            ("/", TargetKind::Directory, ""),
            ("/var/run", TargetKind::Directory, "run"),
            ("/var/./run/new/er", TargetKind::Directory, "run/new/er"),
            ("/etc/resolv.conf", TargetKind::File, "run/deep/stub.conf"),
            ("/etc/file", TargetKind::File, "etc/file"),
            ("/etc/new/file", TargetKind::File, "etc/new/file"),
            ("/var/lib/up/x", TargetKind::Directory, "outside/x"),
            ("/var/link/../beside", TargetKind::Directory, "var/beside"),
            ("relative", TargetKind::Directory, "relative"),
        ] {
            let found = at(path, kind).unwrap();
            assert_eq!(found, root.join(resolved).components().as_path(), "{path}");
            assert_eq!(found.is_dir(), kind == TargetKind::Directory, "{path}");
        }
        assert_eq!(fs::read_to_string(root.join("etc/file")).unwrap(), "kept");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        for path in ["/loop", "/loop/x", "/etc/file/below"] {
            assert!(at(path, TargetKind::Directory).is_err(), "{path}");
        }
    }

    #[test]
    fn beneath_rejects_symbolic_links() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("top/real")).unwrap();
        fs::write(dir.path().join("top/real/file"), "").unwrap();
        symlink("real", dir.path().join("top/inside")).unwrap();
        symlink("/etc", dir.path().join("top/outside")).unwrap();
        let top = fs::File::open(dir.path().join("top")).unwrap();
        let at = |path: &str| open_beneath(&top, Path::new(path));
        for (path, exists) in [("", true), ("real/file", true), ("none", false)] {
            assert_eq!(at(path).unwrap().is_some(), exists, "{path}");
        }
        assert!(at("real/file/below").unwrap().is_none());
        for path in [
            "inside",
            "inside/file",
            "outside",
            "outside/passwd",
            "../top",
            "/etc",
        ] {
            assert!(at(path).is_err(), "{path}");
        }
    }

    #[test]
    fn chdir_rejects_magic_links() {
        let dir = tempfile::tempdir().unwrap();
        let open = fs::File::open(dir.path()).unwrap();
        let magic = format!("/proc/self/fd/{}", open.as_raw_fd());
        symlink(&magic, dir.path().join("link")).unwrap();
        // ELOOP is also the error for too many symbolic links.
        for path in [Path::new(&magic), &dir.path().join("link")] {
            let refused = chdir_without_magic_links(path).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::ELOOP));
        }
        chdir_without_magic_links(dir.path()).unwrap();
        chdir_without_magic_links(Path::new("/")).unwrap();
    }
}
