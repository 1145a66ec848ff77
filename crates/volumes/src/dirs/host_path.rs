//! Checks the type of a hostPath.

use std::fs::FileType;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

use super::{VolumeError, failed};
use crate::HostPathKind;

/// Checks a path of the node, and creates it if its type allows that.
pub(super) fn check(path: &Path, kind: HostPathKind) -> Result<(), VolumeError> {
    use HostPathKind::{
        BlockDevice, CharDevice, Directory, DirectoryOrCreate, File, FileOrCreate, Socket,
        Unchecked,
    };
    let exists = path.exists();
    match kind {
        // No check; container runtimes create a missing directory.
        Unchecked if exists => Ok(()),
        Unchecked | DirectoryOrCreate if !exists => create_dir(path),
        FileOrCreate if !exists => create_file(path),
        Unchecked | DirectoryOrCreate | Directory => {
            require_type(path, "directory", FileType::is_dir)
        }
        FileOrCreate | File => require_type(path, "file", FileType::is_file),
        Socket => require_type(path, "socket file", FileTypeExt::is_socket),
        CharDevice => require_type(path, "character device", FileTypeExt::is_char_device),
        BlockDevice => require_type(path, "block device", FileTypeExt::is_block_device),
    }
}

fn require_type(
    path: &Path,
    expected: &'static str,
    has_type: fn(&FileType) -> bool,
) -> Result<(), VolumeError> {
    let found = match std::fs::metadata(path).map(|status| status.file_type()) {
        Ok(found) if has_type(&found) => return Ok(()),
        found => found,
    };
    Err(VolumeError::HostPath {
        path: path.to_owned(),
        expected,
        found: found.and_then(|found| {
            type_name(found).ok_or_else(|| {
                io::Error::other(
                    "only recognise file, directory, socket, block device and character device",
                )
            })
        }),
    })
}

/// The API's name of a file type.
fn type_name(kind: FileType) -> Option<&'static str> {
    Some(match kind {
        kind if kind.is_dir() => "Directory",
        kind if kind.is_file() => "File",
        kind if kind.is_socket() => "Socket",
        kind if kind.is_char_device() => "CharDevice",
        kind if kind.is_block_device() => "BlockDevice",
        _ => return None,
    })
}

fn create_dir(path: &Path) -> Result<(), VolumeError> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(path)
        .map_err(failed("create", path))
}

fn create_file(path: &Path) -> Result<(), VolumeError> {
    std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o644)
        .open(path)
        .map(|_| ())
        .map_err(failed("create", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_type_accepts_only_itself() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        let socket = dir.path().join("socket");
        std::fs::write(&file, "x").unwrap();
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let paths = [
            ("dir", dir.path()),
            ("file", file.as_path()),
            ("socket", socket.as_path()),
            ("char", Path::new("/dev/null")),
            ("none", &dir.path().join("none")),
        ];
        let kinds = ["Directory", "File", "Socket", "CharDevice", "BlockDevice"];
        let mut lines = Vec::new();
        for (name, path) in paths {
            for kind in kinds {
                let result = match check(path, HostPathKind::from_api(kind).unwrap()) {
                    Ok(()) => "yes".to_owned(),
                    Err(error) => error
                        .to_string()
                        .replace(&*dir.path().to_string_lossy(), "DIR"),
                };
                lines.push(format!("{name} as {kind}: {result}"));
            }
        }
        insta::assert_snapshot!(lines.join("\n"));
    }

    #[test]
    fn missing_paths_are_created_if_allowed() {
        let dir = tempfile::tempdir().unwrap();
        let new = |name: &str| dir.path().join(name);
        check(&new("a/b"), HostPathKind::DirectoryOrCreate).unwrap();
        check(&new("c/d"), HostPathKind::Unchecked).unwrap();
        check(&new("file"), HostPathKind::FileOrCreate).unwrap();
        assert!(new("a/b").is_dir() && new("c/d").is_dir() && new("file").is_file());
        check(&new("file"), HostPathKind::Unchecked).unwrap();
        check(&new("file"), HostPathKind::FileOrCreate).unwrap();
        check(&new("file"), HostPathKind::DirectoryOrCreate).unwrap_err();
        // As upstream, a file's parent directory is not created.
        check(&new("none/file"), HostPathKind::FileOrCreate).unwrap_err();
        assert!(HostPathKind::from_api("Pipe").is_none());
    }
}
