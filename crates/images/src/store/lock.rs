//! The store's lock: shared while blobs are used, exclusive while they are removed.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use super::{ImageStore, ImageStoreError};

/// The interval between attempts to take a lock: a blocking call on a shared file system could not be cancelled.
const STORE_LOCK_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Protects all blobs from removal until it is dropped.
#[derive(Debug)]
pub struct SharedLock {
    _lock: Option<File>,
}

/// The right to remove blobs.
#[derive(Debug)]
pub(super) struct ExclusiveLock {
    /// `None` if the file system has no locks.
    lock: Option<File>,
}

impl ExclusiveLock {
    /// Whether no pull can be running. False if the file system has no locks.
    pub fn is_exclusive(&self) -> bool {
        self.lock.is_some()
    }
}

impl ImageStore {
    /// Takes the shared lock, which protects blobs from removal.
    pub async fn lock_shared(&self) -> Result<SharedLock, ImageStoreError> {
        let path = self.root.join("use.lock");
        let lock = open(&path)?;
        loop {
            match lock.try_lock_shared() {
                Ok(()) => return Ok(SharedLock { _lock: Some(lock) }),
                Err(TryLockError::WouldBlock) => tokio::time::sleep(STORE_LOCK_POLL_INTERVAL).await,
                // No locks on this file system: garbage collection keeps recent files instead.
                Err(TryLockError::Error(_)) => return Ok(SharedLock { _lock: None }),
            }
        }
    }

    /// Like [`lock_shared`](Self::lock_shared), but blocking. If no other process uses the store, it first removes temporary
    /// files of killed processes.
    pub fn lock_shared_blocking(&self) -> Result<SharedLock, ImageStoreError> {
        let lock = open(&self.root.join("use.lock"))?;
        if lock.try_lock().is_ok() {
            self.remove_temporary_files();
            let _ = lock.unlock();
        }
        Ok(SharedLock {
            _lock: lock.lock_shared().is_ok().then_some(lock),
        })
    }

    /// Waits for the exclusive lock.
    pub(super) async fn lock_exclusive(
        &self,
        timeout: Duration,
    ) -> Result<ExclusiveLock, ImageStoreError> {
        let path = self.root.join("use.lock");
        let lock = open(&path)?;
        let started = Instant::now();
        loop {
            match lock.try_lock() {
                Ok(()) => return Ok(ExclusiveLock { lock: Some(lock) }),
                Err(TryLockError::WouldBlock) if started.elapsed() < timeout => {
                    tokio::time::sleep(STORE_LOCK_POLL_INTERVAL).await;
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(ImageStoreError::Busy(self.root.clone()));
                }
                Err(TryLockError::Error(_)) => return Ok(ExclusiveLock { lock: None }),
            }
        }
    }
}

pub(super) fn open(path: &Path) -> Result<File, ImageStoreError> {
    open_file(path).map_err(|e| ImageStoreError::io("open", path, e))
}

/// Opens a file for locks. NFS requires a descriptor open for writing for an exclusive lock, and for reading for a shared one.
pub(crate) fn open_file(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
}
