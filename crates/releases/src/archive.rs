//! Extracts one program from a `.tar.gz` without trusting the archive: only the member with the expected name is read, and no name in
//! the archive is used as a path.

use std::fs::OpenOptions;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use flate2::read::GzDecoder;

use crate::store::ReleaseStoreError;

/// Limit on the size of a program; upstream's are far smaller.
const MAX_PROGRAM_SIZE: u64 = 1 << 30;

/// Limit on the unpacked bytes that are searched for the member.
const MAX_ARCHIVE_SIZE: u64 = 4 << 30;

/// The program cannot be extracted.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The archive has unexpected contents.
    #[error("unexpected content of {archive}: {reason}")]
    Unexpected {
        /// Its file name.
        archive: String,
        /// The problem.
        reason: String,
    },
    /// The program cannot be written.
    #[error(transparent)]
    Store(#[from] ReleaseStoreError),
}

/// Writes the regular file `member` of `archive` to `to`, which must not exist, with mode 0755.
pub fn extract_program(archive: &Path, member: &str, to: &Path) -> Result<(), ArchiveError> {
    let unexpected = |reason: String| ArchiveError::Unexpected {
        archive: archive
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .trim_end_matches(".part")
            .to_owned(),
        reason,
    };
    let unreadable = |e: io::Error| unexpected(format!("it cannot be read ({e})"));
    let file = std::fs::File::open(archive).map_err(|source| ReleaseStoreError::Io {
        operation: "read",
        path: archive.to_path_buf(),
        source,
    })?;
    let mut tar = tar::Archive::new(GzDecoder::new(BufReader::new(file)).take(MAX_ARCHIVE_SIZE));
    // Raw, which skips extension headers: they may rename the next member or have any size.
    for entry in tar.entries().map_err(unreadable)?.raw(true) {
        let entry = entry.map_err(unreadable)?;
        if entry.path_bytes() != member.as_bytes() {
            continue;
        }
        let size = entry.size();
        if !entry.header().entry_type().is_file() {
            return Err(unexpected(format!("{member} in it is not a regular file")));
        }
        if size > MAX_PROGRAM_SIZE {
            return Err(unexpected(format!("{member} in it is {size} bytes large")));
        }
        return write_program(entry, size, to, unreadable);
    }
    Err(unexpected(format!("there is no {member} in it")))
}

/// Copies `size` bytes. A loop of its own, to distinguish errors of reading the archive from errors of writing the file.
fn write_program(
    mut from: impl Read,
    size: u64,
    to: &Path,
    unreadable: impl Fn(io::Error) -> ArchiveError,
) -> Result<(), ArchiveError> {
    let failed = |remaining| move |e| ReleaseStoreError::writing("write", to, Some(remaining), e);
    let mut program = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o755)
        .open(to)
        .map_err(failed(size))?;
    let mut buffer = vec![0; 256 << 10];
    let mut remaining = size;
    while remaining > 0 {
        let n = match from.read(&mut buffer) {
            Ok(0) => return Err(unreadable(io::ErrorKind::UnexpectedEof.into())),
            Ok(n) => n,
            Err(e) => return Err(unreadable(e)),
        };
        io::Write::write_all(&mut program, &buffer[..n]).map_err(failed(remaining))?;
        remaining = remaining.saturating_sub(n as u64);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    const MEMBER: &str = "etcd-v3.7.0-linux-amd64/etcd";

    /// A header with exactly this name: the tar crate's own API refuses `..`.
    fn header(name: &str, kind: tar::EntryType, size: u64) -> tar::Header {
        let mut header = tar::Header::new_gnu();
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.set_entry_type(kind);
        header.set_size(size);
        header.set_mode(0o4777);
        header.set_cksum();
        header
    }

    fn extract(
        build: impl FnOnce(&mut tar::Builder<Vec<u8>>),
    ) -> (tempfile::TempDir, Result<(), String>) {
        let dir = tempfile::tempdir().unwrap();
        let mut tar = tar::Builder::new(Vec::new());
        build(&mut tar);
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        io::Write::write_all(&mut gz, &tar.into_inner().unwrap()).unwrap();
        let archive = dir.path().join("etcd.tar.gz.part");
        fs::write(&archive, gz.finish().unwrap()).unwrap();
        fs::create_dir(dir.path().join("out")).unwrap();
        let result = extract_program(&archive, MEMBER, &dir.path().join("out/etcd"))
            .map_err(|e| e.to_string());
        (dir, result)
    }

    #[test]
    fn only_the_named_member_is_extracted() {
        let (dir, result) = extract(|tar| {
            tar.append(
                &header("etcd-v3.7.0-linux-amd64/", tar::EntryType::Directory, 0),
                &[][..],
            )
            .unwrap();
            tar.append(&header("../etcd", tar::EntryType::Regular, 4), &b"evil"[..])
                .unwrap();
            tar.append(&header("/etcd", tar::EntryType::Regular, 4), &b"evil"[..])
                .unwrap();
            tar.append(&header(MEMBER, tar::EntryType::Regular, 4), &b"good"[..])
                .unwrap();
            tar.append(&header(MEMBER, tar::EntryType::Regular, 4), &b"evil"[..])
                .unwrap();
        });
        result.unwrap();
        assert_eq!(fs::read(dir.path().join("out/etcd")).unwrap(), b"good");
        assert_eq!(
            fs::metadata(dir.path().join("out/etcd"))
                .unwrap()
                .permissions()
                .mode()
                & 0o7777,
            0o755
        );
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn only_a_regular_file_is_extracted() {
        for kind in [
            tar::EntryType::Symlink,
            tar::EntryType::Link,
            tar::EntryType::Fifo,
            tar::EntryType::GNUSparse,
        ] {
            let (dir, result) =
                extract(|tar| tar.append(&header(MEMBER, kind, 0), &[][..]).unwrap());
            let error = result.unwrap_err();
            assert!(
                error.ends_with("etcd in it is not a regular file"),
                "{error}"
            );
            assert!(!dir.path().join("out/etcd").exists());
        }
    }

    #[test]
    fn sizes_are_bounded() {
        let (_dir, result) = extract(|tar| {
            tar.append(&header(MEMBER, tar::EntryType::Regular, 2 << 30), &[][..])
                .unwrap()
        });
        assert!(result.unwrap_err().contains("bytes large"));
    }

    #[test]
    fn damaged_archive_is_an_error() {
        let (_dir, result) = extract(|_| {});
        assert!(
            result
                .unwrap_err()
                .starts_with("unexpected content of etcd.tar.gz: there is no ")
        );
        let (_dir, result) = extract(|tar| {
            tar.append(
                &header(MEMBER, tar::EntryType::Regular, 4096),
                &b"short"[..],
            )
            .unwrap()
        });
        assert!(result.unwrap_err().contains("cannot be read"));
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a"), "<html>no gzip</html>").unwrap();
        let error =
            extract_program(&dir.path().join("a"), MEMBER, &dir.path().join("etcd")).unwrap_err();
        assert!(error.to_string().contains("cannot be read"), "{error}");
    }
}
