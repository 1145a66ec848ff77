//! A partial download: `NAME.part`, and `NAME.etag` with the server's ETag, with which a later run can resume it.

use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};
use tokio::fs::{File, OpenOptions};
use tokio::io::{AsyncReadExt, AsyncSeekExt, AsyncWriteExt, BufWriter};

use crate::store::ReleaseStoreError;

/// A SHA-256 digest.
pub type Sha256Digest = [u8; 32];

/// Received bytes are hashed at once and written in blocks of this size.
const BLOCK_SIZE: usize = 1 << 20;

/// A partial download.
#[derive(Debug)]
pub struct PartialDownload {
    name: String,
    path: PathBuf,
    file: BufWriter<File>,
    hasher: Sha256,
    len: u64,
    /// The complete size, if the server has sent it.
    total: Option<u64>,
    etag: Option<String>,
    /// It consists of the bytes of several responses.
    is_resumed: bool,
}

impl PartialDownload {
    /// Opens the partial download of `name` in `dir`, with the bytes of an earlier run.
    pub async fn open(dir: &Path, name: &str) -> Result<PartialDownload, ReleaseStoreError> {
        let path = dir.join(format!("{name}.part"));
        let failed = |e| ReleaseStoreError::writing("open", &path, None, e);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .await
            .map_err(failed)?;
        let mut hasher = Sha256::new();
        let mut len = 0;
        let mut block = vec![0; BLOCK_SIZE];
        loop {
            match file.read(&mut block).await.map_err(failed)? {
                0 => break,
                n => {
                    hasher.update(&block[..n]);
                    len += n as u64;
                }
            }
        }
        let etag = tokio::fs::read_to_string(etag_path(&path))
            .await
            .ok()
            .filter(|etag| !etag.is_empty());
        let file = BufWriter::with_capacity(BLOCK_SIZE, file);
        Ok(PartialDownload {
            name: name.to_owned(),
            path,
            file,
            hasher,
            len,
            total: None,
            etag,
            is_resumed: len > 0,
        })
    }

    /// The name of the file when it is complete.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The path of the partial file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The number of received bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The server's ETag.
    pub fn etag(&self) -> Option<&str> {
        self.etag.as_deref()
    }

    /// Whether it consists of several responses.
    pub fn is_resumed(&self) -> bool {
        self.is_resumed
    }

    /// The digest of the bytes so far.
    pub fn digest(&self) -> Sha256Digest {
        self.hasher.clone().finalize().into()
    }

    /// Marks that the next bytes continue the present ones.
    pub fn resume(&mut self) {
        self.is_resumed = true;
    }

    /// Sets the complete size.
    pub fn set_total(&mut self, total: Option<u64>) {
        self.total = total;
    }

    /// Drops all bytes. The next ones begin the content with this ETag.
    pub async fn restart(&mut self, etag: Option<String>) -> Result<(), ReleaseStoreError> {
        // Otherwise the rest of the buffer would be written into the new file.
        self.flush().await?;
        let emptied = async {
            self.file.get_mut().set_len(0).await?;
            self.file.seek(io::SeekFrom::Start(0)).await
        };
        emptied
            .await
            .map_err(|e| ReleaseStoreError::writing("write", &self.path, None, e))?;
        (self.hasher, self.len, self.total, self.is_resumed) = (Sha256::new(), 0, None, false);
        self.etag = etag;
        // Ignore errors: without an ETag, the range is requested all the same, and the digest detects a change.
        let path = etag_path(&self.path);
        let _ = match &self.etag {
            Some(etag) => tokio::fs::write(path, etag).await,
            None => tokio::fs::remove_file(path).await,
        };
        Ok(())
    }

    /// Appends bytes, and adds them to the digest.
    pub async fn append(&mut self, bytes: &[u8]) -> Result<(), ReleaseStoreError> {
        self.hasher.update(bytes);
        self.len += bytes.len() as u64;
        let written = self.file.write_all(bytes).await;
        written.map_err(|e| self.failed(e))
    }

    /// Writes buffered bytes to the file.
    pub async fn flush(&mut self) -> Result<(), ReleaseStoreError> {
        let flushed = self.file.flush().await;
        flushed.map_err(|e| self.failed(e))
    }

    /// Removes the partial file and its ETag.
    pub fn remove(&self) {
        let _ = std::fs::remove_file(&self.path);
        let _ = std::fs::remove_file(etag_path(&self.path));
    }

    fn failed(&self, error: io::Error) -> ReleaseStoreError {
        // Some received bytes may still be buffered, so use the size of the file.
        let written = std::fs::metadata(&self.path).map_or(0, |metadata| metadata.len());
        let needed = self.total.map(|total| total.saturating_sub(written));
        ReleaseStoreError::writing("write", &self.path, needed, error)
    }
}

fn etag_path(part: &Path) -> PathBuf {
    part.with_extension("etag")
}

/// A digest in hexadecimal.
pub fn hex(digest: &Sha256Digest) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Parses a digest in hexadecimal.
pub fn parse_hex(text: &str) -> Option<Sha256Digest> {
    let mut digest = Sha256Digest::default();
    if text.len() != 64 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    for (byte, pair) in digest.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sha256(bytes: &[u8]) -> Sha256Digest {
        Sha256::digest(bytes).into()
    }

    #[test]
    fn next_run_continues_partial_download() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut part = PartialDownload::open(dir.path(), "etcd.tar.gz")
                .await
                .unwrap();
            part.append(b"from another mirror").await.unwrap();
            part.restart(Some("\"1\"".into())).await.unwrap();
            part.append(b"one, ").await.unwrap();
            part.flush().await.unwrap();
            assert!(!part.is_resumed());

            let mut part = PartialDownload::open(dir.path(), "etcd.tar.gz")
                .await
                .unwrap();
            assert_eq!(
                (part.len(), part.etag(), part.is_resumed()),
                (5, Some("\"1\""), true)
            );
            part.append(b"two").await.unwrap();
            part.flush().await.unwrap();
            assert_eq!(part.digest(), sha256(b"one, two"));
            assert_eq!(std::fs::read(part.path()).unwrap(), b"one, two");
            part.remove();
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        });
    }

    #[test]
    fn digests_round_trip_as_hex() {
        let digest = sha256(b"");
        assert!(hex(&digest).starts_with("e3b0c442"));
        assert_eq!(parse_hex(&hex(&digest)), Some(digest));
        assert_eq!(parse_hex(&hex(&digest).to_uppercase()), Some(digest));
        for bad in [
            "",
            "e3b0",
            &"g".repeat(64),
            &"+1".repeat(32),
            &"ä".repeat(32),
        ] {
            assert_eq!(parse_hex(bad), None, "{bad}");
        }
    }
}
