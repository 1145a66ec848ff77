//! Opens a path below a directory whose content is not trusted.
//!
//! A container that can write there can replace a directory by a symbolic link at any time. So the kernel resolves the path and
//! never leaves the directory (`RESOLVE_BENEATH`), and the result is a descriptor. Mount that descriptor, never the path.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// Attempts for openat2, which returns EAGAIN if directories are renamed meanwhile.
const ATTEMPTS: usize = 64;

/// Why a subPath cannot be opened. The messages for `Absolute` and `Backsteps` are upstream's.
#[derive(Debug, thiserror::Error)]
pub enum SubPathError {
    /// It is absolute.
    #[error("error SubPath `{0}` must not be an absolute path")]
    Absolute(String),
    /// It contains `..`.
    #[error("unable to provision SubPath `{0}`: must not contain '..'")]
    Backsteps(String),
    /// A symbolic link in it leads out of the volume, is a magic link of `/proc`, or is part of a loop.
    #[error("subPath {0:?} is not within its volume")]
    Outside(String),
    /// It does not exist, and must not be created.
    #[error("subPath {0:?} does not exist in its volume")]
    Missing(String),
    /// Any other error.
    #[error("cannot open subPath {path:?} of its volume")]
    Io {
        /// The subPath.
        path: String,
        /// The error.
        #[source]
        source: io::Error,
    },
}

/// Opens `subpath` in the volume at `root` as `O_PATH`; with `create`, missing directories are created.
///
/// New directories get the permission bits of the volume's root, as upstream's do.
pub fn open(root: &Path, subpath: &str, create: bool) -> Result<OwnedFd, SubPathError> {
    if subpath.starts_with('/') {
        return Err(SubPathError::Absolute(subpath.to_owned()));
    }
    if subpath.split('/').any(|part| part == "..") {
        return Err(SubPathError::Backsteps(subpath.to_owned()));
    }
    let to_error = |error: Errno| match error {
        Errno::XDEV | Errno::LOOP => SubPathError::Outside(subpath.to_owned()),
        Errno::NOENT => SubPathError::Missing(subpath.to_owned()),
        error => SubPathError::Io {
            path: subpath.to_owned(),
            source: error.into(),
        },
    };
    // The node has created or checked the root of the volume, so that path is trusted.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(CWD, root, flags, Mode::empty()).map_err(to_error)?;
    let parts: Vec<_> = subpath
        .split('/')
        .filter(|part| !part.is_empty() && *part != ".")
        .collect();
    let path = parts.join("/");
    if path.is_empty() {
        return Ok(root);
    }
    match beneath(&root, &path) {
        Err(Errno::NOENT) if create => create_missing(&root, &path).map_err(to_error),
        opened => opened.map_err(to_error),
    }
}

/// Opens a path that must not leave `root` through any link.
fn beneath(root: &OwnedFd, path: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    for _ in 1..ATTEMPTS {
        match rustix::fs::openat2(root, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            opened => return opened,
        }
    }
    rustix::fs::openat2(root, path, flags, Mode::empty(), resolve)
}

/// Creates the missing directories of a path one by one, each in an open parent within the volume.
fn create_missing(root: &OwnedFd, path: &str) -> Result<OwnedFd, Errno> {
    let mode = rustix::fs::fstat(root)?.st_mode & 0o7777;
    let mut parent = root.try_clone().map_err(errno)?;
    let mut end = 0;
    while end < path.len() {
        let start = end;
        end = path[start + 1..]
            .find('/')
            .map_or(path.len(), |at| start + 1 + at);
        let name = path[start..end].trim_start_matches('/');
        let opened = match beneath(root, &path[..end]) {
            Err(Errno::NOENT) => match rustix::fs::mkdirat(&parent, name, Mode::RWXU) {
                Ok(()) => {
                    let made = beneath(root, &path[..end])?;
                    // Override the umask. A setgid parent has already passed on its group. fchmod rejects O_PATH descriptors; the
                    // /proc path refers to the same inode.
                    let this = format!("/proc/self/fd/{}", made.as_raw_fd());
                    rustix::fs::chmod(this.as_str(), Mode::from_raw_mode(mode))?;
                    made
                }
                // Another process has created it meanwhile, or it is a dangling link, for which `beneath` fails again.
                Err(Errno::EXIST) => beneath(root, &path[..end])?,
                Err(error) => return Err(error),
            },
            opened => opened?,
        };
        parent = opened;
    }
    Ok(parent)
}

fn errno(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::testing::swap_until;

    fn path_of(fd: &OwnedFd) -> std::path::PathBuf {
        fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap()
    }

    #[test]
    fn paths_in_the_volume_are_opened_or_created() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        fs::set_permissions(&root, fs::Permissions::from_mode(0o2775)).unwrap();
        fs::create_dir(root.join("real")).unwrap();
        fs::write(root.join("real/file"), "x").unwrap();
        symlink("real", root.join("link")).unwrap();
        let at = |path: &str| path_of(&open(&root, path, true).unwrap());
        assert_eq!(at(""), root);
        assert_eq!(at("./real//file"), root.join("real/file"));
        assert_eq!(at("link/file"), root.join("real/file"));
        assert_eq!(at("link/new/er"), root.join("real/new/er"));
        assert_eq!(at("a/b/c"), root.join("a/b/c"));
        assert_eq!(
            fs::metadata(root.join("a/b")).unwrap().mode() & 0o7777,
            0o2775
        );
        let missing = open(&root, "nothing", false).unwrap_err();
        assert_eq!(
            missing.to_string(),
            "subPath \"nothing\" does not exist in its volume"
        );
    }

    #[test]
    fn paths_out_of_the_volume_are_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("volume");
        fs::create_dir(&root).unwrap();
        fs::create_dir(dir.path().join("secret")).unwrap();
        symlink("../secret", root.join("up")).unwrap();
        symlink("/etc", root.join("absolute")).unwrap();
        symlink("../secret/new", root.join("dangling")).unwrap();
        symlink("/proc/self/root", root.join("magic")).unwrap();
        symlink("loop", root.join("loop")).unwrap();
        let mut lines = Vec::new();
        for path in [
            "up",
            "up/x",
            "absolute",
            "absolute/passwd",
            "dangling",
            "dangling/x",
            "magic/etc",
            "loop",
            "/etc",
            "../secret",
            "a/../../secret",
        ] {
            let error = open(&root, path, true).unwrap_err();
            lines.push(format!("{path}: {error}"));
        }
        insta::assert_snapshot!(lines.join("\n"));
        assert_eq!(fs::read_dir(dir.path().join("secret")).unwrap().count(), 0);
    }

    /// A container that repeatedly swaps a directory for a link never gets a path outside opened or created.
    #[test]
    fn swapping_links_never_leads_outside() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().canonicalize().unwrap();
        let root = base.join("volume");
        let outside = base.join("outside");
        fs::create_dir_all(root.join("real")).unwrap();
        fs::create_dir(&outside).unwrap();
        symlink("../outside", root.join("evil")).unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| swap_until(&done, &root.join("real"), &root.join("evil")));
            for turn in 0..3000 {
                if let Ok(fd) = open(&root, &format!("real/d{}", turn % 7), true) {
                    assert!(path_of(&fd).starts_with(&root), "{:?}", path_of(&fd));
                }
            }
            done.store(true, Ordering::Relaxed);
        });
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    }
}
