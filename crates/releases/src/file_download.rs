//! Downloads one file of a release.

use std::convert::Infallible;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use console::FileProgress;
use download::{Digest, DownloadError, DownloadEvent, DownloadFailure, FileSize, PartialFile};
use reqwest::{Client, StatusCode, Url};

use crate::error::FetchError;
use crate::store::ReleaseStoreError;

/// Limit on the size of a file; those of releases are far smaller.
const MAX_RELEASE_FILE_SIZE: u64 = 2 << 30;

/// Limit on the size of a list of checksums.
const MAX_TEXT_SIZE: usize = 1 << 20;

/// A file on a server.
#[derive(Debug, Clone)]
pub struct DownloadSource {
    /// Kubernetes or etcd.
    pub product: &'static str,
    /// The version it belongs to.
    pub version: String,
    /// Its URL.
    pub url: Url,
}

/// A verified file.
#[derive(Debug)]
pub struct DownloadedFile {
    /// Its name in the release.
    pub name: String,
    /// Its path: `NAME.part`, with the server's ETag beside it in `NAME.etag`.
    pub path: PathBuf,
}

impl DownloadSource {
    /// Downloads a small text, such as a list of checksums.
    pub async fn download_text(&self, client: &Client) -> Result<String, FetchError> {
        let body = download::download_small(client, &self.url, MAX_TEXT_SIZE).await;
        let body = body.map_err(|e| self.fetch_error(e, Path::new("")))?;
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    /// Downloads the file into `dir`, or the rest of it if an earlier run has stopped.
    pub async fn download(
        &self,
        client: &Client,
        name: &str,
        digest: Digest,
        dir: &Path,
        mut progress: FileProgress,
    ) -> Result<DownloadedFile, FetchError> {
        let path = dir.join(format!("{name}.part"));
        let opened = tokio::task::spawn_blocking({
            let path = path.clone();
            move || open_partial(&path)
        });
        let opened = opened.await.unwrap_or_else(|e| Err(io::Error::other(e)));
        let mut part = opened.map_err(|e| ReleaseStoreError::writing("open", &path, None, e))?;
        let request = async |headers| {
            let request = client.get(self.url.clone()).headers(headers);
            request.send().await.map_err(DownloadFailure::connection)
        };
        let size = FileSize::AtMost(MAX_RELEASE_FILE_SIZE);
        let report = |event| match event {
            DownloadEvent::Begin { at, total } => progress.begin(at, total),
            DownloadEvent::Advance { at } => progress.advance(at),
            DownloadEvent::Note(text) => progress.note(&text),
        };
        match download::download(request, digest, size, &mut part, report).await {
            Ok(()) => {
                progress.finish(part.len());
                let name = name.to_owned();
                Ok(DownloadedFile { name, path })
            }
            Err(DownloadError {
                failure: DownloadFailure::WrongDigest(got),
                ..
            }) => {
                let _ = fs::remove_file(&path);
                Err(FetchError::Checksum {
                    file: name.to_owned(),
                    url: without_credentials(&self.url),
                    expected: digest.hex(),
                    got: got.hex(),
                })
            }
            Err(error) => Err(self.fetch_error(error, &path)),
        }
    }

    fn fetch_error(&self, error: DownloadError<Infallible>, path: &Path) -> FetchError {
        let (url, tries) = (without_credentials(&self.url), error.tries);
        let is_transient = error.failure.is_transient();
        match error.failure {
            DownloadFailure::Status(StatusCode::NOT_FOUND | StatusCode::GONE) => {
                FetchError::NoSuchVersion {
                    product: self.product,
                    version: self.version.clone(),
                    url,
                }
            }
            DownloadFailure::Status(status) if !is_transient => FetchError::Status { url, status },
            DownloadFailure::Connection(cause) if cause.is_connect() => FetchError::Unreachable {
                url,
                tries,
                source: cause.into(),
            },
            DownloadFailure::TooLarge => FetchError::TooLarge { url },
            DownloadFailure::File { missing, source } => {
                ReleaseStoreError::writing("write", path, missing, source).into()
            }
            failure => FetchError::Interrupted {
                url,
                tries,
                source: failure.into(),
            },
        }
    }
}

fn open_partial(path: &Path) -> io::Result<PartialFile> {
    let mut options = File::options();
    let file = options.read(true).write(true).create(true).truncate(false);
    let part = PartialFile::resume(file.open(path)?)?;
    Ok(part.with_etag(path.with_extension("etag")))
}

/// The URL without user name and password.
pub fn without_credentials(url: &Url) -> String {
    let mut url = url.clone();
    let _ = url.set_username("");
    let _ = url.set_password(None);
    url.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_of_a_mirror_are_not_shown() {
        let url = Url::parse("https://user:secret@mirror.example/k8s/x").unwrap();
        assert_eq!(without_credentials(&url), "https://mirror.example/k8s/x");
    }
}
