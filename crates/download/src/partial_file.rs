//! The file of a download, with the bytes received so far.

use std::fs::{self, File};
use std::io::{self, Seek, Write};
use std::path::PathBuf;

use crate::digest::{Digest, Hasher};

/// A partial download. The file stays after a drop, so that a later download can resume it.
#[derive(Debug)]
pub struct PartialFile {
    file: File,
    hasher: Hasher,
    len: u64,
    etag: Option<String>,
    etag_path: Option<PathBuf>,
}

impl PartialFile {
    /// Continues `file`. Blocks while it hashes the bytes of earlier downloads.
    pub fn resume(mut file: File) -> io::Result<PartialFile> {
        let (hasher, len) = Hasher::read(&mut file)?;
        Ok(PartialFile {
            file,
            hasher,
            len,
            etag: None,
            etag_path: None,
        })
    }

    /// Keeps the server's ETag in the file `path`, for later downloads.
    pub fn with_etag(self, path: PathBuf) -> PartialFile {
        let etag = fs::read_to_string(&path).ok();
        PartialFile {
            etag: etag.filter(|etag| !etag.is_empty()),
            etag_path: Some(path),
            ..self
        }
    }

    /// The number of received bytes.
    #[allow(clippy::len_without_is_empty, reason = "no caller needs `is_empty`")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The digest of the received bytes.
    pub fn digest(&self) -> Digest {
        self.hasher.clone().finish()
    }

    /// Blocks until the file is on disk.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_all()
    }

    /// The ETag of the content that the received bytes belong to.
    pub(crate) fn etag(&self) -> Option<&str> {
        self.etag.as_deref()
    }

    /// Drops all bytes. The next ones begin the content with this ETag.
    pub(crate) fn restart(&mut self, etag: Option<String>) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.rewind()?;
        (self.hasher, self.len) = (Hasher::default(), 0);
        self.etag = etag;
        // Ignore errors: without an ETag, the range is requested all the same, and the digest detects a change.
        let _ = match (&self.etag_path, &self.etag) {
            (Some(path), Some(etag)) => fs::write(path, etag),
            (Some(path), None) => fs::remove_file(path),
            (None, _) => Ok(()),
        };
        Ok(())
    }

    pub(crate) fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.hasher.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }
}
