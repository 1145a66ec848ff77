//! Who may remove blobs, and when.

use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use super::{Store, StoreError};

/// How often a lock that somebody else holds is tried again. Shared file systems have no other way to wait
/// that can be interrupted.
const TRY_EVERY: Duration = Duration::from_millis(100);

/// As long as it lives, no blob is removed.
#[derive(Debug)]
pub struct InUse {
    _lock: Option<File>,
}

/// The right to remove blobs.
#[derive(Debug)]
pub(super) struct Alone {
    /// None where the file system has no locks.
    lock: Option<File>,
}

impl Alone {
    /// Whether it is certain that nobody pulls.
    pub fn certain(&self) -> bool {
        self.lock.is_some()
    }
}

impl Store {
    /// Keeps blobs from being removed while they are collected or read.
    pub async fn in_use(&self) -> Result<InUse, StoreError> {
        let path = self.root.join("use.lock");
        let lock = open(&path)?;
        loop {
            match lock.try_lock_shared() {
                Ok(()) => return Ok(InUse { _lock: Some(lock) }),
                Err(TryLockError::WouldBlock) => tokio::time::sleep(TRY_EVERY).await,
                // Without locks garbage collection keeps whatever is young.
                Err(TryLockError::Error(_)) => return Ok(InUse { _lock: None }),
            }
        }
    }

    /// The same, for those who may block. What died while it wrote leaves its files to the first that finds nobody else here.
    pub fn in_use_blocking(&self) -> Result<InUse, StoreError> {
        let lock = open(&self.root.join("use.lock"))?;
        if lock.try_lock().is_ok() {
            self.sweep_unfinished();
            let _ = lock.unlock();
        }
        Ok(InUse {
            _lock: lock.lock_shared().is_ok().then_some(lock),
        })
    }

    /// Waits until nobody uses the store.
    pub(super) async fn alone(&self, patience: Duration) -> Result<Alone, StoreError> {
        let path = self.root.join("use.lock");
        let lock = open(&path)?;
        let began = Instant::now();
        loop {
            match lock.try_lock() {
                Ok(()) => return Ok(Alone { lock: Some(lock) }),
                Err(TryLockError::WouldBlock) if began.elapsed() < patience => {
                    tokio::time::sleep(TRY_EVERY).await;
                }
                Err(TryLockError::WouldBlock) => return Err(StoreError::Busy(self.root.clone())),
                Err(TryLockError::Error(_)) => return Ok(Alone { lock: None }),
            }
        }
    }
}

/// NFS wants the file open for writing to lock it alone, and for reading to share it.
pub(super) fn open(path: &Path) -> Result<File, StoreError> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(|e| StoreError::io("open", path, e))
}
