//! The digest that detects damaged seeds: full disks, interrupted copies and edited files.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{SeekFrom, seek};
use sha2::{Digest, Sha256};

/// Block size. Blocks of zeros are not hashed and holes not read: etcd allocates 64 MiB and uses a few KiB.
const BLOCK: u64 = 64 * 1024;

/// A digest of all files below `dir`: their names, sizes and contents.
pub fn of(dir: &Path) -> io::Result<String> {
    let mut sum = Sha256::new();
    add_dir(dir, &mut sum)?;
    Ok(sum.finalize().iter().map(|b| format!("{b:02x}")).collect())
}

fn add_dir(dir: &Path, sum: &mut Sha256) -> io::Result<()> {
    let mut entries = std::fs::read_dir(dir)?.collect::<io::Result<Vec<_>>>()?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        add(sum, entry.file_name().as_encoded_bytes());
        if entry.file_type()?.is_dir() {
            add_dir(&entry.path(), sum)?;
            add(sum, b"..");
        } else {
            add_file(&File::open(entry.path())?, sum)?;
        }
    }
    Ok(())
}

fn add_file(file: &File, sum: &mut Sha256) -> io::Result<()> {
    let size = file.metadata()?.len();
    sum.update(size.to_le_bytes());
    let mut buffer = vec![0; BLOCK as usize];
    let mut at = 0;
    while at < size {
        at = match seek(file, SeekFrom::Data(at)) {
            Ok(data) => data - data % BLOCK,
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let length = BLOCK.min(size - at) as usize;
        let block = &mut buffer[..length];
        file.read_exact_at(block, at)?;
        if block.iter().any(|byte| *byte != 0) {
            sum.update(at.to_le_bytes());
            sum.update(&*block);
        }
        at += BLOCK;
    }
    Ok(())
}

/// Adds the length too, so that different lists of names have different digests.
fn add(sum: &mut Sha256, bytes: &[u8]) {
    sum.update((bytes.len() as u64).to_le_bytes());
    sum.update(bytes);
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
        let first = of(dir.path()).unwrap();
        // The same content without holes.
        std::fs::write(&path, std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(of(dir.path()).unwrap(), first);
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len((1 << 20) - 1).unwrap();
        let truncated = of(dir.path()).unwrap();
        file.set_len(1 << 20).unwrap();
        assert_eq!(of(dir.path()).unwrap(), first);
        file.write_all_at(b"R", 300_000).unwrap();
        let changed = of(dir.path()).unwrap();
        std::fs::rename(&path, dir.path().join("member/log")).unwrap();
        let all = [first, truncated, changed, of(dir.path()).unwrap()];
        assert_eq!(
            all.iter().collect::<std::collections::HashSet<_>>().len(),
            4
        );
    }
}
