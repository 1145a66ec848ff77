//! How blobs get into the store: verified, flushed to disk, then renamed.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use linux::file_id::FileId;
use tempfile::{NamedTempFile, TempPath};

use super::{Grant, Requester, Store, StoreError, lock};
use crate::digest::{Digest, Hasher};
use crate::manifest::Descriptor;

const TRY_EVERY: Duration = Duration::from_millis(100);

/// How the names of files begin that are being written.
pub(super) const UNFINISHED: &str = ".new-";

/// Whether this process has to download a blob.
#[derive(Debug)]
pub enum Claim {
    /// No: it is there, perhaps because another process has just downloaded it, and the requester may use it by this grant.
    Present(Grant),
    /// Yes.
    Download(Box<Partial>),
}

/// A download under way. Dropped, it stays for the next attempt to resume.
#[derive(Debug)]
pub struct Partial {
    file: File,
    path: PathBuf,
    target: PathBuf,
    digest: Digest,
    hasher: Hasher,
    len: u64,
    resumed: bool,
    /// Where the file system has no locks: a file of our own, which goes if it isn't finished.
    unshared: Option<TempPath>,
}

/// A new file whose digest isn't known yet.
#[derive(Debug)]
pub struct Spool {
    file: NamedTempFile,
    hasher: Hasher,
    len: u64,
}

/// A new file that is complete. It isn't open: an archive may have more files than a process may have open.
#[derive(Debug)]
pub struct Written {
    path: TempPath,
    digest: Digest,
    len: u64,
}

impl Store {
    /// Waits until nobody else downloads this blob for the same kind of requester, and says whether there is still something
    /// to do. A blob that is here doesn't count for a requester without access to it: it has to bring the same bytes, and
    /// may not resume what others have begun. `waiting` is called once if there is somebody.
    pub async fn claim(
        &self,
        blob: &Descriptor,
        requester: &Requester,
        waiting: impl FnOnce(),
    ) -> Result<Claim, StoreError> {
        let scope = requester.scope().hex();
        let name = format!("{}-{}", blob.digest.hex(), &scope[..32]);
        let path = self.partial().join(name);
        let mut waiting = Some(waiting);
        loop {
            if self.has(blob)
                && let Some(grant) = self.blob_grant(blob.digest, requester)?
            {
                return Ok(Claim::Present(grant));
            }
            let file = lock::open(&path)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    if let Some(waiting) = waiting.take() {
                        waiting();
                    }
                    tokio::time::sleep(TRY_EVERY).await;
                    // Makes NFS look again for a name that wasn't there a moment ago.
                    let _ = fs::read_dir(self.blobs());
                    continue;
                }
                Err(TryLockError::Error(_)) => return self.unshared(blob.digest),
            }
            // The file that we locked may have become the blob, and no longer be the one at this path.
            if !still_at(&file, &path) {
                continue;
            }
            let (target, digest) = (self.blob_path(blob.digest), blob.digest);
            let resumed =
                tokio::task::spawn_blocking(move || Partial::resume(file, path, target, digest));
            return match resumed.await {
                Ok(partial) => partial.map(|partial| Claim::Download(Box::new(partial))),
                Err(_) => Err(StoreError::Busy(self.root.clone())),
            };
        }
    }

    fn unshared(&self, digest: Digest) -> Result<Claim, StoreError> {
        let spool = self.spool()?;
        let (file, path) = spool.file.into_parts();
        Ok(Claim::Download(Box::new(Partial {
            file,
            path: path.to_path_buf(),
            target: self.blob_path(digest),
            digest,
            hasher: Hasher::default(),
            len: 0,
            resumed: false,
            unshared: Some(path),
        })))
    }

    /// A new file, for content whose digest isn't known yet.
    pub fn spool(&self) -> Result<Spool, StoreError> {
        let dir = self.partial();
        let file = tempfile::Builder::new()
            .prefix(UNFINISHED)
            .tempfile_in(&dir)
            .map_err(|e| StoreError::io("write to", &dir.join("."), e))?;
        Ok(Spool {
            file,
            hasher: Hasher::default(),
            len: 0,
        })
    }

    /// Adds a small blob.
    pub fn put(&self, bytes: &[u8]) -> Result<Digest, StoreError> {
        let digest = Digest::of(bytes);
        let target = self.blob_path(digest);
        if fs::read(&target).is_ok_and(|found| found == bytes) {
            return Ok(digest);
        }
        self.write_whole(&target, bytes)?;
        Ok(digest)
    }

    /// Writes a file in one step.
    pub(super) fn write_whole(&self, target: &Path, bytes: &[u8]) -> Result<(), StoreError> {
        let mut spool = self.spool()?;
        spool
            .write_all(bytes)
            .map_err(|e| StoreError::io("write", target, e))?;
        spool.close().persist(target)
    }

    /// The same, without waiting for the disk: after a crash it may be there, missing, or empty.
    pub(super) fn write_unsynced(&self, target: &Path, bytes: &[u8]) -> Result<(), StoreError> {
        let failed = |e| StoreError::io("write", target, e);
        let mut spool = self.spool()?;
        spool.write_all(bytes).map_err(failed)?;
        let path = spool.close().path;
        path.persist(target).map_err(|e| failed(e.error))
    }

    /// Puts a new file in its place, and returns its digest and size.
    pub fn keep(&self, file: Written) -> Result<(Digest, u64), StoreError> {
        let (digest, len) = (file.digest, file.len);
        let target = self.blob_path(digest);
        if !fs::metadata(&target).is_ok_and(|found| found.len() == len) {
            file.persist(&target)?;
        }
        Ok((digest, len))
    }

    /// Removes a blob that turned out to be damaged; says whether it was.
    pub fn discard_if_damaged(&self, digest: Digest) -> Result<bool, StoreError> {
        let path = self.blob_path(digest);
        let failed = |e| StoreError::io("read", &path, e);
        let mut file = File::open(&path).map_err(failed)?;
        let (hasher, _) = hash(&mut file).map_err(failed)?;
        let damaged = hasher.finish() != digest;
        if damaged {
            fs::remove_file(&path).map_err(|e| StoreError::io("remove", &path, e))?;
        }
        Ok(damaged)
    }
}

