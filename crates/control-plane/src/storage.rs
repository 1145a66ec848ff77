//! Where etcd keeps the objects of a cluster.
//!
//! ```text
//! DIR/        0700
//! DIR/lock    held by the control plane that uses the directory
//! DIR/etcd/   etcd's data directory
//! ```

use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::private_file::{create_private_dir, open_private_dir, open_private_file};

const STORAGE_LOCK_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Where etcd keeps the objects of a cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClusterStorage {
    /// In memory: the objects end with the control plane.
    Memory,
    /// In this directory, with fsync: the next control plane there has the same objects. Created if it is missing.
    Disk(PathBuf),
}

/// A directory for objects, locked by this process.
#[derive(Debug)]
pub(crate) struct StorageDir {
    /// etcd's data directory.
    pub etcd: File,
    /// Closing it unlocks the directory.
    _lock: File,
}

impl StorageDir {
    /// Creates the directory if it is missing, checks that it is private, and locks it. Blocks for at most `timeout` while
    /// another control plane uses it, which may be ending.
    pub fn open(path: &Path, timeout: Duration) -> io::Result<StorageDir> {
        create_private_dir(path)?;
        open_private_dir(path)?;
        let lock = open_private_file(&path.join("lock"))?;
        let deadline = Instant::now() + timeout;
        // Other errors: on a file system without locks, etcd cannot lock its files either.
        while let Err(TryLockError::WouldBlock) = lock.try_lock() {
            if Instant::now() >= deadline {
                let text = format!("another control plane uses {}", path.display());
                return Err(io::Error::new(io::ErrorKind::ResourceBusy, text));
            }
            std::thread::sleep(STORAGE_LOCK_POLL_INTERVAL);
        }
        let etcd = path.join("etcd");
        create_private_dir(&etcd)?;
        let etcd = open_private_dir(&etcd)?;
        Ok(StorageDir { etcd, _lock: lock })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn storage_is_private_and_used_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/storage");
        let open = || StorageDir::open(&path, Duration::ZERO);
        let storage = open().unwrap();
        for dir in [path.clone(), path.join("etcd")] {
            assert_eq!(dir.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        }
        let second = open().unwrap_err().to_string();
        assert!(second.contains("another control plane uses"), "{second}");
        drop(storage);
        open().unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o750)).unwrap();
        let shared = open().unwrap_err().to_string();
        assert!(shared.contains("mode 0750"), "{shared}");
    }
}
