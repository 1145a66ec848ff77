//! The seed: a copy of etcd's data directory that already contains upstream's bootstrap objects
//! (namespaces, bootstrap RBAC, priority classes, default service accounts).
//!
//! Without it the API server of a new cluster spends two seconds writing them one by one. A seed contains no secrets: each
//! cluster has its own keys and CAs.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::{SeekFrom, seek};

/// The directory that etcd creates in its data directory.
const MEMBER: &str = "member";

/// Copies the seed into etcd's data directory `store`, unless etcd has data there already. Renames the complete copy, so that an
/// interrupted copy is not mistaken for etcd's data.
pub fn install(seed: &Path, store: &Path) -> io::Result<()> {
    if store.join(MEMBER).exists() {
        return Ok(());
    }
    let copy_path = store.join("member.new");
    match std::fs::remove_dir_all(&copy_path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => copy(&seed.join(MEMBER), &copy_path)?,
    }
    sync(&copy_path)?;
    std::fs::rename(&copy_path, store.join(MEMBER))?;
    File::open(store)?.sync_all()
}

/// Flushes all files below `dir` to disk.
fn sync(dir: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        match path.is_dir() {
            true => sync(&path)?,
            false => File::open(&path)?.sync_all()?,
        }
    }
    File::open(dir)?.sync_all()
}

/// Copies etcd's data directory `from` to the new directory `to`, keeping holes: etcd preallocates 64 MiB for its
/// log and uses a few KiB of it.
pub fn copy(from: &Path, to: &Path) -> io::Result<()> {
    std::fs::create_dir(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        let kind = entry.file_type()?;
        if kind.is_dir() {
            copy(&entry.path(), &target)?;
        } else if kind.is_file() {
            copy_sparse(&entry.path(), &target)?;
        }
    }
    // etcd requires mode 0700.
    std::fs::set_permissions(to, std::os::unix::fs::PermissionsExt::from_mode(0o700))
}

fn copy_sparse(from: &Path, to: &Path) -> io::Result<()> {
    let (source, mut target) = (File::open(from)?, File::create_new(to)?);
    let size = source.metadata()?.len();
    target.set_len(size)?;
    let mut buffer = vec![0; BLOCK];
    let mut at = 0;
    while at < size {
        at = match seek(&source, SeekFrom::Data(at)) {
            Ok(data) => data,
            // The rest is a hole.
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = seek(&source, SeekFrom::Hole(at))?.min(size);
        copy_range(&source, &mut target, at, end, &mut buffer)?;
        at = end;
    }
    Ok(())
}

const BLOCK: usize = 64 * 1024;

/// Copies the bytes from `at` to `end` except for blocks of zeros: some file systems report preallocated space as data.
fn copy_range(
    source: &File,
    target: &mut File,
    mut at: u64,
    end: u64,
    buffer: &mut [u8],
) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    while at < end {
        let length = usize::try_from(end - at).unwrap_or(BLOCK).min(BLOCK);
        let count = source.read_at(&mut buffer[..length], at)?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if buffer[..count].iter().any(|byte| *byte != 0) {
            target.write_all_at(&buffer[..count], at)?;
        }
        at += count as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, MetadataExt};

    #[test]
    fn copy_keeps_holes_and_existing_store() {
        let dir = tempfile::tempdir().unwrap();
        let from = dir.path().join("from");
        std::fs::create_dir_all(from.join("member/wal")).unwrap();
        let file = File::create(from.join("member/wal/0.wal")).unwrap();
        file.set_len(64 << 20).unwrap();
        file.write_all_at(b"head", 0).unwrap();
        file.write_all_at(b"middle", 32 << 20).unwrap();
        let to = dir.path().join("to");
        copy(&from, &to).unwrap();

        let copied = to.join("member/wal/0.wal");
        let meta = std::fs::metadata(&copied).unwrap();
        assert_eq!(meta.len(), 64 << 20);
        assert!(meta.blocks() * 512 < 1 << 20, "{} blocks", meta.blocks());
        assert_eq!(
            std::fs::read(&copied).unwrap(),
            std::fs::read(from.join("member/wal/0.wal")).unwrap()
        );

        let store = dir.path().join("store");
        std::fs::create_dir_all(store.join("member.new/interrupted")).unwrap();
        install(&from, &store).unwrap();
        assert!(store.join("member/wal/0.wal").exists());
        assert_eq!(std::fs::read_dir(&store).unwrap().count(), 1);
        std::fs::write(store.join("member/wal/1.wal"), "new objects").unwrap();
        install(&from, &store).unwrap();
        assert!(store.join("member/wal/1.wal").exists());
        assert!(
            copy(&from, &to).is_err(),
            "an existing copy is not overwritten"
        );
    }
}
