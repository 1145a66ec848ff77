//! Adds blobs to the store: they are verified, flushed to disk, then renamed.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use linux::file_id::FileId;
use tempfile::{NamedTempFile, TempPath};

use super::{Grant, ImageStore, ImageStoreError, Requester, lock};
use crate::digest::{Digest, Hasher};
use crate::manifest::Descriptor;

const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(100);

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

/// A partial download. After a drop the file stays, and the next attempt resumes it.
#[derive(Debug)]
pub struct PartialBlob {
    file: File,
    path: PathBuf,
    target: PathBuf,
    digest: Digest,
    hasher: Hasher,
    len: u64,
    resumed: bool,
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
            if self.has(blob)
                && let Some(grant) = self.blob_grant(blob.digest, requester)?
            {
                return Ok(BlobClaim::Present(grant));
            }
            let file = lock::open(&path)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    if let Some(waiting) = waiting.take() {
                        waiting();
                    }
                    tokio::time::sleep(LOCK_POLL_INTERVAL).await;
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
            let (target, digest) = (self.blob_path(blob.digest), blob.digest);
            let resumed = tokio::task::spawn_blocking(move || {
                PartialBlob::resume(file, path, target, digest)
            });
            return match resumed.await {
                Ok(partial) => partial.map(|partial| BlobClaim::Download(Box::new(partial))),
                Err(_) => Err(ImageStoreError::Busy(self.root.clone())),
            };
        }
    }

    fn unlocked_partial(&self, digest: Digest) -> Result<BlobClaim, ImageStoreError> {
        let spool = self.spool()?;
        let (file, path) = spool.file.into_parts();
        Ok(BlobClaim::Download(Box::new(PartialBlob {
            file,
            path: path.to_path_buf(),
            target: self.blob_path(digest),
            digest,
            hasher: Hasher::default(),
            len: 0,
            resumed: false,
            temp_path: Some(path),
        })))
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
        let (hasher, _) = hash(&mut file).map_err(failed)?;
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

fn hash(file: &mut File) -> io::Result<(Hasher, u64)> {
    let (mut hasher, mut len, mut buffer) = (Hasher::default(), 0, vec![0; 256 << 10]);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok((hasher, len)),
            n => {
                hasher.update(&buffer[..n]);
                len += n as u64;
            }
        }
    }
}

impl PartialBlob {
    fn resume(
        mut file: File,
        path: PathBuf,
        target: PathBuf,
        digest: Digest,
    ) -> Result<PartialBlob, ImageStoreError> {
        let (hasher, len) = hash(&mut file).map_err(|e| ImageStoreError::io("read", &path, e))?;
        Ok(PartialBlob {
            file,
            path,
            target,
            digest,
            hasher,
            len,
            resumed: len > 0,
            temp_path: None,
        })
    }

    /// The number of downloaded bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether no byte is downloaded yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether a part comes from an earlier attempt.
    pub fn resumed(&self) -> bool {
        self.resumed
    }

    /// Discards the downloaded bytes.
    pub fn restart(&mut self) -> Result<(), ImageStoreError> {
        let restart = self.file.set_len(0).and_then(|()| self.file.rewind());
        restart.map_err(|e| ImageStoreError::io("write", &self.path, e))?;
        self.hasher = Hasher::default();
        self.len = 0;
        self.resumed = false;
        Ok(())
    }

    /// Appends downloaded bytes.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), ImageStoreError> {
        self.file
            .write_all(bytes)
            .map_err(|e| ImageStoreError::io("write", &self.path, e))?;
        self.hasher.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// Checks the digest; `Err` is the actual one.
    pub fn verify(&self) -> Result<(), Digest> {
        match self.hasher.clone().finish() {
            got if got == self.digest => Ok(()),
            got => Err(got),
        }
    }

    /// Publishes the verified blob. Blocks until it is on disk.
    pub fn finish(self) -> Result<(), ImageStoreError> {
        let failed = |e| ImageStoreError::io("write", &self.target, e);
        // A download of another scope was faster. Do not replace the file: on NFS its readers would get ESTALE.
        if fs::metadata(&self.target).is_ok_and(|found| found.len() == self.len) {
            return match self.temp_path {
                Some(_) => Ok(()),
                None => fs::remove_file(&self.path)
                    .map_err(|e| ImageStoreError::io("remove", &self.path, e)),
            };
        }
        self.file.sync_all().map_err(failed)?;
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
