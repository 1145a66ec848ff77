//! Directories of NFS servers that the node has mounted already.

use std::cmp::Reverse;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::{VolumeError, failed};
use crate::content::ContentError;

/// Where the user says that it is mounted.
pub(super) fn told(place: &Path) -> Result<PathBuf, VolumeError> {
    check(place)?;
    Ok(place.to_owned())
}

/// As the API has it for paths of nodes: absolute, and never up. A server would not be led out of what it exports either.
fn check(path: &Path) -> Result<(), VolumeError> {
    if path.is_absolute() && !path.components().any(|part| part == Component::ParentDir) {
        return Ok(());
    }
    let path = path.display().to_string();
    Err(VolumeError::Content(ContentError::Path(path)))
}

/// Opens the directory `path` of `server`, where this node has it mounted.
///
/// The volume may be that of a pod that may mount no path of the node, and whoever writes to the server may make links there.
/// So the directory is found below the mount by its names alone, and what was found is on a mount of that server.
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
    let place: PathBuf = mount.place.join(rest).components().collect();
    let top = open_directory(&mount.place).map_err(failed("open", &mount.place))?;
    let dir = match linux::place::beneath(&top, rest) {
        Ok(Some(dir)) => dir,
        Ok(None) => return Err(VolumeError::Missing(place)),
        Err(error) if Errno::from_io_error(&error) == Some(Errno::LOOP) => {
            return Err(VolumeError::NfsLink {
                server: server.to_owned(),
                path: path.to_owned(),
            });
        }
        Err(error) => return Err(failed("open", &place)(error)),
    };
    // Something else may be mounted over it, or on the way.
    let id = linux::mounted::id(&dir).map_err(failed("look at", &place))?;
    let is_it = |mount: &Mount| {
        let rest = mount.holds(server, path);
        mount.id == id && rest.is_some_and(|rest| mount.place.join(rest) == place)
    };
    if !mounts.iter().any(is_it) {
        return Err(not_mounted());
    }
    let is_foreign = |mount: &&Mount| {
        mount.place != place && mount.place.starts_with(&place) && !mount.is_of(server)
    };
    match mounts.iter().find(is_foreign) {
        Some(foreign) => Err(VolumeError::NfsHoldsOther {
            server: server.to_owned(),
            path: path.to_owned(),
            other: foreign.place.clone(),
        }),
        None => Ok(dir),
    }
}

/// Opens the directory at a mount point, whose path has no links.
fn open_directory(place: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::NO_SYMLINKS;
    Ok(rustix::fs::openat2(
        CWD,
        place,
        flags,
        Mode::empty(),
        resolve,
    )?)
}

/// A line of a mountinfo.
struct Mount {
    id: u64,
    place: PathBuf,
    /// The server, and the directory of it that is mounted, if it is NFS.
    export: Option<(String, PathBuf)>,
}

impl Mount {
    fn is_of(&self, server: &str) -> bool {
        self.export.as_ref().is_some_and(|(host, _)| host == server)
    }

    /// Where below the mount a directory of a server is, if it can be there.
    fn holds<'a>(&self, server: &str, path: &'a str) -> Option<&'a Path> {
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
    let (&[id, _, _, root, place, ..], &[kind, source, ..]) = (&before[..], &after[..]) else {
        return None;
    };
    let export = source.rsplit_once(':').filter(|_| kind.starts_with("nfs"));
    // What is mounted is a part of the export if somebody has bound it elsewhere.
    let export = export.map(|(host, dir)| {
        let dir = Path::new(&unescaped(dir)).join(unescaped(root).trim_start_matches('/'));
        (host.trim_matches(['[', ']']).to_owned(), dir)
    });
    Some(Mount {
        id: id.parse().ok()?,
        place: unescaped(place).into(),
        export,
    })
}

/// Of the mounts that hold the directory, the one that is closest to it, and where below it the directory is.
fn locate<'a, 'b>(
    mounts: &'a [Mount],
    server: &str,
    path: &'b str,
) -> Option<(&'a Mount, &'b Path)> {
    let holding = mounts.iter().filter_map(|mount| {
        let rest = mount.holds(server, path)?;
        Some((mount, rest))
    });
    // Of those that are equally close the last, which covers the others.
    holding.max_by_key(|(_, rest)| Reverse(rest.components().count()))
}

fn unescaped(field: &str) -> String {
    String::from_utf8_lossy(&linux::mounted::unescape(field.as_bytes())).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_path_leads_up() {
        assert_eq!(told(Path::new("/data/x")).unwrap(), Path::new("/data/x"));
        for path in ["data", "/data/../etc", ""] {
            told(Path::new(path)).unwrap_err();
            let error = open("nas", path).unwrap_err().to_string();
            assert_eq!(error, format!("invalid path: {path}"));
        }
    }

    #[test]
    fn mounts_of_a_server_are_found() {
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
            let place: PathBuf = mount.place.join(rest).components().collect();
            Some(place.display().to_string())
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
