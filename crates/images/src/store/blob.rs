//! Adds blobs to the store: they are verified, flushed to disk, then renamed.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use download::{Digest, Hasher, PartialFile};
use linux::file_id::FileId;
use tempfile::{NamedTempFile, TempPath};

use super::{Grant, ImageStore, ImageStoreError, Requester, lock};
use crate::manifest::Descriptor;

const BLOB_LOCK_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Prefix of files that are being written.
pub(super) const TEMP_PREFIX: &str = ".new-";

/// Whether this process has to download a blob.
#[derive(Debug)]
pub enum BlobClaim {
    /// No: the store has it, possibly from a concurrent download, and this grant lets the requester use it.
    Present(Grant),
    /// Yes, into this file.
    Download(Box<PartialBlob>),
}

/// The partial download of a blob. After a drop the file stays, and the next attempt resumes it.
#[derive(Debug)]
pub struct PartialBlob {
    /// The bytes.
    pub file: PartialFile,
    path: PathBuf,
    target: PathBuf,
    /// On a file system without locks: a temporary file of this process, removed unless it is finished.
    temp_path: Option<TempPath>,
}

/// Writes a temporary file in the store and hashes its content.
#[derive(Debug)]
pub struct SpoolWriter {
    file: NamedTempFile,
    hasher: Hasher,
    len: u64,
}

/// A complete temporary file in the store. It is closed, because an archive may have more files than a process may have
/// descriptors.
#[derive(Debug)]
pub struct SpooledFile {
    path: TempPath,
    digest: Digest,
    len: u64,
}

impl ImageStore {
    /// Waits for concurrent downloads of this blob by requesters of the same scope, then returns whether the blob must be
    /// downloaded. A requester without access to a stored blob must download it all the same, and may not resume downloads of
    /// other scopes. Calls `waiting` once if it has to wait.
    pub async fn claim(
        &self,
        blob: &Descriptor,
        requester: &Requester,
        waiting: impl FnOnce(),
    ) -> Result<BlobClaim, ImageStoreError> {
        let scope = requester.scope().hex();
        let name = format!("{}-{}", blob.digest.hex(), &scope[..32]);
        let path = self.partial().join(name);
        let mut waiting = Some(waiting);
        loop {
            if let Some(grant) = self.present(blob, requester)? {
                return Ok(BlobClaim::Present(grant));
            }
            let file = lock::open(&path)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    if let Some(waiting) = waiting.take() {
                        waiting();
                    }
                    tokio::time::sleep(BLOB_LOCK_POLL_INTERVAL).await;
                    // Invalidates NFS's negative cache entry for the blob.
                    let _ = fs::read_dir(self.blobs());
                    continue;
                }
                Err(TryLockError::Error(_)) => return self.unlocked_partial(blob.digest),
            }
            // The locked file may have been renamed to the blob meanwhile.
            if !is_file_at(&file, &path) {
                continue;
            }
            // Or the blob was published after the check above, and `open` has created an empty file.
            if let Some(grant) = self.present(blob, requester)? {
                let _ = fs::remove_file(&path);
                return Ok(BlobClaim::Present(grant));
            }
            let resumed = tokio::task::spawn_blocking(move || PartialFile::resume(file)).await;
            let resumed = resumed.map_err(|_| ImageStoreError::Busy(self.root.clone()))?;
            let file = resumed.map_err(|e| ImageStoreError::io("read", &path, e))?;
            return Ok(self.download_claim(blob.digest, file, path, None));
        }
    }

    /// The grant that lets the requester use a blob, if the store has it.
    fn present(
        &self,
        blob: &Descriptor,
        requester: &Requester,
    ) -> Result<Option<Grant>, ImageStoreError> {
        match self.has(blob) {
            true => self.blob_grant(blob.digest, requester),
            false => Ok(None),
        }
    }

    fn unlocked_partial(&self, digest: Digest) -> Result<BlobClaim, ImageStoreError> {
        let (file, temp_path) = self.spool()?.file.into_parts();
        let path = temp_path.to_path_buf();
        let file = PartialFile::resume(file).map_err(|e| ImageStoreError::io("read", &path, e))?;
        Ok(self.download_claim(digest, file, path, Some(temp_path)))
    }

    fn download_claim(
        &self,
        digest: Digest,
        file: PartialFile,
        path: PathBuf,
        temp_path: Option<TempPath>,
    ) -> BlobClaim {
        BlobClaim::Download(Box::new(PartialBlob {
            file,
            path,
            target: self.blob_path(digest),
            temp_path,
        }))
    }

    /// A temporary file for content of unknown digest.
    pub fn spool(&self) -> Result<SpoolWriter, ImageStoreError> {
        let dir = self.partial();
        let file = tempfile::Builder::new()
            .prefix(TEMP_PREFIX)
            .tempfile_in(&dir)
            .map_err(|e| ImageStoreError::io("write to", &dir.join("."), e))?;
        Ok(SpoolWriter {
            file,
            hasher: Hasher::default(),
            len: 0,
        })
    }

    /// Adds a small blob.
    pub fn put(&self, bytes: &[u8]) -> Result<Digest, ImageStoreError> {
        let digest = Digest::of(bytes);
        let target = self.blob_path(digest);
        if fs::read(&target).is_ok_and(|found| found == bytes) {
            return Ok(digest);
        }
        self.write_durably(&target, bytes)?;
        Ok(digest)
    }

    /// Writes a file atomically and durably.
    pub(super) fn write_durably(&self, target: &Path, bytes: &[u8]) -> Result<(), ImageStoreError> {
        let mut spool = self.spool()?;
        spool
            .write_all(bytes)
            .map_err(|e| ImageStoreError::io("write", target, e))?;
        spool.close().persist(target)
    }

    /// Writes a file atomically without fsync: after a crash it may be complete, missing or empty.
    pub(super) fn write_unsynced(
        &self,
        target: &Path,
        bytes: &[u8],
    ) -> Result<(), ImageStoreError> {
        let failed = |e| ImageStoreError::io("write", target, e);
        let mut spool = self.spool()?;
        spool.write_all(bytes).map_err(failed)?;
        let path = spool.close().path;
        path.persist(target).map_err(|e| failed(e.error))
    }

    /// Makes a temporary file a blob, and returns its digest and size.
    pub fn add_spooled(&self, file: SpooledFile) -> Result<(Digest, u64), ImageStoreError> {
        let (digest, len) = (file.digest, file.len);
        let target = self.blob_path(digest);
        if !fs::metadata(&target).is_ok_and(|found| found.len() == len) {
            file.persist(&target)?;
        }
        Ok((digest, len))
    }

    /// Removes a blob if its digest is wrong; returns whether it was.
    pub fn discard_if_damaged(&self, digest: Digest) -> Result<bool, ImageStoreError> {
        let path = self.blob_path(digest);
        let failed = |e| ImageStoreError::io("read", &path, e);
        let mut file = File::open(&path).map_err(failed)?;
        let (hasher, _) = Hasher::read(&mut file).map_err(failed)?;
        let damaged = hasher.finish() != digest;
        if damaged {
            fs::remove_file(&path).map_err(|e| ImageStoreError::io("remove", &path, e))?;
        }
        Ok(damaged)
    }
}