fn still_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(ours), Ok(there)) => FileId::from(&ours) == FileId::from(&there),
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

impl Partial {
    fn resume(
        mut file: File,
        path: PathBuf,
        target: PathBuf,
        digest: Digest,
    ) -> Result<Partial, StoreError> {
        let (hasher, len) = hash(&mut file).map_err(|e| StoreError::io("read", &path, e))?;
        Ok(Partial {
            file,
            path,
            target,
            digest,
            hasher,
            len,
            resumed: len > 0,
            unshared: None,
        })
    }

    /// How much is there.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether nothing is there yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether a part of it comes from an earlier attempt.
    pub fn resumed(&self) -> bool {
        self.resumed
    }

    /// Forgets what is there.
    pub fn restart(&mut self) -> Result<(), StoreError> {
        let restart = self.file.set_len(0).and_then(|()| self.file.rewind());
        restart.map_err(|e| StoreError::io("write", &self.path, e))?;
        self.hasher = Hasher::default();
        self.len = 0;
        self.resumed = false;
        Ok(())
    }

    /// Adds what came.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        self.file
            .write_all(bytes)
            .map_err(|e| StoreError::io("write", &self.path, e))?;
        self.hasher.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// Whether everything is there and is what it should be.
    pub fn verify(&self) -> Result<(), Digest> {
        match self.hasher.clone().finish() {
            got if got == self.digest => Ok(()),
            got => Err(got),
        }
    }

    /// Puts the verified blob in its place. Blocks until it is on disk.
    pub fn finish(self) -> Result<(), StoreError> {
        let failed = |e| StoreError::io("write", &self.target, e);
        // The same blob, downloaded for others: somebody may be reading it, and NFS takes a replaced file from its readers.
        if fs::metadata(&self.target).is_ok_and(|there| there.len() == self.len) {
            return match self.unshared {
                Some(_) => Ok(()),
                None => {
                    fs::remove_file(&self.path).map_err(|e| StoreError::io("remove", &self.path, e))
                }
            };
        }
        self.file.sync_all().map_err(failed)?;
        fs::rename(&self.path, &self.target).map_err(failed)?;
        if let Some(unshared) = self.unshared {
            // There is nothing left at this path.
            let _ = unshared.keep();
        }
        sync_dir(&self.target);
        Ok(())
    }
}

impl Write for Spool {
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

impl Spool {
    /// Nothing more is written.
    pub fn close(self) -> Written {
        Written {
            path: self.file.into_temp_path(),
            digest: self.hasher.finish(),
            len: self.len,
        }
    }
}

impl Written {
    /// Reads back what was written.
    pub fn open(&self) -> Result<File, StoreError> {
        File::open(&self.path).map_err(|e| StoreError::io("read", &self.path, e))
    }

    fn persist(self, target: &Path) -> Result<(), StoreError> {
        let failed = |e| StoreError::io("write", target, e);
        // By whichever descriptor: all that was written to the file is flushed.
        self.open()?.sync_all().map_err(failed)?;
        self.path.persist(target).map_err(|e| failed(e.error))?;
        sync_dir(target);
        Ok(())
    }
}

/// Makes a rename last. Some file systems can't, and then it lasts as they like it.
fn sync_dir(file: &Path) {
    if let Some(dir) = file.parent().and_then(|dir| File::open(dir).ok()) {
        let _ = dir.sync_all();
    }
}
