//! The identity of a file regardless of its name, to compare descriptors of files and namespaces.

use std::fs::Metadata;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use rustix::fs::Stat;

/// Device and inode: unique among all files that exist at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    /// The id of an open file.
    pub fn of(file: impl AsFd) -> io::Result<Self> {
        Ok(Self::from(&rustix::fs::fstat(file)?))
    }
}

impl From<&Metadata> for FileId {
    fn from(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
        }
    }
}

impl From<&Stat> for FileId {
    fn from(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_one_file_have_one_id() {
        let dir = tempfile::tempdir().unwrap();
        let [first, second, other] = ["first", "second", "other"].map(|name| dir.path().join(name));
        std::fs::write(&first, "").unwrap();
        std::fs::hard_link(&first, &second).unwrap();
        std::fs::write(&other, "").unwrap();
        let id = |path| FileId::from(&std::fs::metadata(path).unwrap());
        assert_eq!(id(&first), id(&second));
        assert_ne!(id(&first), id(&other));
        assert_eq!(
            FileId::of(std::fs::File::open(&first).unwrap()).unwrap(),
            id(&first)
        );
        assert_eq!(FileId::from(&rustix::fs::stat(&first).unwrap()), id(&first));
    }
}