fn is_file_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(ours), Ok(found)) => FileId::from(&ours) == FileId::from(&found),
        _ => false,
    }
}

impl PartialBlob {
    /// Classifies an error of writing the file.
    pub fn write_error(&self, source: io::Error) -> ImageStoreError {
        ImageStoreError::io("write", &self.path, source)
    }

    /// Publishes the verified blob. Blocks until it is on disk.
    pub fn finish(self) -> Result<(), ImageStoreError> {
        let failed = |e| ImageStoreError::io("write", &self.target, e);
        // A download of another scope was faster. Do not replace the file: on NFS its readers would get ESTALE.
        if fs::metadata(&self.target).is_ok_and(|found| found.len() == self.file.len()) {
            return match self.temp_path {
                Some(_) => Ok(()),
                None => fs::remove_file(&self.path)
                    .map_err(|e| ImageStoreError::io("remove", &self.path, e)),
            };
        }
        self.file.sync().map_err(failed)?;
        fs::rename(&self.path, &self.target).map_err(failed)?;
        if let Some(temp_path) = self.temp_path {
            // The file was renamed, so there is nothing to remove.
            let _ = temp_path.keep();
        }
        sync_dir(&self.target);
        Ok(())
    }
}

impl Write for SpoolWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.file.write(bytes)?;
        self.hasher.update(&bytes[..n]);
        self.len += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl SpoolWriter {
    /// Finishes the file.
    pub fn close(self) -> SpooledFile {
        SpooledFile {
            path: self.file.into_temp_path(),
            digest: self.hasher.finish(),
            len: self.len,
        }
    }
}

impl SpooledFile {
    /// Opens the file for reading.
    pub fn open(&self) -> Result<File, ImageStoreError> {
        File::open(&self.path).map_err(|e| ImageStoreError::io("read", &self.path, e))
    }

    fn persist(self, target: &Path) -> Result<(), ImageStoreError> {
        let failed = |e| ImageStoreError::io("write", target, e);
        // fsync flushes the file's data whichever descriptor wrote it.
        self.open()?.sync_all().map_err(failed)?;
        self.path.persist(target).map_err(|e| failed(e.error))?;
        sync_dir(target);
        Ok(())
    }
}

/// Makes a rename durable. Errors are ignored: some file systems cannot sync directories.
fn sync_dir(file: &Path) {
    if let Some(dir) = file.parent().and_then(|dir| File::open(dir).ok()) {
        let _ = dir.sync_all();
    }
}
