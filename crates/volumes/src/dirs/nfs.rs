//! Directories of NFS servers that the node has mounted already.

use std::cmp::Reverse;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::{VolumeError, failed};
use crate::content::ContentError;

/// Requires an absolute path without `..`, like the API's check of node paths.
pub(super) fn check(path: &Path) -> Result<(), VolumeError> {
    if path.is_absolute() && !path.components().any(|part| part == Component::ParentDir) {
        return Ok(());
    }
    let path = path.display().to_string();
    Err(VolumeError::Content(ContentError::Path(path)))
}

/// Opens the directory `path` of `server` in this node's mount of it.
///
/// The pod may not be allowed to mount paths of the node, and users of the server can create symlinks there. So the
/// lookup below the mount follows no symlinks, and the result must be on a mount of that server.
pub(super) fn open(server: &str, path: &str) -> Result<OwnedFd, VolumeError> {
    check(Path::new(path))?;
    let table = Path::new("/proc/self/mountinfo");
    let text = std::fs::read_to_string(table).map_err(failed("read", table))?;
    let mounts = parse(&text);
    let not_mounted = || VolumeError::NotMounted {
        server: server.to_owned(),
        path: path.to_owned(),
    };
    let (mount, rest) = locate(&mounts, server, path).ok_or_else(not_mounted)?;
    let dir_path: PathBuf = mount.mount_point.join(rest).components().collect();
    let top = open_directory(&mount.mount_point).map_err(failed("open", &mount.mount_point))?;
    let dir = match linux::mount_target::open_beneath(&top, rest) {
        Ok(Some(dir)) => dir,
        Ok(None) => return Err(VolumeError::Missing(dir_path)),
        Err(error) if Errno::from_io_error(&error) == Some(Errno::LOOP) => {
            return Err(VolumeError::NfsLink {
                server: server.to_owned(),
                path: path.to_owned(),
            });
        }
        Err(error) => return Err(failed("open", &dir_path)(error)),
    };
    // Another file system may be mounted on the directory or on one of its parents.
    let id = linux::mountinfo::mount_id(&dir).map_err(failed("stat", &dir_path))?;
    let is_expected = |mount: &Mount| {
        let rest = mount.path_below(server, path);
        mount.id == id && rest.is_some_and(|rest| mount.mount_point.join(rest) == dir_path)
    };
    if !mounts.iter().any(is_expected) {
        return Err(not_mounted());
    }
    let is_foreign = |mount: &&Mount| {
        mount.mount_point != dir_path
            && mount.mount_point.starts_with(&dir_path)
            && !mount.is_of(server)
    };
    match mounts.iter().find(is_foreign) {
        Some(foreign) => Err(VolumeError::NfsContainsMount {
            server: server.to_owned(),
            path: path.to_owned(),
            other: foreign.mount_point.clone(),
        }),
        None => Ok(dir),
    }
}

/// Opens a mount point, whose path contains no symlinks.
fn open_directory(mount_point: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::NO_SYMLINKS;
    Ok(rustix::fs::openat2(
        CWD,
        mount_point,
        flags,
        Mode::empty(),
        resolve,
    )?)
}

/// A line of mountinfo.
struct Mount {
    id: u64,
    mount_point: PathBuf,
    /// For NFS: the server and its mounted directory.
    export: Option<(String, PathBuf)>,
}

impl Mount {
    fn is_of(&self, server: &str) -> bool {
        self.export.as_ref().is_some_and(|(host, _)| host == server)
    }

    /// The path below the mount of a directory of a server, if this mount contains it.
    fn path_below<'a>(&self, server: &str, path: &'a str) -> Option<&'a Path> {
        let (host, dir) = self.export.as_ref()?;
        let rest = Path::new(path).strip_prefix(dir).ok()?;
        (host == server).then_some(rest)
    }
}

fn parse(text: &str) -> Vec<Mount> {
    text.lines().filter_map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<Mount> {
    let (before, after) = line.split_once(" - ")?;
    let before: Vec<_> = before.split(' ').collect();
    let after: Vec<_> = after.split(' ').collect();
    let (&[id, _, _, root, mount_point, ..], &[kind, source, ..]) = (&before[..], &after[..])
    else {
        return None;
    };
    let export = source.rsplit_once(':').filter(|_| kind.starts_with("nfs"));
    // The root is not / for a bind mount of a subdirectory of the export.
    let export = export.map(|(host, dir)| {
        let dir = Path::new(&unescape(dir)).join(unescape(root).trim_start_matches('/'));
        (host.trim_matches(['[', ']']).to_owned(), dir)
    });
    Some(Mount {
        id: id.parse().ok()?,
        mount_point: unescape(mount_point).into(),
        export,
    })
}

/// The closest mount that contains the directory, and the directory's path below it.
fn locate<'a, 'b>(
    mounts: &'a [Mount],
    server: &str,
    path: &'b str,
) -> Option<(&'a Mount, &'b Path)> {
    let candidates = mounts.iter().filter_map(|mount| {
        let rest = mount.path_below(server, path)?;
        Some((mount, rest))
    });
    // `max_by_key` returns the last of equally close mounts, which covers the others.
    candidates.max_by_key(|(_, rest)| Reverse(rest.components().count()))
}

fn unescape(field: &str) -> String {
    String::from_utf8_lossy(&linux::mountinfo::unescape(field.as_bytes())).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_with_dot_dot_are_rejected() {
        check(Path::new("/data/x")).unwrap();
        for path in ["data", "/data/../etc", ""] {
            check(Path::new(path)).unwrap_err();
            let error = open("nas", path).unwrap_err().to_string();
            assert_eq!(error, format!("invalid path: {path}"));
        }
    }

    #[test]
    fn closest_mount_of_the_server_is_found() {
        let mounts = "\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 22 0:40 / /home rw - nfs4 nas:/export/home rw,vers=4.2
41 22 0:41 / /data rw shared:7 master:2 - nfs nas:/export rw
42 22 0:42 /sub /bound rw - nfs4 nas:/other rw
43 22 0:43 / /with\\040space rw - nfs4 fd00::1:/six rw
44 22 0:44 / /usb rw - vfat nas:/fake rw
";
        let mounts = parse(mounts);
        let at = |server, path| {
            let (mount, rest) = locate(&mounts, server, path)?;
            let dir_path: PathBuf = mount.mount_point.join(rest).components().collect();
            Some(dir_path.display().to_string())
        };
        assert_eq!(at("nas", "/export/home/me").as_deref(), Some("/home/me"));
        assert_eq!(at("nas", "/export/home").as_deref(), Some("/home"));
        assert_eq!(at("nas", "/export/x").as_deref(), Some("/data/x"));
        assert_eq!(at("nas", "/other/sub/y").as_deref(), Some("/bound/y"));
        assert_eq!(at("fd00::1", "/six").as_deref(), Some("/with space"));
        for (server, path) in [
            ("nas", "/other"),
            ("nas2", "/export"),
            ("nas", "/fake"),
            ("nas", "/exports"),
        ] {
            assert_eq!(at(server, path), None, "{server}:{path}");
        }
    }
}
