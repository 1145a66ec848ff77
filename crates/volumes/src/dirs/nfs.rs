//! Directories of NFS servers that the node has mounted already.

use std::path::{Component, Path, PathBuf};

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

/// Where this node has `path` of `server` mounted.
pub(super) fn find(server: &str, path: &str) -> Result<PathBuf, VolumeError> {
    check(Path::new(path))?;
    let table = Path::new("/proc/self/mountinfo");
    let mounts = std::fs::read_to_string(table).map_err(failed("read", table))?;
    locate(&mounts, server, path).ok_or_else(|| VolumeError::NotMounted {
        server: server.to_owned(),
        path: path.to_owned(),
    })
}

/// The same, in the text of a mountinfo: of the mounts that hold the directory, the one that is closest to it.
fn locate(mounts: &str, server: &str, path: &str) -> Option<PathBuf> {
    let wanted = Path::new(path);
    let mut best: Option<(usize, PathBuf)> = None;
    for line in mounts.lines() {
        let Some((before, after)) = line.split_once(" - ") else {
            continue;
        };
        let before: Vec<_> = before.split(' ').collect();
        let after: Vec<_> = after.split(' ').collect();
        let (&[_, _, _, root, place, ..], &[kind, source, ..]) = (&before[..], &after[..]) else {
            continue;
        };
        let Some((host, export)) = source.rsplit_once(':') else {
            continue;
        };
        if !kind.starts_with("nfs") || host.trim_matches(['[', ']']) != server {
            continue;
        }
        // What is mounted is a part of the export if somebody has bound it elsewhere.
        let export = Path::new(&unescaped(export)).join(unescaped(root).trim_start_matches('/'));
        let Ok(rest) = wanted.strip_prefix(&export) else {
            continue;
        };
        let depth = export.components().count();
        if best.as_ref().is_none_or(|(deepest, _)| depth >= *deepest) {
            let place = Path::new(&unescaped(place)).join(rest);
            best = Some((depth, place.components().collect()));
        }
    }
    best.map(|(_, place)| place)
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
            let error = find("nas", path).unwrap_err().to_string();
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
        let at =
            |server, path| locate(mounts, server, path).map(|place| place.display().to_string());
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
