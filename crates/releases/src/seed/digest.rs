//! The digest by which damaged seeds are detected: after a full disk, an interrupted copy or an edit.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{SeekFrom, seek};
use sha2::{Digest, Sha256};

/// Block size. Blocks of zeros are not hashed and holes not read: etcd allocates 64 MiB and uses a few KiB.
const DIGEST_BLOCK_SIZE: u64 = 64 * 1024;

/// A digest of all files below `dir`: their names, sizes and contents.
pub fn of_tree(dir: &Path) -> io::Result<String> {
    let mut hasher = Sha256::new();
    add_dir(dir, &mut hasher)?;
    Ok(hasher
        .finalize()
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect())
}

fn add_dir(dir: &Path, hasher: &mut Sha256) -> io::Result<()> {
    let mut entries = std::fs::read_dir(dir)?.collect::<io::Result<Vec<_>>>()?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        add(hasher, entry.file_name().as_encoded_bytes());
        if entry.file_type()?.is_dir() {
            add_dir(&entry.path(), hasher)?;
            add(hasher, b"..");
        } else {
            add_file(&File::open(entry.path())?, hasher)?;
        }
    }
    Ok(())
}

fn add_file(file: &File, hasher: &mut Sha256) -> io::Result<()> {
    let size = file.metadata()?.len();
    hasher.update(size.to_le_bytes());
    let mut buffer = vec![0; DIGEST_BLOCK_SIZE as usize];
    let mut offset = 0;
    while offset < size {
        offset = match seek(file, SeekFrom::Data(offset)) {
            Ok(data) => data - data % DIGEST_BLOCK_SIZE,
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let length = DIGEST_BLOCK_SIZE.min(size - offset) as usize;
        let block = &mut buffer[..length];
        file.read_exact_at(block, offset)?;
        if block.iter().any(|byte| *byte != 0) {
            hasher.update(offset.to_le_bytes());
            hasher.update(&*block);
        }
        offset += DIGEST_BLOCK_SIZE;
    }
    Ok(())
}

/// Adds the length too, so that different lists of names have different digests.
fn add(hasher: &mut Sha256, bytes: &[u8]) {
    hasher.update((bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_alter_the_digest_and_holes_do_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("member/wal");
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let file = File::create(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        file.write_all_at(b"record", 300_000).unwrap();
        let first = of_tree(dir.path()).unwrap();
        // The same content without holes.
        std::fs::write(&path, std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(of_tree(dir.path()).unwrap(), first);
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len((1 << 20) - 1).unwrap();
        let truncated = of_tree(dir.path()).unwrap();
        file.set_len(1 << 20).unwrap();
        assert_eq!(of_tree(dir.path()).unwrap(), first);
        file.write_all_at(b"R", 300_000).unwrap();
        let changed = of_tree(dir.path()).unwrap();
        std::fs::rename(&path, dir.path().join("member/log")).unwrap();
        let all = [first, truncated, changed, of_tree(dir.path()).unwrap()];
        assert_eq!(
            all.iter().collect::<std::collections::HashSet<_>>().len(),
            4
        );
    }
}
